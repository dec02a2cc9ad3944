"""What a stricter gate would have made of recorded rounds: pure functions of records, no model.

A gate above the recorded one drafts some of the recorded stages and none that was not recorded, so a round is cut
behind the first stage that no longer opens it. What the target accepted of the stages cut off must still be produced:
they are taken as a round of their own that starts where they did. That is slightly pessimistic, because behind a
verification such a stage would have had the target's features, and would have reached one token further.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from dloop.cli import UserError
from dloop.results.record import ResponseRecord

CLOSED = 1.0
"""A threshold that no sum of log-probabilities exceeds."""


@dataclass(kw_only=True)
class Replay:
    """The rounds of a run at another threshold."""

    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Rounds by (additional stages, verified rows)."""
    taus: list[float] = field(default_factory=list)
    """Mean acceptance length of each response that has a round."""
    unknown: int = 0
    """Rounds that met a cap while the gate was open: a stage that was never drafted would have followed."""

    @property
    def tau(self) -> float:
        """Mean over responses of their mean acceptance length; NaN without a round."""
        return fmean(self.taus) if self.taus else math.nan

    @property
    def extra_stages(self) -> float:
        """Additional stages a round; NaN without one."""
        total = self.rounds.total()
        return sum(extra * count for (extra, _), count in self.rounds.items()) / total if total else math.nan


def replay(records: Sequence[ResponseRecord], threshold: float, cap: int | None = None) -> Replay:
    """Replay at a `threshold` not below the recorded one; `cap` is the run's most additional stages.

    UserError when rounds with trees lack the rows of their stages (files written before these were recorded).
    """
    result = Replay()
    for record in records:
        lengths: list[int] = []
        rows, accepted = _stage_rows(record), _stage_accepted(record)
        for number, extra in enumerate(record.extra_stages):
            if not extra:
                lengths.append(record.acceptance_lengths[number])
                result.rounds[0, record.verified_tokens[number]] += 1
            for stages, length in _pieces(record.gate_sums[number], accepted[number], threshold) if extra else ():
                lengths.append(length)
                result.rounds[len(stages) - 1, 1 + sum(rows[number][stage] for stage in stages)] += 1
            result.unknown += cap is not None and extra == cap and record.gate_sums[number][-1] > threshold
        if lengths:
            result.taus.append(fmean(lengths))
    return result


def _pieces(sums: Sequence[float], accepted: Sequence[int], threshold: float) -> Iterator[tuple[range, int]]:
    """The rounds that one round becomes: their stages and acceptance lengths, which add up to the round's."""
    start, own = 0, 1
    for stage, total in enumerate(sums):
        if stage == len(sums) - 1 or total <= threshold:
            yield range(start, stage + 1), own + sum(accepted[start : stage + 1])
            # The target's own token behind a cut is the first one that the next stage had accepted.
            start, own = stage + 1, 0
            if not any(accepted[start:]):
                return


def _stage_rows(record: ResponseRecord) -> list[list[int]]:
    return record.stage_rows or _chains(record)


def _stage_accepted(record: ResponseRecord) -> list[list[int]]:
    if record.stage_accepted:
        return record.stage_accepted
    accepted = []
    for stages, length in zip(_chains(record), record.acceptance_lengths, strict=True):
        left, shares = length - 1, []
        for count in stages:
            shares.append(min(count, left))
            left -= shares[-1]
        accepted.append(shares)
    return accepted


def _chains(record: ResponseRecord) -> list[list[int]]:
    """Rows by stage of a response whose rounds were chains."""
    if [1 + sum(stages) for stages in record.stage_lengths] != record.verified_tokens:
        raise UserError(
            "a result with draft trees from before stage_rows were recorded cannot be replayed: "
            "measure it again with this version (python -m dloop.benchmark --overwrite)"
        )
    return record.stage_lengths
