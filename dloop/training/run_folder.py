"""The output folder of a training run: whose it is, and whether to start or to go on.

`run_config.json` holds what determines the run's numbers. A folder with another configuration is refused or
moved aside, never mixed. Knows nothing about training itself.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from dloop.cli import UserError
from dloop.results.atomic import write_json
from dloop.training.checkpointing import STATE_FILE, checkpoints, clear_leftovers

CONFIG_FILE, MANIFEST_FILE, FINAL, METRICS_FILE = "run_config.json", "manifest.json", "final", "metrics.jsonl"


def claim(folder: Path, config: dict[str, Any], *, resume: bool, move_aside: bool) -> Path | None:
    """Make `folder` the home of the run `config` (flag -> JSON value); returns the checkpoint to go on from.

    A run with another configuration in it, or any run when `resume` is False, is renamed beside itself with
    `move_aside` and a UserError without.
    """
    obstacle = _obstacle(folder, config, resume)
    if obstacle and not move_aside:
        raise UserError(f"{obstacle}; take another --output-dir, or --on-config-change move-aside")
    if obstacle:
        print(f"{obstacle}; it is now {_rename_aside(folder)}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    write_json(folder / CONFIG_FILE, config)
    return next(reversed(checkpoints(folder)), None)


def is_finished(folder: Path) -> bool:
    """Whether the run in `folder` has written its final draft and its manifest."""
    return (folder / MANIFEST_FILE).is_file() and (folder / FINAL / "config.json").is_file()


def fingerprint(name: str, revision: str | None = None) -> str:
    """What `name` stands for: a hash of a local file or folder, else the hub's name with its revision."""
    path = Path(name)
    if path.is_file():
        return f"sha256:{_hash_file(path)}"
    if not path.is_dir():
        return f"{name}@{revision}" if revision else name
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.startswith(".") and file.name != STATE_FILE:
            digest.update(f"{file.name} {_hash_file(file)}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _obstacle(folder: Path, config: dict[str, Any], resume: bool) -> str | None:
    saved = [*checkpoints(folder), *folder.glob(FINAL)]
    if not saved:
        # Without weights a run binds nobody: it may have failed on the very option that changes now.
        return None
    if not (folder / CONFIG_FILE).exists():
        return f"{folder} holds {saved[0].name} but no {CONFIG_FILE}"
    try:
        stored = dict(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return f"{folder} holds {saved[0].name} and a {CONFIG_FILE} that is damaged"
    if changes := differences(stored, config):
        return f"{folder} holds a run with another configuration ({'; '.join(changes)})"
    return None if resume else f"{folder} holds a run with {saved[0].name} and --no-resume was given"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """One phrase for every flag whose value is not the same in both configurations."""
    missing = "absent"
    names = [name for name in (*new, *(set(old) - set(new))) if old.get(name, missing) != new.get(name, missing)]
    return [f"{name} was {old.get(name, missing)}, is {new.get(name, missing)}" for name in names]


def _rename_aside(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    return folder.rename(aside)
