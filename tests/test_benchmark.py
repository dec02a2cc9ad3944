"""The evaluation command: golden generations, resume, refusals, ranks, kills."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dloop import benchmark
from dloop.cli import UserError
from dloop.hosts.registry import new_host
from tests.toy_tokenizer import toy_tokenizer

MEASURED = ("ttft", "draft_prefill_time", "decode_time", "tpot", "stage_times")


def strings(arguments):
    return [str(argument) for argument in arguments]


def command(*arguments, launcher=()):
    return [sys.executable, *launcher, "-m", "dloop.benchmark", *strings(arguments)]


def run(*arguments):
    """The command in this process: starting Python with torch would cost seconds a call."""
    benchmark.main(strings(arguments))


def refused(*arguments):
    with pytest.raises(UserError) as caught:
        run(*arguments)
    return str(caught.value)


def records(path):
    """The responses of a result file without what a clock wrote."""
    responses = json.loads(path.read_text())["responses"]
    return [{key: value for key, value in response.items() if key not in MEASURED} for response in responses]


@pytest.fixture(scope="module")
def ids_file(golden, tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "ids.jsonl"
    first = json.loads((golden / "dflash/generation.json").read_text())["prompt_ids"]
    prompts = [first, [5, 6], [9, 80, 33, 4, 17], [140, 3, 3, 3]]
    path.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in prompts))
    return path


@pytest.fixture(scope="module")
def common(golden, ids_file):
    return [
        *("--model", golden / "dflash/target", "--dataset", ids_file, "--dtype", "float32", "--device", "cpu"),
        *("--warmup-runs", 0),
    ]


@pytest.fixture(scope="module")
def draft(golden):
    return ["--draft-model", golden / "dflash/draft"]


@pytest.fixture(scope="module")
def baseline(common, tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    run(*common, "--baseline", "--max-new-tokens", 48, "--stop-token-ids", "none", "--output", path)
    return path


def decode_golden(folder, prompt, tmp_path, *flags):
    """One response of the command on the checkpoints in `folder`."""
    (tmp_path / "ids.jsonl").write_text(json.dumps({"prompt_ids": prompt}))
    out = tmp_path / "result.json"
    run(
        *("--model", folder / "target", "--draft-model", folder / "draft", "--dataset", tmp_path / "ids.jsonl"),
        *("--dtype", "float32", "--device", "cpu", "--warmup-runs", 0, *flags, "--output", out),
    )
    (response,) = records(out)
    return response


@pytest.mark.parametrize("case", ["no_stop", "with_stop"])
@pytest.mark.parametrize("family", ["dflash", "dspark", "domino"])
def test_golden_generation_through_the_command(golden, tmp_path, family, case):
    reference = json.loads((golden / family / "generation.json").read_text())
    prompt, expected = reference["prompt_ids"], list(reference[case]["acceptance_lengths"])
    stops = ",".join(map(str, reference[case].get("stop_token_ids", []))) or "none"
    response = decode_golden(
        golden / family, prompt, tmp_path, "--max-new-tokens", reference["max_new_tokens"], "--stop-token-ids", stops
    )
    assert prompt + response["output_ids"] == reference[case]["output_ids"]
    if family == "dspark" and reference[case].get("stop_is_accepted_draft"):
        # That reference leaves the target's own token out of the last round's length.
        expected[-1] += 1
    assert response["acceptance_lengths"] == expected


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("family", ["dflash", "dspark", "domino"])
def test_golden_loop_generation_through_the_command(golden, tmp_path, family, place):
    reference = json.loads((golden / family / "derived_loop_generation.json").read_text())
    expected = reference["runs"][place]
    loop = ["--loop-gate", expected["loop_gate"], "--max-extra-stages", reference["max_additional_stages"]]
    # The reference drafts past its token limit, so ask for more and compare the rounds it lists.
    length = ["--max-new-tokens", 4 * reference["max_new_tokens"], "--stop-token-ids", "none"]
    response = decode_golden(golden / family, reference["prompt_ids"], tmp_path, *loop, *length)
    rounds = len(expected["acceptance_lengths"])
    assert response["acceptance_lengths"][:rounds] == expected["acceptance_lengths"]
    assert response["extra_stages"][:rounds] == expected["additional_stages"]
    for ours, theirs in zip(response["gate_sums"], expected["gate_sums"], strict=False):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("budget", ["linear", "16", "64", "256"])
def test_golden_tree_generation_through_the_command(golden, tmp_path, budget):
    for case in json.loads((golden / "ddtree/generation.json").read_text()):
        flags = ["--max-new-tokens", case["max_new_tokens"], "--stop-token-ids", case["eos"]]
        tree = [] if budget == "linear" else ["--tree-budget", budget]
        response = decode_golden(golden / "ddtree", case["prompt"], tmp_path, *flags, *tree, "--overwrite")
        assert response["output_ids"] == case["greedy_ids"]
        assert response["acceptance_lengths"] == case["runs"][budget]["acceptance_lengths"]


@pytest.mark.parametrize("trace", ["released_k3", "loop_k3_g-0.5"])
def test_golden_multi_token_prediction_through_the_command(golden, tmp_path, trace):
    """The head comes out of the target's own checkpoint."""
    traces = json.loads((golden / "mtp_qwen35/traces.json").read_text())
    prompts, base, out = tmp_path / "ids.jsonl", tmp_path / "base.json", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"prompt_ids": entry["prompt"]}) + "\n" for entry in traces))
    common = [
        *("--model", golden / "mtp_qwen35/checkpoint", "--dataset", prompts, "--dtype", "float32", "--device", "cpu"),
        *("--warmup-runs", 0, "--max-new-tokens", 96, "--stop-token-ids", "none"),
    ]
    run(*common, "--baseline", "--output", base)
    loop = [] if trace == "released_k3" else ["--loop-gate", -0.5, "--max-extra-stages", 7]
    draft = ["--draft-model", "mtp", "--baseline-result", base, "--require-lossless", *loop]
    run(*common, *draft, "--output", out)
    result = json.loads(out.read_text())
    assert (result["host"], result["config"]["mtp_k"]) == ("mtp", 3)
    for response, entry in zip(result["responses"], traces, strict=True):
        rounds = entry[trace]
        assert response["output_ids"][:72] == entry["greedy"]
        assert response["acceptance_lengths"][: len(rounds)] == [r["accepted"] + 1 for r in rounds]
        assert response["extra_stages"][: len(rounds)] == [r["stages"] - 1 for r in rounds]
        for ours, theirs in zip(response["gate_sums"], rounds, strict=False):
            assert ours == pytest.approx(theirs["stage_sums"], abs=2e-3)


def test_a_stage_of_another_length_and_what_has_no_effect(golden, tmp_path):
    (tmp_path / "ids.jsonl").write_text(json.dumps({"prompt_ids": [64, 71, 36]}))
    common = [
        *("--model", golden / "mtp_qwen35/checkpoint", "--draft-model", "mtp", "--dataset", tmp_path / "ids.jsonl"),
        *("--dtype", "float32", "--device", "cpu", "--warmup-runs", 0, "--max-new-tokens", 12),
        *("--stop-token-ids", "none", "--output", tmp_path / "out.json"),
    ]
    assert "--tree-budget has no effect on mtp drafts" in refused(*common, "--tree-budget", 8)
    assert "--mtp-k is 0; it must be at least 1" in refused(*common, "--mtp-k", 0)
    run(*common, "--mtp-k", 2)
    (response,) = records(tmp_path / "out.json")
    assert {length for lengths in response["stage_lengths"] for length in lengths} == {2}


def test_audit_speedup_and_a_second_call_that_does_nothing(common, draft, baseline, tmp_path, capsys):
    out = tmp_path / "result.json"
    arguments = [
        *(*common, *draft, "--max-new-tokens", 48, "--stop-token-ids", "none", "--loop-gate", "-3"),
        *("--baseline-result", baseline, "--require-lossless", "--output", out),
    ]
    run(*arguments)
    result = json.loads(out.read_text())
    assert result["summary"]["identical_to_baseline"] == 4
    assert result["summary"]["speedup"] > 0
    assert result["config"]["loop_gate"] == -3.0
    assert all(response["first_divergence"] is None for response in result["responses"])
    before = out.read_bytes()
    capsys.readouterr()
    run(*arguments)
    assert "exists" in capsys.readouterr().out
    assert out.read_bytes() == before
    assert "loop_gate = -3.0, not -2.0" in refused(*arguments, "--loop-gate", "-2")
    assert "max_samples = None, not 2" in refused(*arguments, "--max-samples", 2)
    assert "tree_budget = None, not 8" in refused(*arguments, "--tree-budget", 8)


def test_a_divergence_is_found_with_its_margin(common, draft, baseline, tmp_path):
    spoilt = json.loads(baseline.read_text())
    spoilt["responses"][1]["output_ids"][7] += 1
    (tmp_path / "spoilt.json").write_text(json.dumps(spoilt))
    out = tmp_path / "result.json"
    arguments = [
        *(*common, *draft, "--max-new-tokens", 48, "--stop-token-ids", "none", "--require-lossless"),
        *("--baseline-result", tmp_path / "spoilt.json", "--output", out),
    ]
    assert "3 of 4 responses" in refused(*arguments)
    assert "3 of 4 responses" in refused(*arguments), "a second call finds the file, not the excuse"
    response = json.loads(out.read_text())["responses"][1]
    assert response["first_divergence"] == 7
    assert response["divergence_margin"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", 8], "exactly one of --baseline and --draft-model"),
        (["--baseline", "--loop-gate", "-0.5"], "no effect on --baseline"),
        (["--baseline", "--tree-budget", 1], "--tree-budget has no effect on --baseline"),
        (["--baseline", "--output", "a.json", "b.json"], "2 files for 1 benchmarks"),
        (["--baseline", "--stop-token-ids", "a,b"], "ids joined by commas"),
        (["--baseline", "--max-new-tokens", 0], "at least 1"),
        (["--baseline", "--require-lossless"], "--baseline-result"),
        (["--baseline", "--expect-device", "h100-80gb", "--stop-token-ids", "none"], "this device is"),
        (["--draft-model", "no/where", "--stop-token-ids", "none"], "neither a folder nor a hub repository"),
        (["--baseline"], "tokenizer"),
    ],
)
def test_bad_input_ends_in_one_sentence(common, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert message in refused(*common, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_baseline_of_another_length_is_refused_before_the_run(common, draft, baseline, tmp_path):
    message = refused(
        *(*common, *draft, "--max-new-tokens", 20, "--stop-token-ids", "none"),
        *("--baseline-result", baseline, "--output", tmp_path / "r.json"),
    )
    assert "--max-new-tokens is 20 here and 48 in the baseline" in message
    assert not (tmp_path / "r.json").exists()


def test_two_ranks_give_the_records_of_one(common, draft, tmp_path):
    arguments = [*common, *draft, "--max-new-tokens", 24, "--stop-token-ids", "none", "--loop-gate=-inf"]
    arguments += ["--max-extra-stages", 1]
    run(*arguments, "--output", tmp_path / "one.json")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    torchrun = command(*arguments, "--output", tmp_path / "two.json", launcher=launcher)
    subprocess.run(torchrun, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert records(tmp_path / "two.json") == records(tmp_path / "one.json")
    assert json.loads((tmp_path / "two.json").read_text())["env"]["processes"] == 2


def test_a_killed_run_leaves_nothing_half_and_ends_the_same(common, draft, ids_file, tmp_path):
    second = tmp_path / "more.jsonl"
    second.write_text(ids_file.read_text())
    model = common[: common.index("--dataset")] + common[common.index("--dataset") + 2 :]
    arguments = [*model, *draft, "--max-new-tokens", 120, "--stop-token-ids", "none"]
    arguments += ["--dataset", ids_file, second, "--output", tmp_path / "a.json", tmp_path / "b.json"]
    process = subprocess.Popen(command(*arguments), env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None and not (tmp_path / "a.json").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    first = (tmp_path / "a.json").read_bytes()
    run(*arguments)
    assert (tmp_path / "a.json").read_bytes() == first
    run(*common, *draft, "--max-new-tokens", 120, "--stop-token-ids", "none", "--output", tmp_path / "whole.json")
    assert records(tmp_path / "b.json") == records(tmp_path / "whole.json")
    assert records(tmp_path / "a.json") == records(tmp_path / "whole.json")


@pytest.fixture(scope="module")
def talking(tmp_path_factory, golden):
    """A tiny target with a tokenizer, a draft for it, and a two-turn benchmark."""
    folder = tmp_path_factory.mktemp("talking")
    tokenizer = toy_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=len(tokenizer), num_hidden_layers=4, head_dim=16, tie_word_embeddings=True, **sizes)
    config.initializer_range = 0.3
    model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, 1]
    model.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    raw = json.loads((golden / "dflash/draft/config.json").read_text()) | sizes
    raw |= {"num_target_layers": 4, "vocab_size": len(tokenizer)}
    raw["dflash_config"] = {"mask_token_id": 2, "target_layer_ids": [0, 2]}
    (folder / "config.json").write_text(json.dumps(raw))
    host = new_host(str(folder / "config.json"), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    (folder / "draft").mkdir()
    host.save(folder / "draft", torch.float32)
    turns = [{"turns": ["Say something.", "And again?"]}, {"turns": ["Hello"]}]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turns))
    return folder


def test_conversations_continue_with_the_runs_own_answers(talking, tmp_path):
    arguments = [
        *("--model", talking / "target", "--dataset", talking / "talk.jsonl", "--max-new-tokens", 12),
        *("--warmup-runs", 1, "--device", "cpu"),
    ]
    base = tmp_path / "base.json"
    run(*arguments, "--baseline", "--output", base)
    run(
        *(*arguments, "--draft-model", talking / "draft", "--loop-gate", "-0.5", "--output", tmp_path / "own.json"),
        *("--baseline-result", base, "--require-lossless"),
    )
    result = json.loads(base.read_text())
    places = [(response["index"], response["turn"]) for response in result["responses"]]
    assert places == [(0, 0), (0, 1), (1, 0)]
    assert result["config"]["stop_token_ids"] == sorted({toy_tokenizer().eos_token_id, 1})
    assert result["responses"][1]["num_input_tokens"] > result["responses"][0]["num_input_tokens"] + 10
    assert [r["output_ids"] for r in records(tmp_path / "own.json")] == [r["output_ids"] for r in records(base)]


def test_later_turns_may_see_the_baselines_answers(talking, tmp_path):
    arguments = [
        *("--model", talking / "target", "--dataset", talking / "talk.jsonl", "--max-new-tokens", 12),
        *("--warmup-runs", 0, "--device", "cpu"),
    ]
    base = tmp_path / "base.json"
    run(*arguments, "--baseline", "--output", base)
    changed = json.loads(base.read_text())
    changed["responses"][0]["text"] = "a much longer first answer than the one that was really given, words, words"
    base.write_text(json.dumps(changed))
    run(
        *(*arguments, "--draft-model", talking / "draft", "--output", tmp_path / "r.json"),
        *("--baseline-result", base, "--mtbench-history", "baseline"),
    )
    assert records(tmp_path / "r.json")[1]["num_input_tokens"] > changed["responses"][1]["num_input_tokens"]


def test_bad_input_reaches_the_shell_as_a_sentence_and_exit_code_2(common):
    done = subprocess.run(command(*common), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: give exactly one of --baseline and --draft-model\n"


def test_help_does_not_import_torch():
    code = (
        "import sys, contextlib\n"
        "sys.argv = ['x', '--help']\n"
        "from dloop.benchmark import main\n"
        "with contextlib.suppress(SystemExit): main()\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
