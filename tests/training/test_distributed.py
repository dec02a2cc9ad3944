"""Processes: alone without torchrun, and two of them over gloo on scripted parts."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dloop.cli import UserError
from dloop.training.distributed import World, choose_device, join_world, without_reduction
from tests.training.scripted import Recipe, scripted_trainer
from tests.training.test_trainer import LAST, metrics

ROOT = Path(__file__).parents[2]
ONE_RANK = Recipe(batch_size=1, accumulation=4)


def torchrun(folder: Path, *arguments: str) -> Path:
    """Two scripted training processes on `folder`, to the end."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "tests.training.scripted"]
    done = subprocess.run(
        [sys.executable, *command, str(folder), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder / LAST


def assert_close(checkpoint: Path, other: Path) -> None:
    ours, theirs = (load_file(path / "model.safetensors") for path in (checkpoint, other))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


class TestAlone:
    def test_without_torchrun_every_collective_is_the_value_itself(self):
        with join_world("cpu") as world:
            assert world == World(device=torch.device("cpu"))
            assert world.any(True)
            assert not world.any(False)
            assert world.from_main("value") == "value"
            assert world.sums(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
            module = torch.nn.Linear(1, 1)
            assert world.replicate(module) is module
            with world.one_a_node_first(), without_reduction(module):
                pass

    def test_only_the_main_process_prints(self, capsys):
        World(device=torch.device("cpu"), rank=1, size=2).say("hidden")
        World(device=torch.device("cpu")).say("shown")
        assert capsys.readouterr().out == "shown\n"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
    def test_cuda_without_a_gpu_is_refused_with_the_fix(self):
        assert choose_device(None) == torch.device("cpu")
        with pytest.raises(UserError, match="use --device cpu"):
            choose_device("cuda")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    return torchrun(tmp_path_factory.mktemp("two"), "--batch-size", "1", "--accumulation", "2")


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    return scripted_trainer(tmp_path_factory.mktemp("one"), ONE_RANK).run()


@pytest.mark.slow
class TestTwoRanks:
    """Batch 1, so that both layouts have the same micro-batches; each is normalised by itself."""

    def test_equal_one_rank_with_twice_the_accumulation(self, two, one):
        assert_close(two, one)

    def test_log_the_same_means(self, two, one):
        """Sums over ranks are divided once, so short rows do not weigh more."""
        for ours, theirs in zip(metrics(two.parent), metrics(one.parent), strict=True):
            assert ours["step"] == theirs["step"]
            for name in ("loss", "host/loss", "host/accepted_prefix", "grad_norm"):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-5)

    def test_are_continued_by_one_rank(self, two, one, tmp_path):
        """Nothing in a checkpoint depends on the number of ranks that wrote it."""
        shutil.copytree(two.parent, tmp_path, dirs_exist_ok=True)
        for name in (LAST, "epoch_2_step_16"):
            shutil.rmtree(tmp_path / name)
        trainer = scripted_trainer(tmp_path, ONE_RANK)
        assert trainer.step == 12
        assert_close(trainer.run(), one)
        whole = scripted_trainer(one.parent, ONE_RANK)
        assert trainer.recent_prefix.mean(trainer.world) == pytest.approx(whole.recent_prefix.mean(whole.world))
