"""What the panels of all pictures show: each pair of released and looped draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dloop.reporting.collect import Collected
from dloop.reporting.labels import AVERAGE, HOSTS, Row, baseline_row
from dloop.reporting.measurement import Measurement
from dloop.reporting.overview import Pair

ALL = "all rounds"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """What a panel of a picture shows."""

    title: str
    bars: str
    """The bars' name."""
    released: Measurement
    looped: Measurement
    """Of no round where no row loops: there is no line then."""
    stages: dict[str, Measurement]
    """By name of the bar."""
    baseline: Measurement
    benchmarks: dict[str, tuple[Measurement, Measurement]]
    """Released and looped by name, the average last."""
    gates: dict[float, float] = field(default_factory=dict)
    """Measured average speedups of the looped draft by gate."""


def panels(found: Collected, pairs: Sequence[Pair]) -> list[Panel]:
    """One for each pair of released and looped draft; where there is none, one for each draft alone."""
    looped = [
        Panel(
            title=f"{pair.row.target}: {pair.family}",
            bars=HOSTS.get(pair.row.host, pair.row.host),
            released=pair.released,
            looped=pair.looped,
            stages={**found.of(pair.row), ALL: pair.looped},
            baseline=found.average(baseline_row(pair.row.target)),
            benchmarks=_benchmarks(found, found.released(pair.row), pair.row),
            gates=_measured_gates(found, pair.row),
        )
        for pair in pairs
        if pair.looped.rounds
    ]
    return looped or [
        Panel(
            title=f"{row.target}: {HOSTS.get(row.host, row.host)}",
            bars=row.label,
            released=found.average(row),
            looped=Measurement(),
            stages={**found.of(row), ALL: found.average(row)},
            baseline=found.average(baseline_row(row.target)),
            benchmarks=_benchmarks(found, row, None),
        )
        for row in found.rows
        if row.host and found.average(row).rounds
    ]


def _benchmarks(
    found: Collected, released: Row | None, looped: Row | None
) -> dict[str, tuple[Measurement, Measurement]]:
    def of(row: Row | None, name: str) -> Measurement:
        if row is None:
            return Measurement()
        return found.average(row) if name == AVERAGE else found.of(row).get(name, Measurement())

    return {name: (of(released, name), of(looped, name)) for name in [*found.benchmarks, AVERAGE]}


def _measured_gates(found: Collected, row: Row) -> dict[float, float]:
    """Of the rows that share a released row: they differ in the gate alone."""
    alike = [
        other
        for other in found.rows
        if other.looped
        and (found.released(other), other.draft) == (found.released(row), row.draft)
        and "loop_gate" in other.flags
    ]
    return {float(other.flags["loop_gate"]): found.average(other).speedup for other in alike}
