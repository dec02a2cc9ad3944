"""Speedup computed from rounds and a cost table instead of measured: free of the noise between two timed runs.

The cost table (`python -m dloop.cost_table`) holds seconds of a target forward by rows and of a drafting stage, for one
target and one host without its tree. Row
numbers between two entries are interpolated linearly. Beyond the largest entry the line through the last two goes
on; `beyond` counts such rounds, so that a table can say so.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dloop.cli import UserError
from dloop.results.record import ResponseRecord, Result


@dataclass(frozen=True)
class CostTable:
    """Seconds of the parts of a round."""

    verify_seconds: tuple[tuple[int, float], ...]
    """(rows, seconds) of a target forward, ascending; the first entry is that of one row."""
    first_stage: float
    next_stage: float
    env: dict[str, Any]
    model: str = ""
    host: str = ""

    def fits(self, result: Result) -> bool:
        """Whether it was timed for the target and the host of `result`, which drafted no tree."""
        chains = not result.config.get("tree_budget")
        return chains and (self.model, self.host) == (result.config["model"], result.host)

    def verify(self, rows: int) -> float:
        """Seconds of a target forward of `rows` rows."""
        points = self.verify_seconds
        place = next((i for i in range(1, len(points)) if points[i][0] >= rows), len(points) - 1)
        (low, below), (high, above) = points[place - 1], points[place]
        return below + (above - below) * (rows - low) / (high - low)

    def speedup(self, records: Sequence[ResponseRecord]) -> float | None:
        """Tokens of all rounds times one autoregressive step, over the modelled time of the rounds."""
        tokens = sum(length for record in records for length in record.acceptance_lengths)
        rounds = Counter(
            pair for record in records for pair in zip(record.extra_stages, record.verified_tokens, strict=True)
        )
        seconds = sum(
            count * (self.first_stage + extra * self.next_stage + self.verify(rows))
            for (extra, rows), count in rounds.items()
        )
        return tokens * self.verify(1) / seconds if seconds else None

    def beyond(self, records: Sequence[ResponseRecord]) -> int:
        """Rounds that verified more rows than the table was timed with."""
        largest = self.verify_seconds[-1][0]
        return sum(rows > largest for record in records for rows in record.verified_tokens)


def read_cost_table(path: Path) -> CostTable:
    """The cost table in a JSON file; UserError when it is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        verify = tuple(sorted((int(rows), float(seconds)) for rows, seconds in raw["verify_seconds"].items()))
        stages = raw["draft_stage_seconds"]
        first, following = float(stages["first"]), float(stages["next"])
        table = CostTable(verify, first, following, dict(raw["env"]), raw["model"], raw["host"])
    except OSError as error:
        raise UserError(
            f"cost table {path} cannot be read ({error.strerror}): run python -m dloop.cost_table"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"cost table {path} is not one ({error!r}): make it by python -m dloop.cost_table") from None
    if len(verify) < 2 or verify[0][0] != 1 or min(seconds for _, seconds in verify) <= 0:
        raise UserError(f"cost table {path} must hold positive seconds for 1 row and at least one more number of rows")
    return table
