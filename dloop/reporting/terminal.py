"""The main tables on the terminal: benchmarks downwards and rows across, because that fits eighty columns."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dloop.reporting import overview, remarks, text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import BASELINE, HOSTS
from dloop.reporting.layout import Grid, grids, texts
from dloop.reporting.overview import Pair

MOST_GRIDS = 4
"""With more targets and hosts than this, only the overview is shown."""


def show(found: Collected, pairs: Sequence[Pair], note: str | None, files: Sequence[Path]) -> None:
    """Print the tables, the remarks and where the files lie."""
    console = Console(width=None if Console().is_terminal else max(100, shutil.get_terminal_size().columns))
    if note:
        console.print(escape(note), highlight=False)
    sections = [(host, grid) for host in found.hosts for grid in grids(found, host)]
    for host, grid in sections if len(sections) <= MOST_GRIDS else []:
        console.print(_title(HOSTS.get(host, host), grid), _grid(grid), sep="\n")
    for pair in pairs:
        console.print(escape(overview.sentence(pair)), highlight=False)
    audit = remarks.lossless([part.audit for part in found.measured.values()], found.results[0].env["dtype"])
    lines = [audit, *remarks.hardly_opened(pairs), remarks.measured_on(found)]
    lines += [f"Mind: {line}" for line in remarks.warnings(found)]
    for line in filter(None, lines):
        console.print(escape(line.replace("**", "")), highlight=False)
    for path in files:
        console.print(f"  {path}", style="dim", highlight=False, soft_wrap=True)


def _title(host: str, grid: Grid) -> str:
    rate = text.whole(grid.averages[BASELINE].tokens_per_second)
    return escape(f"{host} on {grid.target}: speedup / acceptance length, {BASELINE.lower()} {rate} tokens/s")


def _grid(grid: Grid) -> Table:
    """One target's rows but the baseline, whose numbers are all 1."""
    cells = texts(grid, _bold).iloc[1:]
    table = Table("")
    for label in cells.index:
        table.add_column(escape(label), justify="right")
    for name, column in cells.items():
        table.add_row(escape(str(name)), *column)
    return table


def _bold(words: str) -> str:
    return f"[bold]{words}[/bold]"
