"""What a run ran on: device, versions, code, command. Imports torch only when a run asks about its device."""

import hashlib
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dloop

if TYPE_CHECKING:
    import torch

PACKAGE = Path(dloop.__file__).parent

MEASURED_CODE = ("dloop.benchmark", "dloop.data", "dloop.decoding", "dloop.hosts", "dloop.trees")
"""Modules whose text can change what an evaluation measures."""


def environment(
    device: "torch.device | str",
    dtype: "torch.dtype | str",
    attn: str,
    *,
    code: Sequence[str] = MEASURED_CODE,
) -> dict[str, Any]:
    """The `env` of a result or manifest: JSON values only. `code` names the modules whose text is hashed.

    `gpu` is the device's name, also when it is a CPU; `gpu_count` the GPUs of all processes; `processes` the
    world size that torchrun announces; `started` the time of this call (UTC).
    """
    import torch

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    on_gpu = torch.device(device).type == "cuda"
    return {
        "gpu": device_name(device),
        "gpu_count": processes if on_gpu else 0,
        "processes": processes,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "transformers": _version("transformers"),
        "cuda": torch.version.cuda if on_gpu else None,
        "python": platform.python_version(),
        "attn": attn,
        "dtype": str(dtype).removeprefix("torch."),
        "hostname_hash": hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12],
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "dloop": dloop.__version__,
        "code": code_hash(*code),
        "git": git_commit(),
        "command": command_line(),
    }


def device_name(device: "torch.device | str") -> str:
    """The GPU's name, or `CPU: ` and the processor's."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU: {_processor()}"


def code_hash(*modules: str) -> str:
    """Hash of the Python sources of `modules` (dotted names below `dloop`; none: the whole package).

    It depends on the files' names and texts alone. LookupError for a module that is not there.
    """
    digest = hashlib.sha256()
    for module in sorted(modules) or ["dloop"]:
        for path in _sources(module):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def git_commit() -> str | None:
    """Commit of the checkout that holds this package, with `-dirty` if files changed; None without one."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def command_line() -> str:
    """The command of this process, as a person could type it."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", spec.name] if spec is not None else sys.argv[:1]
    return shlex.join([*start, *sys.argv[1:]])


def _sources(module: str) -> list[Path]:
    place = PACKAGE.parent.joinpath(*module.split("."))
    if place.is_dir():
        return sorted(place.rglob("*.py"))
    if not place.with_suffix(".py").is_file():
        raise LookupError(f"no module {module} beside {PACKAGE}")
    return [place.with_suffix(".py")]


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(PACKAGE), *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
