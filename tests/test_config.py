"""The configurations in the repository, what is refused in one, and the flags jobs get from it."""

import copy
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dloop.cli import UserError
from dloop.config import Configuration, command_line, main
from dloop.reporting.collect import read_rows

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "workflow/schemas/config.schema.yaml"


def load(name):
    return yaml.safe_load((ROOT / "config" / name).read_text(encoding="utf-8"))


@pytest.fixture
def paper():
    return load("config.yaml")


@pytest.fixture
def demo():
    return load("demo.yaml")


def test_what_the_snakefile_imports_leaves_torch_alone():
    code = "import sys, dloop.cli, dloop.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def refusal(values):
    with pytest.raises(UserError) as caught:
        Configuration(values, SCHEMA)
    return str(caught.value)


def rows(values):
    return [(row.target, row.host, row.setting, row.draft) for row in Configuration(values, SCHEMA).experiments]


QWEN3, MTP = ("qwen3-4b", "qwen3-8b"), ("qwen3.5-9b", "gemma4-12b")
PAPER_SETTINGS = {
    "dflash": ("released", "dloop", "released-ddtree", "dloop-ddtree"),
    "dspark": ("released", "dloop", "released-dartree", "dloop-dartree"),
    "domino": ("released", "dloop", "released-dartree", "dloop-dartree"),
    "eagle3": ("released", "dloop"),
    "mtp": ("released", "dloop"),
}


def test_paper_rows_are_settings_by_targets(paper):
    expected = [
        (target, host, setting, "published" if setting.startswith("dloop") else "released")
        for host, settings in PAPER_SETTINGS.items()
        for target in (MTP if host == "mtp" else QWEN3)
        for setting in settings
    ]
    assert rows(paper) == expected
    assert len(expected) == 32


@pytest.mark.parametrize(
    ("target", "host", "setting", "flags"),
    [
        ("qwen3-4b", "dflash", "released", ""),
        ("qwen3-8b", "dflash", "dloop", "--loop-gate -0.5"),
        ("qwen3-4b", "dflash", "released-ddtree", "--tree-budget 256"),
        ("qwen3-4b", "dflash", "dloop-ddtree", "--tree-budget 256 --stage-tree-budget 64 --loop-gate -0.5"),
        ("qwen3-8b", "dspark", "released-dartree", "--tree-budget 64 --tree-width 12 --tree-beta -0.2"),
        ("qwen3-4b", "domino", "dloop-dartree", "--tree-budget 64 --tree-width 12 --tree-beta -0.2 --loop-gate -0.5"),
        ("qwen3-4b", "eagle3", "released", ""),
        ("qwen3-4b", "eagle3", "dloop", "--loop-gate -0.5 --stage-tree-budget 48"),
        ("qwen3-8b", "eagle3", "dloop", "--loop-gate -0.75 --stage-tree-budget 96"),
        ("qwen3.5-9b", "mtp", "released", "--mtp-k 3"),
        ("gemma4-12b", "mtp", "dloop", "--mtp-k 6 --loop-gate -0.5"),
    ],
)
def test_decoding_flags_of_the_paper_are_the_release_s(paper, target, host, setting, flags):
    draft = "published" if setting.startswith("dloop") else "released"
    line = command_line(Configuration(paper, SCHEMA).evaluation_flags(target, host, setting, draft))
    source = Configuration(paper, SCHEMA).draft_source(target, host, draft)
    assert line.split(f"--draft-model {source}")[1].strip() == flags


def test_loop_draft_and_control_choose_the_rows(paper):
    paper |= {"loop_draft": "trained", "control": True}
    assert [row[2:] for row in rows(paper)[:5]] == [
        ("released", "released"),
        ("dloop", "trained"),
        ("released-ddtree", "released"),
        ("dloop-ddtree", "trained"),
        ("dloop", "control"),
    ]


def test_what_is_trained(paper, demo):
    assert Configuration(paper, SCHEMA).trained_drafts() == [
        (target, host, "trained") for host in PAPER_SETTINGS for target in (MTP if host == "mtp" else QWEN3)
    ]
    drafts = [draft for _, _, draft in Configuration(demo, SCHEMA).trained_drafts()]
    assert drafts == ["released", "trained", "control"]


def test_the_paper_has_eight_benchmarks_in_the_order_of_its_tables(paper):
    names = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca"]
    configuration = Configuration(paper, SCHEMA)
    assert configuration.benchmarks == names
    assert [configuration.dataset(name) for name in names] == names


def test_a_row_adds_a_row_and_flags_for_a_target_replace_its_flags(paper):
    paper["settings"]["dflash"]["dloop-small"] = {
        "draft": "loop",
        "flags": {"loop_gate": -0.5, "tree_budget": 256, "stage_tree_budget": 64},
        "flags_for": {"qwen3-8b": {"loop_gate": -0.75, "tree_budget": 128}},
    }
    configuration = Configuration(paper, SCHEMA)
    assert len(configuration.experiments) == 34
    small = configuration.evaluation_flags("qwen3-4b", "dflash", "dloop-small", "published")
    large = configuration.evaluation_flags("qwen3-8b", "dflash", "dloop-small", "published")
    assert (small["loop_gate"], small["tree_budget"], small["stage_tree_budget"]) == (-0.5, 256, 64)
    assert (large["loop_gate"], large["tree_budget"]) == (-0.75, 128)
    assert "stage_tree_budget" not in large


def test_evaluation_flags_of_the_paper(paper):
    flags = Configuration(paper, SCHEMA).evaluation_flags("qwen3-8b", "dflash", "dloop", "published")
    assert flags == {
        "model": "Qwen/Qwen3-8B",
        "max_new_tokens": 2048,
        "dtype": "bfloat16",
        "draft_model": "naver-ai/DLoop-DFlash-Qwen3-8B",
        "target_runtime": "library",
        "loop_gate": -0.5,
    }


def test_a_baseline_has_no_flags_that_need_a_baseline(demo):
    demo["evaluation"] |= {"require_lossless": True, "mtbench_history": "baseline"}
    configuration = Configuration(demo, SCHEMA)
    assert not {"require_lossless", "mtbench_history"} & configuration.baseline_flags("tiny").keys()
    assert configuration.evaluation_flags("tiny", "dflash", "dloop", "trained")["require_lossless"] is True


def test_a_revision_reaches_every_stage_that_loads_the_target(paper):
    paper["targets"]["qwen3-4b"]["revision"] = "abc123"
    configuration = Configuration(paper, SCHEMA)
    for flags in (
        configuration.baseline_flags("qwen3-4b"),
        configuration.regeneration_flags("qwen3-4b"),
        configuration.training_flags("qwen3-4b", "dflash", "trained"),
    ):
        assert flags["revision"] == "abc123"
    assert "revision" not in configuration.baseline_flags("qwen3-8b")


SHARED = (
    "--chat-template qwen --max-length 4096 --num-epochs 1 --batch-size 1 --global-batch-size 64 "
    "--learning-rate 0.0006 --warmup-ratio 0.04 --max-grad-norm 1.0 --seed 42 --dtype bfloat16 "
    "--attention-backend flex_attention "
)
UNROLLED = (
    "--max-length 4096 --num-epochs 1 --batch-size 1 --global-batch-size 64 --learning-rate 0.0001 "
    "--warmup-ratio 0.015 --max-grad-norm 0.5 --seed 42 --dtype bfloat16 "
)


@pytest.mark.parametrize(
    ("target", "host", "flags"),
    [
        (
            "qwen3-4b",
            "dflash",
            SHARED + "--num-anchors 512 --loss-decay-gamma 7.0 --position-offset-max 28672 --dloop-max-stage 3 "
            "--draft-init-path z-lab/Qwen3-4B-DFlash-b16",
        ),
        (
            "qwen3-4b",
            "dspark",
            SHARED + "--num-anchors 512 --loss-decay-gamma 4.0 --dloop-max-stage 3 --dloop-loss-weight 0.25 "
            "--draft-init-path deepseek-ai/dspark_qwen3_4b_block7",
        ),
        (
            "qwen3-8b",
            "domino",
            SHARED + "--num-anchors 512 --loss-decay-gamma 7.0 --lambda-base-start 1.0 --lambda-base-decay-ratio 0.5 "
            "--dloop-max-stage 3 --dloop-loss-weight 0.25 --draft-init-path Huang2020/Qwen3-8B-Domino-b16",
        ),
        (
            "qwen3-8b",
            "eagle3",
            "--chat-template qwen " + UNROLLED + "--attention-backend flex_attention --ttt-length-dist 7,14,21 "
            "--ckpt-dir naver-ai/EAGLE3-Qwen3-8B",
        ),
        (
            "qwen3.5-9b",
            "mtp",
            "--chat-template qwen3.5-instruct " + UNROLLED + "--mtp qwen3.5 --attention-backend flex_attention "
            "--ttt-length-dist 3,6,9",
        ),
        (
            "gemma4-12b",
            "mtp",
            "--chat-template gemma4 " + UNROLLED + "--mtp gemma4 --ttt-length-dist 6,12,18 "
            "--ckpt-dir google/gemma-4-12B-it-assistant",
        ),
    ],
)
def test_training_flags_of_the_paper_are_the_release_s(paper, target, host, flags):
    line = command_line(Configuration(paper, SCHEMA).training_flags(target, host, "trained"))
    assert line == f"--target-model-path {paper['targets'][target]['model']} {flags}"


@pytest.mark.parametrize(
    ("target", "host", "difference"),
    [
        ("qwen3-4b", "dflash", {"dloop_max_stage": 0}),
        ("qwen3-8b", "dspark", {"dloop_max_stage": 0}),
        ("qwen3-8b", "domino", {"dloop_max_stage": 0}),
        ("qwen3-4b", "eagle3", {"ttt_length_dist": "7"}),
        ("qwen3.5-9b", "mtp", {"ttt_length_dist": "3"}),
        ("gemma4-12b", "mtp", {"ttt_length_dist": "6"}),
    ],
)
def test_a_control_differs_from_ours_by_the_loop_alone(paper, target, host, difference):
    configuration = Configuration(paper, SCHEMA)
    ours, control = (configuration.training_flags(target, host, draft) for draft in ("trained", "control"))
    assert {key: value for key, value in control.items() if ours[key] != value} == difference
    assert ours.keys() == control.keys()


def test_the_demo_s_released_draft_starts_from_scratch(demo):
    configuration = Configuration(demo, SCHEMA)
    flags = configuration.training_flags("tiny", "dflash", "released")
    assert "draft_config" in flags
    assert "draft_init_path" not in flags
    assert flags["dloop_max_stage"] == 0
    ours = configuration.training_flags("tiny", "dflash", "trained")
    assert ours["draft_init_path"] == "results/train/tiny/dflash/released/final"
    assert "draft_config" not in ours


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda c: c.update(loop_drafts="trained"), "'loop_drafts' is not a key of the top level: did you mean"),
        (lambda c: c.pop("gpu"), "the top level lacks the key 'gpu'"),
        (lambda c: c.update(loop_draft="publishd"), "did you mean 'published'?"),
        (lambda c: c["hosts"].update(dflsh=c["hosts"].pop("dflash")), "did you mean 'dflash'?"),
        (lambda c: c["hosts"]["dflash"]["training"].update(num_anchor=1), "'num_anchor' is not a key of"),
        (lambda c: c["training"].update(learning_rate="6e-4"), "as 6.0e-4"),
        (lambda c: c.update(control="true"), "control=True on a command line"),
        (lambda c: c["targets"].update(Qwen=c["targets"].pop("qwen3-4b")), "the name 'Qwen' may hold only"),
        (lambda c: c["evaluation"].update(max_new_tokens=0), "evaluation.max_new_tokens: 0 is less than"),
        (lambda c: c["benchmarks"].update(gsm9k={}), "did you mean 'gsm8k'?"),
        (lambda c: c["prompts"].update(dataset="perfectblent"), "did you mean 'perfectblend'?"),
        (
            lambda c: c["targets"].update({"qwen3-14b": c["targets"]["qwen3-8b"]}),
            "targets.qwen3-14b is used by no host",
        ),
        (
            lambda c: c["hosts"]["dflash"]["drafts"].update({"qwen3-4": {"released": "a", "published": "b"}}),
            "'qwen3-4' is not a target: did you mean 'qwen3-4b'?",
        ),
        (lambda c: c["hosts"]["dflash"]["drafts"]["qwen3-4b"].pop("published"), "set loop_draft to trained"),
        (lambda c: c["settings"].pop("dspark"), "hosts.dspark is evaluated under no setting"),
        (lambda c: c["hosts"].pop("domino"), "settings.domino belongs to a host"),
        (
            lambda c: c["settings"]["dflash"]["dloop"]["flags"].update(mtp_k=3),
            "settings.dflash.dloop: mtp_k is a flag of mtp, dflash does not know it",
        ),
        (
            lambda c: c["settings"]["dflash"]["dloop"]["flags"].update(stage_tree_budget=64),
            "stage_tree_budget has no effect without tree_budget",
        ),
        (
            lambda c: c["settings"]["dflash"]["dloop"].update(flags_for={"qwen3-14b": {}}),
            "host dflash has no drafts for target 'qwen3-14b'",
        ),
    ],
)
def test_mistakes_are_refused_with_one_sentence(paper, change, sentence):
    change(paper)
    message = refusal(paper)
    assert sentence in message
    assert message.startswith("config: ")
    assert "\n" not in message


def test_a_combination_outside_the_registries_is_refused(paper, demo):
    configuration = Configuration(paper, SCHEMA)
    with pytest.raises(UserError, match="no setting 'dloop-dartree': it has released, dloop"):
        configuration.evaluation_flags("qwen3-4b", "dflash", "dloop-dartree", "published")
    with pytest.raises(UserError, match="no drafts for target 'tiny'"):
        configuration.draft_source("tiny", "dflash", "released")
    with pytest.raises(UserError, match="no 'published' draft"):
        Configuration(demo, SCHEMA).draft_source("tiny", "dflash", "published")


@pytest.mark.parametrize("draft", ["released", "published"])
def test_a_finished_draft_is_not_trained(paper, draft):
    with pytest.raises(UserError, match="there is nothing to train"):
        Configuration(paper, SCHEMA).training_flags("qwen3-4b", "dflash", draft)


def test_checking_leaves_the_values_alone(paper):
    before = copy.deepcopy(paper)
    Configuration(paper, SCHEMA)
    assert paper == before


def test_a_command_line_survives_a_shell():
    flags = {"loop_gate": -0.5, "strict_data": True, "resume": False, "note": "it's a demo, 2 cores"}
    assert shlex.split(command_line(flags)) == [
        *("--loop-gate", "-0.5", "--strict-data", "--no-resume", "--note", "it's a demo, 2 cores")
    ]


def test_the_command_lists_the_experiments(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["dloop.config", "config/config.yaml"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 32
    assert lines[1].split()[:4] == ["qwen3-4b", "dflash", "dloop", "published"]
    assert lines[1].endswith("--draft-model naver-ai/DLoop-DFlash-Qwen3-4B --loop-gate -0.5")


def test_the_command_writes_the_rows_that_tables_read(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["dloop.config", "config/config.yaml", "--json"])
    main()
    rows = read_rows(json.loads(capsys.readouterr().out))
    assert len(rows) == 32


def test_servers_are_given_or_launched_but_not_both(paper):
    assert paper["regenerate"]["launch_servers"]
    paper["regenerate"]["servers"] = ["node1:30000"]
    assert "keep one of them" in refusal(paper)
