"""The tables for people: one page a host, and the overview that is read first."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dloop.reporting import overview, remarks, text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import HOSTS, LOOPED, Row, benchmark_label
from dloop.reporting.layout import Grid, grids, marked
from dloop.reporting.measurement import Measurement
from dloop.reporting.overview import Pair


def host_page(found: Collected, host: str, pairs: Sequence[Pair], note: str | None) -> str:
    """A host's table, what stands behind its ratios, and the remarks."""
    sections = grids(found, host)
    own = [pair for pair in pairs if pair.row.host == host]
    audits = [part.audit for grid in sections for part in grid.averages.values()]
    blocks = [f"# {HOSTS.get(host, host)}", *_note(note), remarks.CELLS]
    for grid in sections:
        blocks += [f"## {grid.target}", _main_table(grid), _details(grid, modelled=bool(found.costs))]
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
    heads, lines = overview.cells(found, pairs)
    return [
        "Speedup over autoregressive decoding / mean acceptance length τ, averaged over "
        f"{', '.join(map(benchmark_label, found.benchmarks))}.",
        _table(heads, lines, words=2),
        f"Gain: {LOOPED} over released, of unrounded averages; in parentheses the interval explained below.",
    ]


def _main_table(grid: Grid) -> str:
    speedups = marked(grid.speedup, text.ratio, _bold)
    taus = marked(grid.tau, text.length, _bold)
    lines = [
        [label, *(f"{speedup} / {tau}" for speedup, tau in zip(*both, strict=True))]
        for label, *both in zip(grid.rows, speedups, taus, strict=True)
    ]
    return _table(["Speedup / τ", *map(benchmark_label, grid.speedup.columns)], lines)


def _bold(words: str) -> str:
    return f"**{words}**"


def _details(grid: Grid, *, modelled: bool) -> str:
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
    shown = [column for column in columns if modelled or column[0] != "modelled"]
    lines = [[label, *(show(row, grid.averages[label]) for _, show in shown)] for label, row in grid.rows.items()]
    return _table(["Behind the ratios (Avg.)", *(head for head, _ in shown)], lines)


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


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], words: int = 1) -> str:
    """A table padded to be read raw; the first `words` columns hold words, the others numbers."""
    cells = [[part.replace("|", "\\|") for part in line] for line in (heads, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = [":" + "-" * (n - 1) if place < words else "-" * (n - 1) + ":" for place, n in enumerate(widths)]
    padded = [
        [
            part.ljust(n) if place < words else part.rjust(n)
            for place, (part, n) in enumerate(zip(line, widths, strict=True))
        ]
        for line in cells
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (padded[0], rule, *padded[1:]))
