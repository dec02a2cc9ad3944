"""Which number stands where in a host's table: one grid a target for people, one tidy frame for programs.

Numbers stay unrounded but in `texts`, the cells of pages and terminal.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import pandas as pd

from dloop.reporting import text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import AVERAGE, Row, benchmark_label, labels
from dloop.reporting.measurement import MEANS, Measurement
from dloop.results.metrics import Audit

GAIN = "Gain"
"""Head of the last column."""


@dataclass(frozen=True)
class Grid:
    """A target's part of a host's table."""

    target: str
    speedup: pd.DataFrame
    """Label x (benchmarks, average); the first row is the baseline."""
    tau: pd.DataFrame
    speedup_interval: pd.DataFrame
    """Of pairs of numbers, as `tau_interval`."""
    tau_interval: pd.DataFrame
    gain: pd.Series
    """Relative gain in average speedup of a looped row over the released draft; NaN where none is to be stated."""
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

    gains = {label: _gain(found, row, averages[label]) for label, row in named.items()}
    return Grid(
        target=target,
        **{name: table(name) for name in ("speedup", "tau", "speedup_interval", "tau_interval")},
        gain=pd.Series(gains, dtype=float),
        averages=averages,
        rows=named,
    )


def _gain(found: Collected, row: Row, average: Measurement) -> float:
    if not row.looped or average.hardly_opened:
        return math.nan
    return average.speedup / found.average(found.released(row)).speedup - 1


def best(numbers: pd.DataFrame) -> pd.DataFrame:
    """Where a column's largest number stands, the baseline in the first row aside; nowhere with one method."""
    methods = numbers.iloc[1:]
    marks = methods.eq(methods.max()) & (methods.count() > 1)
    return marks.reindex(numbers.index, fill_value=False)


def texts(grid: Grid, embolden: Callable[[str], str], *, intervals: bool = False) -> pd.DataFrame:
    """Label x benchmark label and gain: `2.91x / 5.40`, the best of each number emboldened.

    With `intervals` each number is followed by its own: `2.91x [2.70, 3.12]`.
    """
    speedup = _marked(grid.speedup, text.ratio, embolden)
    tau = _marked(grid.tau, text.length, embolden)
    if intervals:
        speedup += bounds(grid.speedup_interval, " [{:.2f}, {:.2f}]")
        tau += bounds(grid.tau_interval, " [{:.2f}, {:.2f}]")
    cells = (speedup + " / " + tau).rename(columns=benchmark_label)
    return cells.assign(**{GAIN: [text.gain(gain) if known else "" for gain, known in _stated(grid)]})


def bounds(pairs: pd.DataFrame, show: str) -> pd.DataFrame:
    """The intervals of a grid's methods as texts; nothing in the baseline's row and where none is known."""
    shown = pairs.map(lambda pair: show.format(*pair) if isinstance(pair, tuple) and pair[0] == pair[0] else "")
    shown.iloc[0] = ""
    return shown


def _stated(grid: Grid) -> list[tuple[float, bool]]:
    """Each row's gain, and whether its place is to be filled: only looped rows have one."""
    return [(grid.gain[label], label in grid.rows and grid.rows[label].looped) for label in grid.speedup.index]


def _marked(numbers: pd.DataFrame, show: Callable[[float], str], embolden: Callable[[str], str]) -> pd.DataFrame:
    shown = numbers.map(show)
    return shown.mask(best(numbers), shown.map(embolden))


def tidy(found: Collected, host: str) -> pd.DataFrame:
    """A host's table for other programs: one line a row and benchmark, an average line behind each row."""
    lines = [
        {"target": row.target, "host": row.host, "setting": row.setting, "draft": row.draft, "label": label}
        | {"benchmark": name}
        | _numbers(part)
        | _gains(found, row, name, part)
        for grid in grids(found, host)
        for label, row in grid.rows.items()
        for name, part in {**found.of(row), AVERAGE: grid.averages[label]}.items()
    ]
    counts = [field.name for field in fields(Audit)]
    return pd.DataFrame(lines).astype(dict.fromkeys(counts, "Int64"))


def _numbers(part: Measurement) -> dict[str, object]:
    return {
        **{name: getattr(part, name) for name in MEANS},
        **_spread("speedup", part.speedup_interval),
        **_spread("tau", part.tau_interval),
        "rounds": part.rounds,
        "extra_stages": part.extra_stages,
        "open_share": part.open_share,
        "responses": part.responses,
        **{field.name: getattr(part.audit, field.name, None) for field in fields(Audit)},
    }


def _gains(found: Collected, row: Row, name: str, part: Measurement) -> dict[str, float]:
    """What a looped row gains over the released draft on one benchmark, or on their average."""
    released = found.released(row) if row.looped else None
    if released is None:
        return {"speedup_gain": math.nan, **_spread("speedup_gain", (math.nan, math.nan))}
    other = found.average(released) if name == AVERAGE else found.measured.get((released, name), Measurement())
    return {"speedup_gain": part.speedup / other.speedup - 1, **_spread("speedup_gain", part.gain_interval(other))}


def _spread(name: str, interval: tuple[float, float]) -> dict[str, float]:
    return {f"{name}_low": interval[0], f"{name}_high": interval[1]}
