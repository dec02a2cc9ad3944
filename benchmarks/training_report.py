"""What a comparison of training steps says: two tables in the terminal and a JSON file; and how memory is read."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dloop.results.atomic import write_json
from dloop.results.provenance import environment

PARTS = ("target", "draft", "loss", "backward", "optimizer")
"""The frozen target, the draft's forward, head and loss, both's backward, the optimizer."""


@dataclass(frozen=True)
class Row:
    """One objective. Milliseconds of an optimizer step; `by_draw` has them for each stage or length of unroll."""

    name: str
    step_ms: float
    by_draw: dict[int, float]
    parts_ms: dict[str, float]
    tokens_per_second: float


@dataclass(frozen=True)
class MemoryRow:
    """Most memory of a looped step beyond what lay there before it, in MiB."""

    host: str
    length: int
    anchors: int
    peak_mib: float


def peak_above_rest(step: Callable[[], None], device: torch.device) -> float:
    """Bytes that `step` needs at most beyond those in use before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    # What earlier steps freed must not serve this one unseen; then Linux sets the high-water mark back.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    step()
    return _status_bytes("VmHWM") - before


def _status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"/proc/self/status has no {field}"
    return int(found[1]) * 1024


def show(rows: list[Row], memory: list[MemoryRow]) -> None:
    """Print both tables."""
    console = Console(width=max(Console().width, 132))
    table = _table("Milliseconds an optimizer step", "objective", *PARTS, "step", "x host's own", "tokens/s", "by draw")
    # Every second row is the looped form of the one before it.
    for place, row in enumerate(rows):
        ratio = row.step_ms / rows[place - place % 2].step_ms
        by_draw = "  ".join(f"{draw}: {value:.0f}" for draw, value in sorted(row.by_draw.items()))
        numbers = [f"{value:.1f}" for value in (*row.parts_ms.values(), row.step_ms)]
        table.add_row(row.name, *numbers, f"{ratio:.2f}", f"{row.tokens_per_second:.0f}", by_draw)
    console.print(table)
    if memory:
        table = _table("Peak memory of the deepest looped step", "host", "tokens a row", "anchors", "MiB")
        for entry in memory:
            table.add_row(entry.host, str(entry.length), str(entry.anchors), f"{entry.peak_mib:.0f}")
        console.print(table)


def _table(title: str, first: str, *headings: str) -> Table:
    table = Table(title=title)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def write(
    folder: Path, rows: list[Row], memory: list[MemoryRow], options: dict[str, Any], device: torch.device
) -> None:
    """`train.json` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    path = folder / "train.json"
    write_json(
        path,
        {
            "options": values,
            "env": environment(device, options["dtype"] or "default", options["attention_backend"] or "default"),
            "rows": [asdict(row) for row in rows],
            "memory": [asdict(entry) for entry in memory],
        },
    )
    Console().print(str(path))
