"""The train stage from the command line to `final/`, on a tiny target with the real DFlash host."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop.cli import UserError, parse
from dloop.data.loader import epoch_order
from dloop.data.token_counts import supervised_counts
from dloop.demo.architectures import ARCHITECTURES, new_target
from dloop.hosts.registry import load_host, new_host
from dloop.hosts.target_model import load_tokenizer
from dloop.train import PATHS, WITHOUT_INFLUENCE, Options, check, resolve, train
from dloop.training.assembly import open_dataset
from dloop.training.checkpointing import checkpoints
from dloop.training.distributed import World
from dloop.training.trainer import Trainer
from tests.toy_tokenizer import toy_tokenizer
from tests.training.tiny import (
    VOCAB,
    conversation,
    write_config_of,
    write_conversations,
    write_draft_config,
    write_eagle3_config,
    write_target,
)

ALONE = World(device=torch.device("cpu"))
ROOT = Path(__file__).parents[1]
ROWS = 24


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """A folder with a target, a draft configuration and 24 conversations."""
    folder = tmp_path_factory.mktemp("inputs")
    write_target(folder / "target")
    write_draft_config(folder / "draft.json")
    write_conversations(folder / "data.jsonl", ROWS)
    return folder


@pytest.fixture(scope="module")
def recipe(inputs) -> Options:
    """12 steps of 4 rows; `output_dir` is to be replaced."""
    return Options(
        target_model_path=str(inputs / "target"),
        train_data_path=inputs / "data.jsonl",
        output_dir=Path("nowhere"),
        draft_config=str(inputs / "draft.json"),
        dataloader_num_workers=0,
        num_epochs=2,
        batch_size=2,
        global_batch_size=4,
        num_anchors=4,
        learning_rate=4e-3,
        position_offset_max=300,
        log_interval=4,
        save_interval=5,
    )


def run_here(options: Options, folder: Path, **changes) -> Path:
    options = replace(options, output_dir=folder, **changes)
    check(options)
    train(resolve(options, ALONE), ALONE)
    return folder


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    return run_here(recipe, tmp_path_factory.mktemp("finished") / "run")


def command_line(options: Options) -> list[str]:
    """The flags that say `options`, without those at their default."""
    flags = []
    for name, value in vars(options).items():
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        if value != getattr(Options, name, None):
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


def draft_bytes(folder: Path) -> bytes:
    return (folder / "final" / "model.safetensors").read_bytes()


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


class TestCommandLine:
    def test_the_release_s_own_command_is_understood(self):
        line = (
            "--target-model-path Qwen/Qwen3-4B --train-data-path train.jsonl --output-dir out "
            "--draft-init-path z-lab/Qwen3-4B-DFlash-b16 --target-model-backend hf --on-the-fly-loader "
            "--chat-template qwen --max-length 4096 --num-epochs 1 --batch-size 1 --learning-rate 6e-4 "
            "--warmup-ratio 0.04 --max-grad-norm 1.0 --seed 42 --attention-backend flex_attention "
            "--num-anchors 512 --loss-decay-gamma 7 --dloop-max-stage 3 --position-offset-max 28672"
        )
        options = parse(Options, line.split())
        check(options)
        assert options.learning_rate == 6e-4
        assert options.position_offset_max == 28672

    def test_help_is_quick_because_torch_is_not_imported(self):
        code = (
            "import sys; sys.argv = ['train', '--help']\n"
            "from dloop.train import main\n"
            "try: main()\n"
            "except SystemExit: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
        )
        shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "--draft-init-path" in shown.stdout

    def test_every_option_counts_or_is_known_not_to(self):
        assert set(Options.__dataclass_fields__) >= WITHOUT_INFLUENCE | set(PATHS)

    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"draft_config": None}, "exactly one start"),
            ({"draft_init_path": "some/draft"}, "exactly one start"),
            ({"target_model_backend": "sglang"}, "--target-model-backend sglang"),
            ({"on_the_fly_loader": False}, "always tokenised on the fly"),
            ({"num_epochs": 0}, "--num-epochs is 0"),
            ({"save_interval": -1}, "--save-interval is -1"),
            ({"max_steps": 0}, "--max-steps is 0"),
        ],
    )
    def test_nonsense_is_refused_before_anything_is_loaded(self, recipe, changes, sentence):
        with pytest.raises(UserError, match=sentence):
            check(replace(recipe, **changes))

    def test_flex_attention_without_a_gpu_is_refused_with_the_fix(self, recipe):
        with pytest.raises(UserError, match="say sdpa"):
            resolve(replace(recipe, attention_backend="flex_attention"), ALONE)

    def test_a_global_batch_with_a_remainder_is_refused(self, recipe):
        with pytest.raises(UserError, match="--global-batch-size 5 is no multiple of 1 processes x --batch-size 2"):
            resolve(replace(recipe, global_batch_size=5), ALONE)

    def test_defaults_follow_the_machine(self, recipe):
        bare = replace(recipe, global_batch_size=None)
        here = resolve(bare, ALONE)
        assert (here.dtype, here.attention_backend, here.global_batch_size) == ("float32", "sdpa", 2)
        there = resolve(bare, World(device=torch.device("cuda", 0), size=8))
        assert (there.dtype, there.attention_backend, there.global_batch_size) == ("bfloat16", "flex_attention", 16)


class TestRun:
    def test_leaves_a_draft_a_manifest_and_the_last_checkpoints(self, finished):
        assert [path.name for path in checkpoints(finished)] == [
            "epoch_0_step_5",
            "epoch_1_step_10",
            "epoch_2_step_12",
        ]
        assert sorted(path.name for path in (finished / "final").iterdir()) == ["config.json", "model.safetensors"]
        told = manifest(finished)
        assert (told["host"], told["rows"], told["steps"]) == ("dflash", ROWS, 12)
        assert told["last_checkpoint"] == "epoch_2_step_12"
        assert told["options"]["--learning-rate"] == 4e-3
        assert told["run_config"]["--train-data-path"].startswith("sha256:")
        assert told["env"]["dtype"] == "float32"

    def test_the_draft_is_in_its_host_s_format_and_was_trained(self, finished, inputs):
        host = load_host(str(finished / "final"), dtype=torch.float32, device=ALONE.device)
        assert host.name == "dflash"
        assert draft_bytes(finished) == (finished / "epoch_2_step_12" / "model.safetensors").read_bytes()
        lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["loss"] < lines[0]["loss"]
        assert {"host/cross_entropy", "loop/cross_entropy", "host/accuracy/1", "host/accepted_prefix"} <= set(lines[-1])

    def test_starts_by_saying_what_it_does(self, recipe, tmp_path, capsys):
        run_here(recipe, tmp_path / "run", max_steps=1)
        said = capsys.readouterr().out
        assert "--learning-rate 0.004" in said
        assert "dflash draft: 0.01 M parameters" in said
        assert "1 steps in 2 epochs of 24 rows, 1 processes, 2 micro-steps a step" in said
        assert "loss |" in said

    def test_again_there_is_nothing_to_do(self, recipe, finished, capsys):
        before = manifest(finished)
        run_here(recipe, finished, log_interval=7)
        assert "nothing to do" in capsys.readouterr().out
        assert manifest(finished) == before

    def test_deleted_outputs_are_written_again_without_training(self, recipe, finished, capsys):
        """A workflow deletes declared outputs before it repeats a job; the checkpoints are still there."""
        before = draft_bytes(finished)
        (finished / "manifest.json").unlink()
        run_here(recipe, finished)
        assert "going on from" in capsys.readouterr().out
        assert draft_bytes(finished) == before
        assert manifest(finished)["steps"] == 12

    def test_goes_on_from_a_released_draft(self, recipe, finished, tmp_path):
        start = {"draft_config": None, "draft_init_path": str(finished / "final")}
        folder = run_here(recipe, tmp_path / "run", max_steps=1, learning_rate=1e-9, warmup_ratio=0.0, **start)
        ours, theirs = (
            load_file(folder / "final" / "model.safetensors"),
            load_file(finished / "final" / "model.safetensors"),
        )
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-7)

    def test_the_control_trains_the_host_alone(self, recipe, tmp_path):
        folder = run_here(recipe, tmp_path / "run", dloop_max_stage=0, max_steps=2)
        line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        assert "host/cross_entropy" in line
        assert not any(name.startswith("loop/") for name in line)

    def test_rows_without_a_supervised_token_are_trained_on_as_zeros(self, recipe, tmp_path):
        folder = run_here(recipe, tmp_path / "run", max_length=20, max_steps=2)
        assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["loss"] == 0.0

    def test_bfloat16_masters_resume_bit_for_bit(self, recipe, tmp_path, monkeypatch):
        chosen = {"dtype": "bfloat16", "max_steps": 8}
        whole = run_here(recipe, tmp_path / "whole", **chosen)
        interrupt_after_step(monkeypatch, 7)
        with pytest.raises(KeyboardInterrupt):
            run_here(recipe, tmp_path / "cut", **chosen)
        monkeypatch.undo()
        assert draft_bytes(run_here(recipe, tmp_path / "cut", **chosen)) == draft_bytes(whole)
        assert draft_bytes(whole).count(b'"BF16"') > 10

    def test_data_workers_change_nothing(self, recipe, finished, tmp_path):
        folder = run_here(recipe, tmp_path / "run", dataloader_num_workers=2)
        assert draft_bytes(folder) == draft_bytes(finished)


def kill_after_step(options: Options, step: int) -> None:
    """Train in a process of its own that dies by SIGKILL right after `step`."""
    code = (
        f"from tests.training.scripted import die_after_step; die_after_step({step})\n"
        "from dloop.train import main; main()"
    )
    command = [sys.executable, "-c", code, *command_line(options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def interrupt_after_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    train_step = Trainer.train_step

    def interrupted(self: Trainer, batches: list) -> None:
        train_step(self, batches)
        if self.step == step:
            raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train_step", interrupted)


class TestResume:
    def test_after_a_kill_ends_in_the_same_draft(self, recipe, finished, tmp_path, capsys):
        folder = tmp_path / "run"
        kill_after_step(replace(recipe, output_dir=folder), 8)
        assert not (folder / "final").exists()
        run_here(recipe, folder)
        assert f"going on from {folder / 'epoch_0_step_5'}" in capsys.readouterr().out
        assert draft_bytes(folder) == draft_bytes(finished)

    def test_another_configuration_is_refused_or_moved_aside(self, recipe, finished, tmp_path):
        folder = tmp_path / "run"
        run_here(recipe, folder, max_steps=1)
        with pytest.raises(UserError, match="--max-steps was 1, is None; steps was 1, is 12"):
            run_here(recipe, folder)
        run_here(recipe, folder, on_config_change="move-aside")
        assert draft_bytes(folder) == draft_bytes(finished)
        assert manifest(tmp_path / "run.aside-1")["steps"] == 1

    def test_a_run_that_saved_nothing_binds_nobody(self, recipe, finished, tmp_path, monkeypatch):
        interrupt_after_step(monkeypatch, 4)
        with pytest.raises(KeyboardInterrupt):
            run_here(recipe, tmp_path / "run", learning_rate=1.0)
        monkeypatch.undo()
        assert draft_bytes(run_here(recipe, tmp_path / "run")) == draft_bytes(finished)

    def test_changed_data_is_another_configuration(self, recipe, inputs, tmp_path):
        run_here(recipe, tmp_path / "run", max_steps=1)
        changed = write_conversations(tmp_path / "changed.jsonl", ROWS + 1)
        with pytest.raises(UserError, match="--train-data-path was sha256"):
            run_here(recipe, tmp_path / "run", max_steps=1, train_data_path=changed)

    def test_a_moved_target_is_the_same_configuration(self, recipe, inputs, tmp_path, capsys):
        run_here(recipe, tmp_path / "run", max_steps=1)
        write_target(tmp_path / "moved")
        run_here(recipe, tmp_path / "run", max_steps=1, target_model_path=str(tmp_path / "moved"))
        assert "nothing to do" in capsys.readouterr().out


class TestRefusals:
    def test_a_draft_that_accepts_too_little_is_not_final(self, recipe, tmp_path):
        folder = tmp_path / "run"
        with pytest.raises(UserError, match="--min-accepted-prefix demands more"):
            run_here(recipe, folder, max_steps=2, min_accepted_prefix=2.5)
        assert not (folder / "final").exists()
        assert not (folder / "manifest.json").exists()
        run_here(recipe, folder, max_steps=2, min_accepted_prefix=-1.0)
        assert manifest(folder)["accepted_prefix"] >= 0

    def test_a_loss_weight_means_nothing_to_dflash(self, recipe, tmp_path):
        with pytest.raises(UserError, match=r"--dloop-loss-weight 0\.25 has no effect on dflash"):
            run_here(recipe, tmp_path / "run", dloop_loss_weight=0.25)

    def test_remembered_states_of_rows_that_move(self, recipe, tmp_path):
        with pytest.raises(UserError, match="--remember-target-states needs rows that never change"):
            run_here(recipe, tmp_path / "run", remember_target_states=True)

    def test_positions_beyond_the_target_s(self, recipe, tmp_path):
        with pytest.raises(UserError, match="--position-offset-max 28672 leaves the target's 512 positions"):
            run_here(recipe, tmp_path / "run", position_offset_max=28672)

    def test_a_tokenizer_larger_than_the_target(self, recipe, inputs, tmp_path):
        write_target(tmp_path / "target", vocab_size=300)
        with pytest.raises(UserError, match="367 tokens, its model 300"):
            run_here(recipe, tmp_path / "run", target_model_path=str(tmp_path / "target"))

    def test_strict_data_names_the_line(self, recipe, tmp_path):
        data = tmp_path / "bad.jsonl"
        data.write_text('{"conversations": []}\n' * 4)
        with pytest.raises(UserError, match=r"bad\.jsonl:1"):
            run_here(recipe, tmp_path / "run", train_data_path=data, strict_data=True)


@pytest.mark.slow
def test_two_ranks_equal_one_also_when_a_rank_has_nothing_to_learn(recipe, tmp_path):
    """In epoch 0 every row of rank 1 has its answer cut off; batch 1, so that the micro-batches are the same."""
    data = tmp_path / "data.jsonl"
    silent = set(epoch_order(ROWS, 2, 0)[1::2].tolist())
    rows = [conversation(number, question="why " * 60 if number in silent else None) for number in range(ROWS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = replace(recipe, train_data_path=data, batch_size=1, max_length=60)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dloop.train"]
    done = subprocess.run(
        [sys.executable, *command, *command_line(replace(options, output_dir=tmp_path / "two"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    run_here(options, tmp_path / "one")
    two, one = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-4, atol=1e-5)
    accepted = [manifest(tmp_path / name)["accepted_prefix"] for name in ("two", "one")]
    assert accepted[0] == pytest.approx(accepted[1])


@pytest.mark.parametrize("host", ["dspark", "domino"])
def test_other_block_hosts_train_and_save_what_loads_again(recipe, tmp_path, host):
    config = write_config_of(host, tmp_path / "config.json")
    folder = run_here(replace(recipe, draft_config=str(config)), tmp_path / "run")
    trained = load_host(str(folder / "final"), dtype=torch.float32, device=torch.device("cpu"))
    assert trained.name == manifest(folder)["host"] == host
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_two_ranks_of_dspark_equal_one_with_batch_two(recipe, tmp_path):
    """Its normaliser spans all ranks, so the comparison is one batch of both rows, not two micro-batches."""
    config = write_config_of("dspark", tmp_path / "config.json")
    options = replace(recipe, draft_config=str(config), global_batch_size=2, position_offset_max=0)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dloop.train"]
    two = replace(options, batch_size=1, output_dir=tmp_path / "two")
    done = subprocess.run(
        [sys.executable, *command, *command_line(two)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    run_here(replace(options, batch_size=2), tmp_path / "one")
    ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one"))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def unrolling(recipe, inputs) -> Options:
    config = write_eagle3_config(inputs / "eagle3.json")
    lengths = {"ttt_length_dist": (1, 2, 4), "num_anchors": None}
    return replace(recipe, draft_config=str(config), **lengths)


@pytest.fixture(scope="module")
def unrolled(unrolling, tmp_path_factory) -> Path:
    return run_here(unrolling, tmp_path_factory.mktemp("eagle3") / "run")


class TestEagle3:
    """The same trainer with a draft that unrolls."""

    def test_learns_and_saves_what_loads_again(self, unrolled, inputs):
        host = load_host(str(unrolled / "final"), dtype=torch.float32, device=ALONE.device)
        assert host.name == manifest(unrolled)["host"] == "eagle3"
        lines = [json.loads(line) for line in (unrolled / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["unroll/cross_entropy/1"] < lines[0]["unroll/cross_entropy/1"]
        assert {"unroll/accuracy/1", "host/accepted_prefix"} <= set(lines[-1])
        assert any("unroll/accuracy/4" in line for line in lines)

    def test_its_vocabulary_is_what_the_data_supervises_most(self, unrolled, unrolling):
        host = load_host(str(unrolled / "final"), dtype=torch.float32, device=ALONE.device)
        dataset = open_dataset(unrolling, load_tokenizer(unrolling.target_model_path), ALONE)
        counts = supervised_counts(dataset, VOCAB)
        known = host.network.target_ids
        assert len(known) == VOCAB // 4
        unknown = torch.ones(VOCAB, dtype=torch.bool)
        unknown[known] = False
        assert counts[known].min() >= counts[unknown].max()

    def test_after_a_kill_ends_in_the_same_draft(self, unrolling, unrolled, tmp_path):
        folder = tmp_path / "run"
        kill_after_step(replace(unrolling, output_dir=folder), 8)
        assert draft_bytes(run_here(unrolling, folder)) == draft_bytes(unrolled)

    def test_goes_on_from_a_checkpoint_whose_vocabulary_it_keeps(self, unrolling, unrolled, tmp_path):
        spoilt = tmp_path / "start"
        shutil.copytree(unrolled / "final", spoilt)
        tensors = load_file(spoilt / "model.safetensors")
        ids = torch.arange(VOCAB // 4) + 100
        tensors["d2t"] = torch.full_like(tensors["d2t"], 100)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
        save_file(tensors, spoilt / "model.safetensors")
        start = {"draft_config": None, "ckpt_dir": str(spoilt), "learning_rate": 1e-9, "warmup_ratio": 0.0}
        folder = run_here(unrolling, tmp_path / "run", max_steps=1, **start)
        ours = load_file(folder / "final" / "model.safetensors")
        assert ours.keys() == tensors.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-7)

    def test_a_start_of_the_wrong_kind_is_refused(self, unrolling, unrolled, tmp_path):
        wrong = replace(unrolling, draft_config=None, draft_init_path=str(unrolled / "final"))
        with pytest.raises(UserError, match="belongs to eagle3: start from it with --ckpt-dir"):
            run_here(wrong, tmp_path / "run")

    def test_defaults_are_the_family_s_own(self, unrolling, recipe):
        bare = {"learning_rate": None, "warmup_ratio": None, "max_grad_norm": None}
        ours, theirs = (resolve(replace(options, **bare), ALONE) for options in (unrolling, recipe))
        assert (ours.learning_rate, ours.warmup_ratio, ours.max_grad_norm) == (1e-4, 0.015, 0.5)
        assert (theirs.learning_rate, theirs.warmup_ratio, theirs.max_grad_norm) == (6e-4, 0.04, 1.0)

    def test_flags_of_block_drafters_are_refused(self, unrolling, tmp_path):
        with pytest.raises(UserError, match="--num-anchors 4 has no effect on eagle3"):
            run_here(unrolling, tmp_path / "run", num_anchors=4)

    @pytest.mark.slow
    def test_two_ranks_equal_one(self, unrolling, tmp_path):
        options = replace(unrolling, batch_size=1, num_epochs=1)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dloop.train"]
        two = command_line(replace(options, output_dir=tmp_path / "two"))
        done = subprocess.run([sys.executable, *command, *two], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        run_here(options, tmp_path / "one")
        ours, theirs = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one"))
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)
        lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("two", "one")]
        for here, there in zip(*lines, strict=True):
            here, there = json.loads(here), json.loads(there)
            names = [name for name in there if name.startswith(("unroll/", "host/"))]
            assert {name: here[name] for name in names} == pytest.approx(
                {n: there[n] for n in names}, rel=1e-3, abs=1e-3
            )


@pytest.fixture(scope="module")
def predicting(recipe, inputs) -> Options:
    """A Qwen3.5 target with a head of its own inside."""
    folder = inputs / "qwen35"
    tokenizer = toy_tokenizer()
    target = new_target("qwen3.5", VOCAB, eos=tokenizer.eos_token_id, pad=tokenizer.eos_token_id, seed=0)
    ARCHITECTURES["qwen3.5"].save(target, folder)
    tokenizer.save_pretrained(folder)
    head = new_host(str(folder), seed=3, dtype=torch.float32, device=ALONE.device).network.state_dict()
    tensors = load_file(folder / "model.safetensors") | {f"mtp.{name}": tensor for name, tensor in head.items()}
    save_file(tensors, folder / "model.safetensors")
    start = {"draft_config": None, "mtp": "qwen3.5", "num_anchors": None, "ttt_length_dist": (1, 2)}
    return replace(recipe, target_model_path=str(folder), **start)


@pytest.fixture(scope="module")
def predicted(predicting, tmp_path_factory) -> Path:
    return run_here(predicting, tmp_path_factory.mktemp("mtp") / "run")


class TestMultiTokenPrediction:
    """The same trainer with the head of a Qwen3.5 target."""

    def test_starts_from_the_target_s_head_and_saves_one_that_loads_again(self, predicting, predicted, tmp_path):
        host = load_host(str(predicted / "final"), dtype=torch.float32, device=ALONE.device)
        assert host.name == manifest(predicted)["host"] == "mtp"
        lines = [json.loads(line) for line in (predicted / "metrics.jsonl").read_text().splitlines()]
        assert lines[-1]["unroll/cross_entropy/1"] < lines[0]["unroll/cross_entropy/1"]
        still = run_here(predicting, tmp_path / "run", max_steps=1, learning_rate=1e-9, warmup_ratio=0.0)
        ours = load_file(still / "final" / "model.safetensors")
        theirs = load_file(Path(predicting.target_model_path) / "model.safetensors")
        assert len(ours) == 15
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-7)

    def test_after_a_kill_ends_in_the_same_draft(self, predicting, predicted, tmp_path):
        folder = tmp_path / "run"
        kill_after_step(replace(predicting, output_dir=folder), 8)
        assert draft_bytes(run_here(predicting, folder)) == draft_bytes(predicted)

    def test_a_head_of_its_own_and_one_from_scratch_are_starts_too(self, predicting, predicted, tmp_path):
        folder = run_here(predicting, tmp_path / "again", max_steps=1, ckpt_dir=str(predicted / "final"))
        assert manifest(folder)["run_config"]["--ckpt-dir"].startswith("sha256:")
        fresh = run_here(predicting, tmp_path / "fresh", max_steps=1, draft_config=predicting.target_model_path)
        assert draft_bytes(fresh) != draft_bytes(folder)

    def test_defaults_are_the_family_s_own(self, predicting):
        bare = {"learning_rate": None, "warmup_ratio": None, "max_grad_norm": None}
        ours = resolve(replace(predicting, **bare), ALONE)
        assert (ours.learning_rate, ours.warmup_ratio, ours.max_grad_norm) == (1e-4, 0.015, 0.5)

    def test_a_start_of_another_kind_is_refused(self, predicting, inputs, tmp_path):
        with pytest.raises(UserError, match="give exactly one start"):
            check(replace(predicting, mtp="gemma4"))
        wrong = replace(predicting, draft_config=str(inputs / "draft.json"))
        with pytest.raises(UserError, match=r"--mtp qwen3.5: .*draft.json is a dflash draft"):
            run_here(wrong, tmp_path / "run")
        with pytest.raises(UserError, match="is no draft of a known family"):
            run_here(replace(predicting, target_model_path=str(inputs / "target")), tmp_path / "run")
