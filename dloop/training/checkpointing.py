"""Checkpoints of a running training: the draft in its host's own format with `training_state.pt` beside it.

A checkpoint folder appears under its name only when it is complete, so that whatever carries the name can be
resumed from. Knows nothing about what the state means.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch

from dloop.hosts.host import Host
from dloop.results.atomic import replacing_folder

STATE_FILE = "training_state.pt"
_NAME = re.compile(r"epoch_(\d+)_step_(\d+)")


def checkpoint_name(epoch: int, step: int) -> str:
    """`epoch_{e}_step_{s}`: saves on the way carry the 0-based epoch, the last save the number of epochs."""
    return f"epoch_{epoch}_step_{step}"


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first; half-written ones and other entries are ignored."""
    found = {path: match for path in folder.glob("epoch_*") if (match := _NAME.fullmatch(path.name))}
    return sorted(found, key=lambda path: (int(found[path][2]), int(found[path][1])))


def save_checkpoint(path: Path, host: Host, dtype: torch.dtype, state: dict[str, Any]) -> None:
    """Write the draft and `state` (tensors and plain numbers) to a hidden name, then rename it to `path`."""
    with replacing_folder(path) as folder:
        host.save(folder, dtype)
        torch.save(state, folder / STATE_FILE)


def load_state(checkpoint: Path, device: torch.device) -> dict[str, Any]:
    """The training state of `checkpoint`, its tensors on `device`; never runs code from the file."""
    return torch.load(checkpoint / STATE_FILE, map_location=device, weights_only=True)


def save_final(path: Path, host: Host, dtype: torch.dtype) -> None:
    """Write the draft alone, complete and in its host's format, to `path`."""
    with replacing_folder(path) as folder:
        host.save(folder, dtype)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the `keep` newest checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        # Under its own name a half-deleted checkpoint would look complete.
        doomed = path.rename(path.with_name(f".{path.name}.old.tmp"))
        shutil.rmtree(doomed)


def clear_leftovers(folder: Path) -> None:
    """Delete what a killed process left under temporary names."""
    for path in folder.glob(".*.tmp"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
