"""What a training run tells about itself: sums over steps and ranks, seconds by part, one line an interval.

Sums stay on the device until a line is due, so that logging never makes the device wait. Knows nothing about
where the numbers come from.
"""

from __future__ import annotations

import json
import math
import resource
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dloop.results.atomic import write_text
from dloop.training.distributed import World

Ratio = tuple[Tensor, Tensor]


class RatioSums:
    """Means as sums of numerators over sums of denominators; micro-steps may bring different metrics."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, ...], Tensor] = {}

    def add(self, ratios: Mapping[str, Ratio]) -> None:
        """Add one micro-step's (numerator, denominator) pairs, detached scalars of one device."""
        names = tuple(ratios)
        # One stacked addition for all metrics: twenty tiny ones would cost more than the sums are worth.
        values = torch.stack([part for pair in ratios.values() for part in pair]).double()
        self._sums[names] = self._sums[names] + values if names in self._sums else values

    def pop(self, world: World) -> dict[str, float]:
        """The means over everything added on all ranks, which must have added the same names; starts anew."""
        totals: dict[str, Tensor] = {}
        for names, values in self._sums.items():
            for name, pair in zip(names, world.sums(values).view(-1, 2), strict=True):
                totals[name] = totals[name] + pair if name in totals else pair
        self._sums = {}
        return {name: _mean(pair) for name, pair in totals.items()}


class RecentRatio:
    """One metric's mean over the last `steps` optimizer steps, kept across a resume."""

    def __init__(self, steps: int) -> None:
        self._pairs: deque[Tensor] = deque(maxlen=steps)

    def add(self, pairs: list[Ratio]) -> None:
        """Add one optimizer step's micro-steps."""
        self._pairs.append(torch.stack([torch.stack(pair) for pair in pairs]).double().sum(dim=0))

    def state(self, world: World) -> Tensor:
        """Sums over ranks, one row [2] a step."""
        return world.sums(torch.stack(list(self._pairs))) if self._pairs else torch.zeros(0, 2).double()

    def load_state(self, state: Tensor, world: World) -> None:
        """Take over a saved state; only the main process does, since it holds the sums over all ranks."""
        rows = state if world.is_main else torch.zeros_like(state)
        self._pairs.extend(row.to(world.device) for row in rows)

    def mean(self, world: World) -> float:
        """The mean over ranks and steps; NaN when nothing was added."""
        return _mean(self.state(world).sum(dim=0))


def _mean(pair: Tensor) -> float:
    numerator, denominator = pair.tolist()
    return numerator / denominator if denominator else math.nan


class PartClock:
    """Seconds by part of a step. On a GPU the marks are events on its stream, read only when the sums are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[tuple[str | None, Any]] = []

    def start(self, part: str | None) -> None:
        """The running part ends here and `part` begins; None: nothing that counts."""
        self._marks.append((part, self._stamp()))

    def pop(self) -> dict[str, float]:
        """Seconds by part since the last call."""
        self.start(None)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds: dict[str, float] = {}
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            if part is not None:
                seconds[part] = seconds.get(part, 0.0) + self._between(begin, end)
        self._marks = []
        return seconds

    def _stamp(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000.0 if self.device.type == "cuda" else end - begin


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory used so far: allocated on the GPU, else resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Interval:
    """Everything measured since the last line of the log."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.clock = PartClock(world.device)
        self.sums = RatioSums()
        self._tokens = self._samples = 0
        self._began = time.perf_counter()

    def count(self, lengths: list[int]) -> None:
        """Note a micro-batch by the number of tokens of its rows."""
        self._tokens += sum(lengths)
        self._samples += len(lengths)

    def pop(self) -> dict[str, Any]:
        """Means over steps and ranks, rates over all ranks, this rank's seconds by part; begins anew."""
        means = self.sums.pop(self.world)
        parts = self.clock.pop()
        now = time.perf_counter()
        counted = torch.tensor((self._tokens, self._samples), dtype=torch.float64)
        tokens, samples = (self.world.sums(counted) / (now - self._began)).tolist()
        self._tokens = self._samples = 0
        self._began = now
        return {
            **means,
            "tokens_per_second": tokens,
            "samples_per_second": samples,
            "seconds": parts,
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
        }


class MetricsLog:
    """`metrics.jsonl`: one line an interval, written by the main process."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line; NaN and infinities become null."""
        clean = {name: _json_safe(value) for name, value in record.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")

    def truncate(self, step: int) -> None:
        """Drop a torn last line and the lines behind step `step`, which a resumed run writes again."""
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            write_text(self.path, "".join(kept))


def _json_safe(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
