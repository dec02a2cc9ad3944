"""The numbers of one row on one benchmark, and their average over benchmarks, which is a measurement as well.

What cannot be known (no baseline, no round, a benchmark missing from the average) is NaN and becomes `--` in a table.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from dloop.cli import UserError
from dloop.reporting.modelled import CostTable
from dloop.reporting.noise import interval, resampled_speedups, resampled_taus
from dloop.reporting.sweep import Point, mean, sweep
from dloop.results import metrics
from dloop.results.metrics import Audit, Departure
from dloop.results.record import Result

KeyT = TypeVar("KeyT")
NAN = float("nan")
HARDLY_OPENED = 0.05
"""Share of rounds with an additional stage up to which a gain says nothing about the loop."""
UNKNOWN_DRAWS = np.array([NAN])


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Ratios and times are means as `dloop.results.metrics` defines them; histograms count rounds."""

    speedup: float = NAN
    speedup_micro: float = NAN
    modelled_speedup: float = NAN
    tau: float = NAN
    tau_micro: float = NAN
    tokens_per_second: float = NAN
    baseline_tokens_per_second: float = NAN
    responses: int = 0
    acceptance: Counter[int] = field(default_factory=Counter)
    """Rounds by acceptance length."""
    stages: Counter[int] = field(default_factory=Counter)
    """Rounds by additional stages."""
    audit: Audit | None = None
    """Against the baseline's answers; None for a baseline and without one."""
    worst: Departure | None = None
    """The answer that is least like the baseline's; None where all are identical."""
    seconds: Counter[str] = field(default_factory=Counter)
    """Decoding seconds of all rounds by part, as `ResponseRecord.stage_times`."""
    gates: tuple[Point, ...] = ()
    """What other gates would have made of these rounds; none for a run without a loop."""
    draws: np.ndarray = field(default_factory=UNKNOWN_DRAWS.copy)
    """Speedups of resampled responses."""
    tau_draws: np.ndarray = field(default_factory=UNKNOWN_DRAWS.copy)
    """Acceptance lengths of resampled responses."""

    @property
    def rounds(self) -> int:
        """Number of target forwards behind the prefill."""
        return self.stages.total()

    @property
    def extra_stages(self) -> float:
        """Additional stages a round."""
        return sum(extra * count for extra, count in self.stages.items()) / self.rounds if self.rounds else NAN

    @property
    def open_share(self) -> float:
        """Share of rounds with an additional stage."""
        return 1 - self.stages[0] / self.rounds if self.rounds else NAN

    @property
    def hardly_opened(self) -> bool:
        """Whether too few rounds had an additional stage to call a gain the loop's."""
        return self.open_share <= HARDLY_OPENED

    @property
    def speedup_interval(self) -> tuple[float, float]:
        """The middle 95 % of the resampled speedups."""
        return interval(self.draws)

    @property
    def tau_interval(self) -> tuple[float, float]:
        """The middle 95 % of the resampled acceptance lengths."""
        return interval(self.tau_draws)

    def gain_interval(self, released: "Measurement") -> tuple[float, float]:
        """The middle 95 % of the relative gain in speedup when the responses are resampled, the same on both sides."""
        return interval(self.draws / released.draws - 1)


MEANS = (
    *("speedup", "speedup_micro", "modelled_speedup", "tau", "tau_micro"),
    *("tokens_per_second", "baseline_tokens_per_second"),
)
"""What an average over benchmarks takes the plain mean of; rounds are pooled, counts added."""


def measure(result: Result, baseline: Result | None, costs: CostTable | None = None) -> Measurement:
    """The numbers of one result beside its baseline; a baseline is measured against itself."""
    records = result.responses
    against = baseline.responses if baseline else []
    drafts = result.kind == "speculative"
    return Measurement(
        speedup=_known(metrics.speedup(records, against)),
        speedup_micro=_known(metrics.speedup_micro(records, against)),
        modelled_speedup=_known(costs.speedup(records) if costs and drafts else None),
        tau=_known(metrics.tau(records)),
        tau_micro=_known(metrics.tau_micro(records)),
        tokens_per_second=_known(metrics.throughput(records)),
        baseline_tokens_per_second=_known(metrics.throughput(against)),
        responses=len(records),
        acceptance=Counter(metrics.histogram(records)),
        stages=Counter(metrics.extra_stage_histogram(records)),
        audit=metrics.audit(records, against, dtype=result.env["dtype"]) if baseline and drafts else None,
        worst=metrics.worst_departure(records, against) if baseline and drafts else None,
        seconds=sum((Counter(record.stage_times) for record in records), Counter()),
        gates=_gates(result, baseline, costs),
        draws=resampled_speedups(records, against, result.dataset.name),
        tau_draws=resampled_taus(records, result.dataset.name),
    )


def _gates(result: Result, baseline: Result | None, costs: CostTable | None) -> tuple[Point, ...]:
    try:
        return tuple(sweep(result, baseline, costs))
    except UserError:
        # Trees in a file of before their stages' rows were recorded: the table has everything else.
        return ()


def average(parts: Sequence[Measurement], wanted: int) -> Measurement:
    """The average of `parts` over `wanted` benchmarks; its means are unknown when a benchmark is missing."""
    complete = bool(parts) and len(parts) == wanted
    means: dict[str, Any] = {
        name: float(np.mean([getattr(part, name) for part in parts])) for name in MEANS if complete
    }
    audits = [part.audit for part in parts if part.audit]
    return Measurement(
        **means,
        responses=sum(part.responses for part in parts),
        acceptance=_pooled([part.acceptance for part in parts]),
        stages=_pooled([part.stages for part in parts]),
        audit=sum(audits, Audit()) if audits else None,
        seconds=_pooled([part.seconds for part in parts]),
        gates=tuple(mean([part.gates for part in parts])) if complete else (),
        draws=np.mean([part.draws for part in parts], axis=0) if complete else UNKNOWN_DRAWS,
        tau_draws=np.mean([part.tau_draws for part in parts], axis=0) if complete else UNKNOWN_DRAWS,
    )


def _pooled(histograms: Sequence[Counter[KeyT]]) -> Counter[KeyT]:
    return reduce(lambda total, part: total + part, histograms, Counter())


def _known(value: float | None) -> float:
    return NAN if value is None else value
