"""Reading and writing draft checkpoints as files: `config.json` beside safetensors, local or on the hub.

Knows no host. Code that a repository ships is never run. An older `pytorch_model.bin` is read where there are no
safetensors, by torch's reader that knows tensors alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from dloop.cli import UserError

PICKLED = "pytorch_model.bin"
_PREFIXES = ("draft_model.", "_orig_mod.", "model.", "logit_head.")


def resolve(source: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint: `source` itself when it is one, else the hub repository of that name."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(*patterns: str) -> Path:
        return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))

    try:
        folder = fetch("*.json", "*.safetensors")
        return folder if any(folder.glob("*.safetensors")) else fetch("*.json", PICKLED)
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"{source!r} is neither a folder nor a hub repository that can be reached ({type(error).__name__}); "
            "check the spelling, or download it first and give the folder"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed `config.json` of a checkpoint folder (or of the file itself)."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist; a checkpoint folder holds config.json") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, a checkpoint's configuration is an object")
    return config


def read_tensors(folder: Path, prefix: str = "") -> dict[str, Tensor]:
    """Tensors of a folder, from `model.safetensors` or the shards its index names, prefixes of trainers stripped.

    Only those whose names then begin with `prefix`; of a safetensors file no other is read.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        tensors |= _read_pickled(path) if path.name == PICKLED else _read_safetensors(path, prefix)
    plain = {_plain_name(name): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in plain.items() if name.startswith(prefix)}


def _read_safetensors(path: Path, prefix: str) -> dict[str, Tensor]:
    with _opened(path) as file:
        return {name: file.get_tensor(name) for name in file.keys() if _plain_name(name).startswith(prefix)}  # noqa: SIM118


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); download it again") from error


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Tensors of a pickled file; anything else in it is refused, not run."""
    from pickle import UnpicklingError

    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{path} cannot be read as plain tensors ({reason}); nothing else is loaded") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UserError(f"{path} is no flat table of tensors; only such files are read")
    return found


def tensor_names(folder: Path) -> list[str]:
    """The names `read_tensors` would answer with; reads no tensor of a safetensors file."""
    names: list[str] = []
    for path in _weight_files(folder):
        if path.name == PICKLED:
            return list(read_tensors(folder))
        with _opened(path) as file:
            names += map(_plain_name, file.keys())
    return names


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return [folder / name for name in _shards(index)]
    if (folder / PICKLED).is_file():
        return [folder / PICKLED]
    raise UserError(f"{folder} holds neither model.safetensors nor its index, nor {PICKLED}; these are what is read")


def _shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} does not map tensors to files ({error!r}); download it again") from error


def _plain_name(name: str) -> str:
    """The tensor name without what trainers and compilers put in front."""
    while prefix := next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None):
        name = name.removeprefix(prefix)
    return name


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into `folder`, which the caller renames into place."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def load_strictly(module: Any, tensors: dict[str, Tensor], what: str) -> None:
    """Fill `module` with `tensors`; a missing, unexpected or misshapen one is a UserError that names them all."""
    wanted = module.state_dict()
    problems = [f"missing {name}" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - wanted.keys())]
    problems += [
        f"{name} is {list(tensors[name].shape)}, expected {list(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    if problems:
        shown = "; ".join(problems[:6]) + ("; ..." if len(problems) > 6 else "")
        raise UserError(f"{what}: the tensors do not fit its configuration: {shown}")
    module.load_state_dict(tensors)
