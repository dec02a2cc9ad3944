"""The training loop on scripted parts: order of steps, accumulation, resume bit for bit, saves, stops."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.training.checkpointing import checkpoints
from dloop.training.trainer import Plan, Trainer
from tests.training.scripted import ALONE, Recipe, scripted_trainer

ROOT = Path(__file__).parents[2]
LAST = "epoch_3_step_18"
RECIPE = Recipe()


def weights(checkpoint: Path) -> bytes:
    return (checkpoint / "model.safetensors").read_bytes()


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(lines: list[dict]) -> list[dict]:
    timed = {"tokens_per_second", "samples_per_second", "seconds", "peak_memory_bytes"}
    return [{name: value for name, value in line.items() if name not in timed} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    scripted_trainer(folder).run()
    return folder


def run_child(folder: Path, *arguments: str) -> int:
    command = [sys.executable, "-m", "tests.training.scripted", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode


def assert_same_end(folder: Path, other: Path) -> None:
    assert weights(folder / LAST) == weights(other / LAST)
    assert without_times(metrics(folder)) == without_times(metrics(other))


class TestPlan:
    def test_one_epoch_of_the_paper(self):
        plan = Plan.of(batches_per_epoch=22_202, epochs=1, accumulation=1)
        assert (plan.steps_per_epoch, plan.total_steps) == (22_202, 22_202)

    @given(st.integers(1, 50), st.integers(1, 5), st.integers(1, 7))
    def test_every_batch_belongs_to_one_step(self, batches, epochs, accumulation):
        plan = Plan.of(batches, epochs, accumulation)
        assert plan.total_steps == epochs * math.ceil(batches / accumulation)

    def test_max_steps_only_shortens(self):
        assert Plan.of(10, 2, 3, max_steps=5).total_steps == 5
        assert Plan.of(10, 2, 3, max_steps=50).total_steps == 8


class TestRun:
    def test_learns(self, uninterrupted):
        lines = metrics(uninterrupted)
        assert lines[-1]["loss"] < lines[0]["loss"]

    def test_saves_carry_the_running_epoch_and_the_last_one_the_number_of_epochs(self, uninterrupted):
        assert [path.name for path in checkpoints(uninterrupted)] == ["epoch_1_step_12", "epoch_2_step_16", LAST]

    def test_lines_at_every_interval_and_save(self, uninterrupted):
        assert [line["step"] for line in metrics(uninterrupted)] == [3, 4, 6, 8, 9, 12, 15, 16, 18]

    def test_a_line_tells_everything(self, uninterrupted):
        line = metrics(uninterrupted)[1]
        assert {"epoch", "lr", "grad_norm", "loss", "host/loss", "host/accepted_prefix"} <= set(line)
        assert {"data", "target", "forward", "backward", "optimizer"} <= set(line["seconds"])
        assert line["tokens_per_second"] > line["samples_per_second"] > 0
        assert line["peak_memory_bytes"] > 1_000_000

    def test_max_steps_ends_inside_an_epoch(self, tmp_path):
        recipe = replace(RECIPE, max_steps=8)
        assert scripted_trainer(tmp_path, recipe).run() == tmp_path / "epoch_3_step_8"
        assert metrics(tmp_path)[-1]["step"] == 8

    def test_accumulation_averages_micro_steps(self, tmp_path):
        """One step over two batches is one step on the mean of their losses."""
        trainer = scripted_trainer(tmp_path, replace(RECIPE, epochs=1))
        batches = list(RECIPE.batches(ALONE, 0, 0))[:2]
        losses = [
            trainer.objective(batch, trainer.target(batch, batch.attention_mask.sum(1).tolist()), 0).total
            for batch in batches
        ]
        weight = trainer.host.network.weight
        wanted = torch.autograd.grad(sum(losses) / 2, weight)[0]
        trainer.train_step(batches)
        # Clipping may have scaled the gradient; its direction stays.
        found = trainer.optimizer.adamw.state[weight]["exp_avg"]
        torch.testing.assert_close(found / found.norm(), wanted / wanted.norm())

    def test_a_short_last_step_closes_the_epoch(self, tmp_path):
        recipe = replace(RECIPE, rows=10, accumulation=2, epochs=2)
        sizes = []
        trainer = scripted_trainer(tmp_path, recipe)
        step = trainer.train_step
        trainer.train_step = lambda batches: (sizes.append(len(batches)), step(batches))
        trainer.run()
        assert sizes == [2, 2, 1, 2, 2, 1]

    def test_steps_without_a_supervised_token_are_steps(self, tmp_path):
        recipe = replace(RECIPE, epochs=1, unsupervised=frozenset(range(24)))
        trainer = scripted_trainer(tmp_path, recipe)
        trainer.run()
        assert trainer.step == 6
        assert [line["loss"] for line in metrics(tmp_path)] == [0.0] * 3
        assert math.isnan(trainer.recent_prefix.mean(ALONE))

    def test_divergence_is_an_error_and_never_saved(self, tmp_path):
        trainer = scripted_trainer(tmp_path, replace(RECIPE, learning_rate=1e30))
        with pytest.raises(UserError, match="lower --learning-rate"):
            trainer.run()
        assert checkpoints(tmp_path) == []

    def test_bfloat16_saves_bfloat16_and_resumes_bit_for_bit(self, tmp_path):
        recipe = replace(RECIPE, dtype=torch.bfloat16)
        scripted_trainer(tmp_path / "whole", recipe).run()
        cut = scripted_trainer(tmp_path / "cut", recipe)
        cut.train_step = stop_at(cut, 7)
        with pytest.raises(KeyboardInterrupt):
            cut.run()
        scripted_trainer(tmp_path / "cut", recipe).run()
        assert_same_end(tmp_path / "cut", tmp_path / "whole")
        assert weights(tmp_path / "whole" / LAST).count(b"BF16") == 2


def stop_at(trainer: Trainer, step: int):
    train_step = trainer.train_step

    def interrupted(batches):
        if trainer.step == step:
            raise KeyboardInterrupt
        train_step(batches)

    return interrupted


class TestResume:
    @pytest.mark.parametrize("step", [1, 4, 5, 11, 12, 17])
    def test_equals_an_uninterrupted_run(self, tmp_path, uninterrupted, step):
        trainer = scripted_trainer(tmp_path)
        trainer.train_step = stop_at(trainer, step)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        resumed = scripted_trainer(tmp_path)
        assert resumed.step == step // 4 * 4
        resumed.run()
        assert_same_end(tmp_path, uninterrupted)

    def test_of_a_finished_run_does_nothing(self, tmp_path, uninterrupted):
        scripted_trainer(tmp_path).run()
        again = scripted_trainer(tmp_path)
        assert again.run() == tmp_path / LAST
        assert again.recent_prefix.mean(ALONE) == pytest.approx(
            scripted_trainer(uninterrupted).recent_prefix.mean(ALONE)
        )
        assert_same_end(tmp_path, uninterrupted)

    def test_with_other_intervals_has_the_same_weights(self, tmp_path, uninterrupted):
        recipe = replace(RECIPE, save_interval=5, log_interval=2)
        trainer = scripted_trainer(tmp_path, recipe)
        trainer.train_step = stop_at(trainer, 13)
        with pytest.raises(KeyboardInterrupt):
            trainer.run()
        scripted_trainer(tmp_path, RECIPE).run()
        assert weights(tmp_path / LAST) == weights(uninterrupted / LAST)

    @pytest.mark.parametrize("save", [1, 3])
    def test_after_a_kill_during_a_save(self, tmp_path, uninterrupted, save):
        """Saves come after steps 4, 8, 12, 16 and 18; the one the process dies in must leave no trace."""
        assert run_child(tmp_path, "--kill-in-save", str(save)) == -signal.SIGKILL
        assert [path.name for path in tmp_path.glob(".*.tmp")], "the half-written save lies under a hidden name"
        resumed = scripted_trainer(tmp_path)
        assert resumed.step == (save - 1) * 4
        resumed.run()
        assert_same_end(tmp_path, uninterrupted)
        assert not list(tmp_path.glob(".*.tmp"))

    def test_after_a_kill_between_saves(self, tmp_path, uninterrupted):
        assert run_child(tmp_path, "--kill-after-step", "10") == -signal.SIGKILL
        scripted_trainer(tmp_path).run()
        assert_same_end(tmp_path, uninterrupted)


class TestSigterm:
    def test_saves_after_the_step_in_progress(self, tmp_path, uninterrupted):
        trainer = scripted_trainer(tmp_path)
        train_step = trainer.train_step

        def terminated(batches):
            if trainer.step == 9:
                os.kill(os.getpid(), signal.SIGTERM)
            train_step(batches)

        trainer.train_step = terminated
        with pytest.raises(SystemExit) as exit_status:
            trainer.run()
        assert exit_status.value.code == 143
        assert checkpoints(tmp_path)[-1].name == "epoch_1_step_10"
        scripted_trainer(tmp_path).run()
        assert weights(tmp_path / LAST) == weights(uninterrupted / LAST)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
