"""Which number stands where in a host's table: one grid a target for people, one tidy frame for programs.

Numbers stay unrounded but in `texts`, the cells of pages and terminal.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import pandas as pd

from dloop.reporting import text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import AVERAGE, Row, benchmark_label, labels
from dloop.reporting.measurement import MEANS, Measurement
from dloop.results.metrics import Audit


@dataclass(frozen=True)
class Grid:
    """A target's part of a host's table."""

    target: str
    speedup: pd.DataFrame
    """Label x (benchmarks, average); the first row is the baseline."""
    tau: pd.DataFrame
    averages: dict[str, Measurement]
    """Each label's average over the benchmarks."""
    rows: dict[str, Row]


def grids(found: Collected, host: str) -> list[Grid]:
    """A host's table, one grid a target."""
    return [_grid(found, target, rows) for target, rows in table_rows(found, host).items()]


def table_rows(found: Collected, host: str) -> dict[str, list[Row]]:
    """The rows of a host's table by target: the baseline, then the host's own."""
    targets = dict.fromkeys(row.target for row in found.rows if row.host == host)
    return {
        target: [row for row in found.rows if row.target == target and row.host in ("", host)] for target in targets
    }


def _grid(found: Collected, target: str, rows: list[Row]) -> Grid:
    named = dict(zip(labels(rows), rows, strict=True))
    averages = {label: found.average(row) for label, row in named.items()}

    def table(name: str) -> pd.DataFrame:
        lines = {
            label: {key: getattr(part, name) for key, part in {**found.of(row), AVERAGE: averages[label]}.items()}
            for label, row in named.items()
        }
        return pd.DataFrame.from_dict(lines, orient="index").reindex(columns=[*found.benchmarks, AVERAGE])

    return Grid(target, table("speedup"), table("tau"), averages, named)


def best(numbers: pd.DataFrame) -> pd.DataFrame:
    """Where a column's largest number stands, the baseline in the first row aside; nowhere with one method."""
    methods = numbers.iloc[1:]
    marks = methods.eq(methods.max()) & (methods.count() > 1)
    return marks.reindex(numbers.index, fill_value=False)


def texts(grid: Grid, embolden: Callable[[str], str]) -> pd.DataFrame:
    """Label x benchmark label: `2.91x / 5.40`, the best of each number emboldened."""
    cells = _marked(grid.speedup, text.ratio, embolden) + " / " + _marked(grid.tau, text.length, embolden)
    return cells.rename(columns=benchmark_label)


def _marked(numbers: pd.DataFrame, show: Callable[[float], str], embolden: Callable[[str], str]) -> pd.DataFrame:
    shown = numbers.map(show)
    return shown.mask(best(numbers), shown.map(embolden))


def tidy(found: Collected, host: str) -> pd.DataFrame:
    """A host's table for other programs: one line a row and benchmark, an average line behind each row."""
    lines = [
        {"target": row.target, "host": row.host, "setting": row.setting, "draft": row.draft, "label": label}
        | {"benchmark": name}
        | _numbers(part)
        for grid in grids(found, host)
        for label, row in grid.rows.items()
        for name, part in {**found.of(row), AVERAGE: grid.averages[label]}.items()
    ]
    counts = [field.name for field in fields(Audit)]
    return pd.DataFrame(lines).astype(dict.fromkeys(counts, "Int64"))


def _numbers(part: Measurement) -> dict[str, object]:
    low, high = part.speedup_interval
    return {
        **{name: getattr(part, name) for name in MEANS},
        "speedup_low": low,
        "speedup_high": high,
        "rounds": part.rounds,
        "extra_stages": part.extra_stages,
        "open_share": part.open_share,
        "responses": part.responses,
        **{field.name: getattr(part.audit, field.name, None) for field in fields(Audit)},
    }
