"""Names as a table prints them. Knows the words of settings and drafts, no number and no file.

A setting is `released` or `dloop`, then words joined by `-`: the tree (`ddtree`, `dartree`) and whatever tells two
settings apart (`dloop-eager`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HOSTS = {"dflash": "DFlash", "dspark": "DSpark", "domino": "Domino", "eagle3": "EAGLE-3", "mtp": "MTP"}
TREES = {"ddtree": "DDTree", "dartree": "DARTree"}
BENCHMARKS = {
    "gsm8k": "GSM8K",
    "math500": "MATH-500",
    "aime25": "AIME25",
    "humaneval": "HumanEval",
    "mbpp": "MBPP",
    "livecodebench": "LiveCodeBench",
    "mt-bench": "MT-Bench",
    "alpaca": "Alpaca",
}
AVERAGE = "Avg."
BASELINE = "Autoregressive"
LOOPED = "+ DLoop"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table: a draft of a host on a target, decoded under a setting."""

    target: str
    host: str
    setting: str
    draft: str
    flags: dict[str, Any] = field(default_factory=dict, compare=False)
    """Options its results must have been made with."""

    @property
    def looped(self) -> bool:
        """Whether additional stages are asked for."""
        return self.setting.split("-")[0] == "dloop"

    @property
    def is_control(self) -> bool:
        """Whether the draft had the same steps on the host's objective alone."""
        return self.draft == "control"

    @property
    def tree(self) -> str:
        """Name of the tree, or ``."""
        return next((TREES[word] for word in self.setting.split("-") if word in TREES), "")

    @property
    def variant(self) -> str:
        """What else tells the setting apart, or ``."""
        return "-".join(word for word in self.setting.split("-")[1:] if word not in TREES)

    @property
    def label(self) -> str:
        """The row's name below its target; `labels` keeps those of one table apart."""
        if self.is_control:
            name = "+ control" if self.looped else "+ control, one stage"
        elif self.looped:
            name = "DLoop" if self.tree else LOOPED
        else:
            name = HOSTS.get(self.host, self.host)
        name += f" + {self.tree}" if self.tree else ""
        return f"{name} ({self.variant})" if self.variant else name


def baseline_row(target: str) -> Row:
    """The autoregressive baseline of a target as a row."""
    return Row(target=target, host="", setting="baseline", draft="")


def labels(rows: Sequence[Row]) -> list[str]:
    """A label for each row of one table; the draft is added where two rows of a target would read alike."""
    seen = Counter((row.target, row.label) for row in rows)
    return [
        BASELINE if not row.host else row.label + (f" ({row.draft})" if seen[row.target, row.label] > 1 else "")
        for row in rows
    ]


def benchmark_label(name: str) -> str:
    """A benchmark's column head; of one the project does not know, its name."""
    return BENCHMARKS.get(name, name)
