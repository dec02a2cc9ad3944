"""Where the time of a response goes, without slowing it: stamps are taken on the way and read after the response."""

from __future__ import annotations

import time
from collections import defaultdict

import torch

OUTSIDE_DECODING = ("prefill", "draft_prefill")
"""Parts that are charged to no output token (z-lab/dflash, liranringel/ddtree: the clock restarts behind them)."""


class Clock:
    """The time since the previous stamp belongs to the part that `mark` names. CUDA events on a GPU, else the wall."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self) -> None:
        """Begin a response; earlier stamps are forgotten."""
        if self._cuda:
            torch.cuda.synchronize()
        self._marks = [("", self._stamp())]

    def mark(self, part: str) -> None:
        """Charge the time since the last stamp to `part`."""
        self._marks.append((part, self._stamp()))

    def read(self) -> dict[str, float]:
        """Seconds by part."""
        if self._cuda:
            torch.cuda.synchronize()
        seconds: dict[str, float] = defaultdict(float)
        for (_, before), (part, after) in zip(self._marks, self._marks[1:], strict=False):
            seconds[part] += self._between(before, after)
        return dict(seconds)

    def _stamp(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @staticmethod
    def _between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
        if isinstance(before, float) or isinstance(after, float):
            return float(after) - float(before)  # type: ignore[arg-type]
        return before.elapsed_time(after) / 1000
