"""Servers that belong to this run: started on this machine, one a GPU, and ended with it, whatever ends it.

The command is the user's, SGLang's by default; all that is asked of it is to answer `GET /health` with 200 once it can
be used. Knows nothing of requests and rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from dloop.cli import UserError

SGLANG = (
    "python -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port} --dtype bfloat16 "
    "--mem-fraction-static 0.8"
)
"""The default command."""
_POLL_SECONDS = 0.2
_SECONDS_TO_END = 30.0
"""Then what is left of a server is killed."""
_LAST_LINES = 15
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class ServerCommand:
    """How a server is started: `template` with {model} and {port}, and how long it may take to be ready."""

    model: str
    revision: str | None = None
    template: str = SGLANG
    seconds_to_start: float = 1800.0

    def words(self, port: int) -> list[str]:
        """The command for one server. Raises `UserError` for a template without {model} or {port}, or with others."""
        try:
            words = [word.format(model=self.model, port=port) for word in shlex.split(self.template)]
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise UserError(f"the server command {self.template!r} cannot be filled in ({error})") from error
        if "{model}" not in self.template or "{port}" not in self.template:
            raise UserError(f"the server command {self.template!r} must say where {{model}} and {{port}} go")
        return words if self.revision is None else [*words, "--revision", self.revision]


class ServerProcesses:
    """`count` servers while the body of `with` runs; `addresses` are where they listen (loopback only).

    Their output goes to `<log>_<n>.log`. Raises `UserError`, with the end of its log, for one that does not start.
    """

    def __init__(self, command: ServerCommand, count: int, log: Path) -> None:
        self._command = command
        self._ports = free_ports(count)
        self._gpus = gpus_for(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._logs = [log.with_name(f"{log.name}_{number}.log") for number in range(1, count + 1)]
        self._processes: list[subprocess.Popen[bytes]] = []
        self.addresses = tuple(f"127.0.0.1:{port}" for port in self._ports)

    def __enter__(self) -> ServerProcesses:
        self._previous = signal.signal(signal.SIGTERM, _end_like_an_error)
        try:
            for port, gpu, log in zip(self._ports, self._gpus, self._logs, strict=True):
                self._processes.append(_start(self._command.words(port), gpu, log))
            deadline = time.monotonic() + self._command.seconds_to_start
            for number in range(len(self._processes)):
                self._wait_until_ready(number, deadline)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _wait_until_ready(self, number: int, deadline: float) -> None:
        process, log = self._processes[number], self._logs[number]
        while not _is_healthy(self._ports[number]):
            if process.poll() is not None:
                raise UserError(f"a server ended with code {process.returncode} before it was ready:\n{_tail(log)}")
            if time.monotonic() > deadline:
                seconds = self._command.seconds_to_start
                raise UserError(f"a server was not ready after {seconds:g} s; the end of {log}:\n{_tail(log)}")
            time.sleep(_POLL_SECONDS)

    def _end(self) -> None:
        """Ask every server and all it started to end, kill what does not."""
        for process in self._processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, self._previous)


def free_ports(count: int) -> list[int]:
    """So many ports of loopback that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]


def gpus_for(count: int, visible: str | None) -> Sequence[str]:
    """What each of `count` servers gets as CUDA_VISIBLE_DEVICES: one of the devices this process may use."""
    devices = [str(number) for number in range(count)] if visible is None else [d for d in visible.split(",") if d]
    if visible and len(devices) < count:
        raise UserError(
            f"{count} servers are to be launched, one a GPU, but CUDA_VISIBLE_DEVICES is {visible!r}: "
            "ask the job for as many GPUs, or launch fewer servers"
        )
    return devices[:count] or [""] * count


def _start(words: list[str], gpu: str, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "wb") as output:
        try:
            return _spawn(words, {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}, output)
        except OSError as error:
            raise UserError(
                f"the server command cannot be started ({error}): install SGLang into this environment, or give "
                "another --server-command"
            ) from error


def _spawn(words: list[str], environment: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """The process, in a group of its own: an interrupt at the keyboard reaches it through `_end` alone."""
    return subprocess.Popen(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """Linux only: even a parent that is killed takes the server along, which would otherwise keep its GPU."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _end_like_an_error(number: int, frame: object) -> None:
    """What a job scheduler's signal does: leave every `with`, then end with the code a shell shows for it."""
    raise SystemExit(128 + number)


def _is_healthy(port: int) -> bool:
    # No proxy stands between this process and its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])
