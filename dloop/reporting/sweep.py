"""Acceptance length and speedup at other gates than the recorded one: replayed rounds, charged measured seconds.

A round costs its drafting stages, one verification of its rows, and the host's rest (cutting, grafting, committing).
Seconds come from a cost table where there is one, else from the parts that the results themselves timed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dloop.reporting.modelled import CostTable
from dloop.results.metrics import Records, speedup
from dloop.results.record import Result
from dloop.results.replay import CLOSED, Replay, replay

THRESHOLDS = (-8.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.75, -0.5, -0.35, -0.25, -0.15, -0.1, -0.05, CLOSED)
"""Where a sweep looks, as far as the recorded gate allows."""
REST = ("tree_build", "commit", "gate")
"""Timed parts of a round that are neither drafting nor the target's forward."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a round's parts: a verification is `base + rows * row`, or what `table` holds."""

    first_stage: float
    next_stage: float
    rest: float
    base: float = 0.0
    row: float = 0.0
    table: CostTable | None = None

    def verify(self, rows: int) -> float:
        """Seconds of a target forward of `rows` rows."""
        return self.table.verify(rows) if self.table else self.base + rows * self.row

    def seconds(self, made: Replay) -> float:
        """Seconds of all rounds."""
        return sum(
            count * (self.first_stage + extra * self.next_stage + self.verify(rows) + self.rest)
            for (extra, rows), count in made.rounds.items()
        )


@dataclass(frozen=True, kw_only=True)
class Point:
    """A gate and what is predicted for it."""

    threshold: float
    tau: float
    extra_stages: float
    speedup: float
    """NaN without a baseline."""
    gain: float
    """Relative to a closed gate: 0.05 is 5 % faster."""
    unknown: int
    """Rounds whose next stage was never drafted."""


def stored_costs(records: Records, baseline: Records, table: CostTable | None = None) -> Costs:
    """Costs from the timed parts of a run and its baseline; `table` knows stages and verifications better."""
    measured = [record for record in records if record.acceptance_lengths]
    rounds = sum(len(record.acceptance_lengths) for record in measured)
    rest = sum(record.stage_times.get(part, 0.0) for record in measured for part in REST) / max(rounds, 1)
    if table:
        return Costs(first_stage=table.first_stage, next_stage=table.next_stage, rest=rest, table=table)
    # The first stage of a response reads its prompt and is in no part of the decode time.
    stages = sum(len(record.extra_stages) + sum(record.extra_stages) - 1 for record in measured)
    stage = sum(record.stage_times.get("draft", 0.0) for record in measured) / max(stages, 1)
    base, row = _line([*measured, *(record for record in baseline if record.acceptance_lengths)])
    return Costs(first_stage=stage, next_stage=stage, rest=rest, base=base, row=row)


def _line(records: Records) -> tuple[float, float]:
    """Seconds of a verification and of each of its rows, fitted to responses."""
    if not records:
        return 0.0, 0.0
    sizes = np.array([[len(record.verified_tokens), sum(record.verified_tokens)] for record in records], float)
    seconds = np.array([record.stage_times.get("verify", 0.0) for record in records])
    base, row = np.linalg.lstsq(sizes, seconds, rcond=None)[0]
    if row >= 0 and base >= 0:
        return float(base), float(row)
    # Noise may bend the line the wrong way: then a verification costs the same whatever its rows.
    return float(seconds.sum() / sizes[:, 0].sum()), 0.0


def sweep(
    result: Result, baseline: Result | None, table: CostTable | None = None, thresholds: Sequence[float] = THRESHOLDS
) -> list[Point]:
    """Predictions for one looped result, ascending: its own gate, every higher one of `thresholds`, a closed gate.

    The measured speedup changes as the modelled seconds do, so at the recorded gate the prediction is the measurement.
    Empty for a run without a loop. UserError as `dloop.results.replay.replay`.
    """
    recorded, cap = result.config.get("loop_gate", CLOSED), result.config.get("max_extra_stages")
    if result.kind == "baseline" or recorded >= 0 or not any(part.acceptance_lengths for part in result.responses):
        return []
    against = baseline.responses if baseline else []
    costs = stored_costs(result.responses, against, table)
    gates = sorted({recorded, CLOSED, *(value for value in thresholds if value > recorded)})
    made = {gate: replay(result.responses, gate, cap) for gate in gates}
    seconds = {gate: costs.seconds(rounds) for gate, rounds in made.items()}
    measured = speedup(result.responses, against) or float("nan")
    return [
        Point(
            threshold=gate,
            tau=made[gate].tau,
            extra_stages=made[gate].extra_stages,
            speedup=measured * seconds[recorded] / seconds[gate],
            gain=seconds[CLOSED] / seconds[gate] - 1,
            unknown=made[gate].unknown,
        )
        for gate in gates
    ]


def mean(parts: Sequence[Sequence[Point]]) -> list[Point]:
    """The plain mean over benchmarks, at the thresholds that all of them have."""
    common = [{point.threshold for point in part} for part in parts]
    shared = sorted(set.intersection(*common)) if common else []
    return [_mean([point for part in parts for point in part if point.threshold == threshold]) for threshold in shared]


def _mean(points: Sequence[Point]) -> Point:
    def average(name: str) -> float:
        return float(np.mean([getattr(point, name) for point in points]))

    return replace(
        points[0],
        tau=average("tau"),
        extra_stages=average("extra_stages"),
        speedup=average("speedup"),
        gain=average("gain"),
        unknown=sum(point.unknown for point in points),
    )
