"""Accounting: how many rows ended how, and what the answers look like.

Everything is counted from the rows as they stand in the files, so that a resumed run and a merge report the same
numbers as one run from start to end.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dloop.cli import UserError
from dloop.regeneration.dialogue import STATUSES, Status

TOLERATED_ERRORS = 0.001
"""Share of error rows above which a run counts as failed."""


@dataclass
class Tally:
    """Counts over output rows; feed it every row with `add`."""

    rows: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=lambda: {"error": Counter(), "skipped": Counter()})
    answers: int = 0
    truncated: int = 0
    words: int = 0
    most_words: int = 0

    def add(self, status: Status, row: dict[str, Any]) -> None:
        """Count one row of the output, error or skipped file."""
        self.rows[status] += 1
        if status != "success":
            self.reasons[status][str(row.get("error"))] += 1
            return
        self.truncated += list(row.get("finish_reasons", ())).count("length")
        for message in row["conversations"]:
            if message["role"] == "assistant":
                words = len(message["content"].split())
                self.answers += 1
                self.words += words
                self.most_words = max(self.most_words, words)

    def check(self, wanted: int) -> None:
        """Raise `UserError` unless every one of the `wanted` input lines has ended one way or the other."""
        if self.rows.total() != wanted:
            raise UserError(
                f"{wanted} rows were asked for, but {self.rows.total()} stand in the output, error and skipped "
                "files: run again with --resume"
            )

    @property
    def failed(self) -> bool:
        """Whether there are too many error rows to go on with."""
        return self.rows["error"] > TOLERATED_ERRORS * self.rows.total()

    def summary(self) -> dict[str, Any]:
        """The numbers as plain data; words are separated by white space, means are over answers."""
        return {
            "rows": self.rows.total(),
            **{status: self.rows[status] for status in STATUSES},
            "reasons": {status: dict(counts.most_common()) for status, counts in self.reasons.items()},
            "answers": self.answers,
            "truncated_answers": self.truncated,
            "mean_answer_words": self.words / self.answers if self.answers else None,
            "max_answer_words": self.most_words,
        }

    def text(self) -> str:
        """The numbers in a few lines for the terminal."""
        numbers = self.summary()
        counts = " + ".join(f"{numbers[status]} {status}" for status in STATUSES)
        mean = numbers["mean_answer_words"]
        lines = [f"{numbers['rows']} rows = {counts}"]
        for status, reasons in numbers["reasons"].items():
            lines += [f"  {status}: {count} x {reason}" for reason, count in list(reasons.items())[:10]]
        return "\n".join(
            [
                *lines,
                f"{self.answers} answers, {self.truncated} cut at the token limit, "
                f"words: mean {0 if mean is None else mean:.1f}, most {self.most_words}",
            ]
        )
