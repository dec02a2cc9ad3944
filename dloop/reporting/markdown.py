"""The tables for people: one page a host, and the overview that is read first."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from dloop.reporting import overview, remarks, text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import HOSTS, LOOPED, Row, benchmark_label
from dloop.reporting.layout import Grid, grids, texts
from dloop.reporting.measurement import Measurement
from dloop.reporting.overview import Pair


def host_page(found: Collected, host: str, pairs: Sequence[Pair], note: str | None, *, intervals: bool = False) -> str:
    """A host's table, what stands behind its ratios, and the remarks."""
    sections = grids(found, host)
    own = [pair for pair in pairs if pair.row.host == host]
    audits = [part.audit for grid in sections for part in grid.averages.values()]
    blocks = [f"# {HOSTS.get(host, host)}", *_note(note), remarks.CELLS]
    for grid in sections:
        main = texts(grid, _bold, intervals=intervals).reset_index(names="Speedup / τ")
        blocks += [f"## {grid.target}", _table(main), _table(_details(grid, modelled=bool(found.costs)))]
    blocks += [*_audit(found, audits), *remarks.hardly_opened(own)]
    return _page([*blocks, remarks.INTERVAL, remarks.modelled(found), remarks.measured_on(found), *_warnings(found)])


def overview_page(
    found: Collected, pairs: Sequence[Pair], note: str | None, pictures: Sequence[Path], folder: Path
) -> str:
    """Every pair of released and looped draft in one line, the pictures, and the remarks; `folder` is where it lies."""
    audits = [part.audit for part in found.measured.values()]
    hosts = ", ".join(f"[{HOSTS.get(host, host)}]({host}.md)" for host in found.hosts)
    return _page(
        [
            "# Overview: what the loop adds",
            *_note(note),
            *_comparison(found, pairs),
            *_audit(found, audits),
            *remarks.hardly_opened(pairs),
            *(f"![{path.stem.replace('_', ' ')}]({os.path.relpath(path, folder)})" for path in pictures),
            f"Tables by host: {hosts}.",
            remarks.INTERVAL,
            remarks.modelled(found),
            remarks.measured_on(found),
            *_warnings(found),
        ]
    )


def _comparison(found: Collected, pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return ["No row drafts additional stages, so there is nothing to compare."]
    return [
        "Speedup over autoregressive decoding / mean acceptance length τ, averaged over "
        f"{', '.join(map(benchmark_label, found.benchmarks))}.",
        _table(overview.cells(found, pairs), words=2),
        f"Gain: {LOOPED} over released, of unrounded averages; in parentheses the interval explained below.",
    ]


def _bold(words: str) -> str:
    return f"**{words}**"


def _details(grid: Grid, *, modelled: bool) -> pd.DataFrame:
    columns: list[tuple[str, Callable[[Row, Measurement], str]]] = [
        ("gate", lambda row, part: text.gate(row)),
        ("tokens/s", lambda row, part: text.whole(part.tokens_per_second)),
        ("speedup", lambda row, part: text.ratio(part.speedup)),
        ("95 % interval", lambda row, part: text.spread(part.speedup_interval) if row.host else ""),
        ("modelled", lambda row, part: text.ratio(part.modelled_speedup) if row.host else ""),
        ("τ over all rounds", lambda row, part: text.length(part.tau_micro)),
        ("extra stages a round", lambda row, part: text.length(part.extra_stages) if row.host else ""),
        ("rounds with any", lambda row, part: text.percent(part.open_share) if row.host else ""),
        ("identical answers", lambda row, part: _identical(part)),
    ]
    lines = {
        head: [show(row, grid.averages[label]) for label, row in grid.rows.items()]
        for head, show in columns
        if modelled or head != "modelled"
    }
    return pd.DataFrame({"Behind the ratios (Avg.)": list(grid.rows), **lines})


def _identical(part: Measurement) -> str:
    return f"{part.audit.identical} of {part.audit.total}" if part.audit else ""


def _audit(found: Collected, audits: Sequence[object]) -> list[str]:
    return [remarks.lossless(audits, found.results[0].env["dtype"])]  # type: ignore[arg-type]


def _note(note: str | None) -> list[str]:
    return [f"> {' '.join(note.split())}"] if note else []


def _warnings(found: Collected) -> list[str]:
    lines = remarks.warnings(found)
    return ["**Mind:**\n\n" + "\n".join(f"- {line}" for line in lines)] if lines else []


def _page(blocks: Sequence[str]) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(frame: pd.DataFrame, words: int = 1) -> str:
    """A table whose first `words` columns hold words, the others numbers."""
    align = ["left"] * words + ["right"] * (len(frame.columns) - words)
    return frame.to_markdown(index=False, disable_numparse=True, colalign=align)
