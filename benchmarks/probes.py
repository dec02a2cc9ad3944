"""Looking at a decoder from outside: time inside its networks, and operators it launches."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Watched = tuple[Any, str]
"""An object and the name of a method of it that runs a network."""
Now = Callable[[], float]
"""A clock's reading in seconds."""
_NO_KERNEL = ("empty", "_unsafe_view", "detach", "lift_fresh", "alias", "_local_scalar_dense")


def clock(device: torch.device, kind: str) -> Now:
    """The `wall` clock, on a GPU with everything launched so far done, or this process's own `cpu` time."""
    if device.type != "cuda":
        return time.process_time if kind == "cpu" else time.perf_counter

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


class Stopwatch:
    """Adds up the seconds spent inside watched calls; of nested ones only the outermost counts."""

    def __init__(self, now: Now) -> None:
        self._now, self._depth = now, 0
        self.calls: dict[str, list[tuple[float, float]]] = {}
        """Begin and end of every outermost call."""

    @contextmanager
    def watching(self, kind: str, watched: list[Watched]) -> Iterator[None]:
        """Count calls of `watched` as `kind` within."""
        before = [vars(place).get(name) for place, name in watched]
        for place, name in watched:
            setattr(place, name, self._timed(kind, getattr(place, name)))
        try:
            yield
        finally:
            for (place, name), own in zip(watched, before, strict=True):
                delattr(place, name) if own is None else setattr(place, name, own)

    def _timed(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        # Wrapped so that the library still finds the signature it looks at.
        @functools.wraps(call, updated=())
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._depth:
                return call(*args, **kwargs)
            begin = self._now()
            self._depth += 1
            try:
                return call(*args, **kwargs)
            finally:
                self._depth -= 1
                self.calls.setdefault(kind, []).append((begin, self._now()))

        return timed


class OperatorCount(TorchDispatchMode):
    """How many operators ran, views and bare allocations excluded: on a GPU each is at least one launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.count += not (func.is_view or name.startswith(_NO_KERNEL))
        return func(*args, **(kwargs or {}))
