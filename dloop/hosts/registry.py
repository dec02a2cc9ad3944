"""Which host is this checkpoint? The one list of families, and loading through it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dloop.cli import UserError
from dloop.hosts.checkpoint_files import read_config, read_tensors, resolve, tensor_names
from dloop.hosts.dflash import DFlashHost
from dloop.hosts.domino import DominoHost
from dloop.hosts.dspark import DSparkHost
from dloop.hosts.eagle3.host import Eagle3Host
from dloop.hosts.host import Host
from dloop.hosts.mtp.gemma4 import Gemma4Host
from dloop.hosts.mtp.qwen35 import Qwen35Host

HOSTS: tuple[type[Host], ...] = (DominoHost, DSparkHost, DFlashHost, Eagle3Host, Gemma4Host, Qwen35Host)
"""Families in the order in which they are asked; the first that recognises a checkpoint has it."""

MTP: Mapping[str, type[Host]] = {"qwen3.5": Qwen35Host, "gemma4": Gemma4Host}
"""The families of multi-token prediction, by the name of their target."""

INSIDE_TARGET = "mtp"
"""What stands for the draft that lies in the target's own checkpoint."""


def load_host(source: str, *, dtype: torch.dtype, device: torch.device, revision: str | None = None) -> Host:
    """The draft in a folder or hub repository, recognised from its configuration and tensors, loaded strictly."""
    config, tensors = read_checkpoint(source, revision)
    return build_host(config, tensors, source, dtype=dtype, device=device)


def read_checkpoint(source: str, revision: str | None = None) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Configuration and tensors of the draft in a folder or hub repository, as they are written there."""
    folder = resolve(source, revision)
    config = read_config(folder)
    return config, read_tensors(folder, _family(config, tensor_names(folder), source).tensor_prefix)


def recognise(source: str, revision: str | None = None) -> type[Host]:
    """The family of the draft in a folder or hub repository, without loading it."""
    folder = resolve(source, revision)
    return _family(read_config(folder), tensor_names(folder), source)


def recognise_config(config_path: str) -> type[Host]:
    """The family of the draft that a `config.json` (or its folder) describes."""
    return _family(read_config(Path(config_path)), [], config_path)


def build_host(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    source: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Host:
    """The host that recognises the checkpoint; `source` names it in messages."""
    with _understanding(source):
        return _family(config, list(tensors), source).load(config, tensors, dtype=dtype, device=device)


def new_host(config_path: str, *, seed: int, dtype: torch.dtype, device: torch.device) -> Host:
    """A draft from scratch: `config_path` is a `config.json` (or its folder); weights follow from `seed`."""
    config, family = read_config(Path(config_path)), recognise_config(config_path)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with _understanding(config_path):
            return family.load(config, None, dtype=dtype, device=device)


@contextmanager
def _understanding(source: str) -> Iterator[None]:
    """A value of the wrong kind in a configuration is the checkpoint's fault, wherever it is met."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise UserError(
            f"the config.json of {source} holds a value that no draft can be built from ({error}); correct it"
        ) from error


def _family(config: dict[str, object], keys: list[str], source: str) -> type[Host]:
    with _understanding(source):
        for family in HOSTS:
            if family.recognises(config, keys):
                return family
    raise UserError(
        f"{source} is no draft of a known family (architectures {config.get('architectures')}); "
        f"known are {', '.join(dict.fromkeys(family.name for family in HOSTS))}"
    )
