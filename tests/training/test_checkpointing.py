"""Which folders count as checkpoints, and what a save leaves behind when it fails."""

from pathlib import Path

import pytest
import torch

from dloop.training.checkpointing import (
    STATE_FILE,
    checkpoint_name,
    checkpoints,
    clear_leftovers,
    load_state,
    prune,
    save_checkpoint,
    save_final,
)
from tests.training.scripted import ScriptedHost

CPU = torch.device("cpu")


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoints(folder)]


def test_only_whole_names_count_and_steps_are_ordered_as_numbers(tmp_path):
    for name in ("epoch_0_step_9", "epoch_0_step_10", "epoch_1_step_10", "epoch_1_step_x", "final"):
        (tmp_path / name).mkdir()
    (tmp_path / ".epoch_0_step_11.abc.tmp").mkdir()
    (tmp_path / "epoch_0_step_12.tmp").mkdir()
    assert names(tmp_path) == ["epoch_0_step_9", "epoch_0_step_10", "epoch_1_step_10"]
    assert checkpoint_name(1, 22202) == "epoch_1_step_22202"


def test_a_checkpoint_is_a_draft_with_its_state_beside_it(tmp_path):
    path = tmp_path / checkpoint_name(0, 3)
    save_checkpoint(path, ScriptedHost(), torch.bfloat16, {"step": 3, "moments": torch.ones(2)})
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors", STATE_FILE]
    state = load_state(path, CPU)
    assert state["step"] == 3
    assert state["moments"].tolist() == [1.0, 1.0]


def test_the_final_draft_has_no_state(tmp_path):
    save_final(tmp_path / "final", ScriptedHost(), torch.float32)
    assert sorted(file.name for file in (tmp_path / "final").iterdir()) == ["config.json", "model.safetensors"]


def test_a_state_with_code_in_it_is_never_run(tmp_path):
    torch.save({"step": print}, tmp_path / STATE_FILE)
    with pytest.raises(Exception, match="Weights only"):
        load_state(tmp_path, CPU)


def test_a_failing_save_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(ScriptedHost, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(tmp_path / checkpoint_name(0, 1), ScriptedHost(), torch.float32, {})
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_newest(tmp_path):
    for step in (4, 8, 12):
        (tmp_path / checkpoint_name(0, step) / "deep").mkdir(parents=True)
    prune(tmp_path, 2)
    assert names(tmp_path) == ["epoch_0_step_8", "epoch_0_step_12"]
    assert len(list(tmp_path.iterdir())) == 2


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    (tmp_path / ".epoch_0_step_4.x.tmp").mkdir()
    (tmp_path / ".metrics.jsonl.y.tmp").touch()
    (tmp_path / "metrics.jsonl").touch()
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
