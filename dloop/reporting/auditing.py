"""One table of losslessness over all results: how many answers are the baseline's, and where the worst one departs."""

import os
from pathlib import Path

import pandas as pd

from dloop.reporting.collect import Collected
from dloop.reporting.labels import HOSTS, Row, benchmark_label, labels
from dloop.reporting.layout import table_rows
from dloop.reporting.measurement import Measurement
from dloop.results.metrics import TIE_TOLERANCE, Audit

HEADS = {"identical": "identical", "tie": "tie", "divergent": "divergent", "other_prompt": "other prompt"}


def frame(found: Collected) -> pd.DataFrame:
    """One line a result with a draft: the counts, and the worst departure with the file that holds it."""
    lines = [
        {"target": row.target, "host": row.host, "label": label, "draft": row.draft, "benchmark": name}
        | (vars(part.audit) if part.audit else dict.fromkeys(HEADS))
        | _worst(part)
        | {"file": str(found.paths[row, name])}
        for label, row in _rows(found)
        for name, part in found.of(row).items()
    ]
    return pd.DataFrame(lines, columns=[*_KEYS, *HEADS, *_WORST, "file"]).astype(dict.fromkeys(HEADS, "Int64"))


_KEYS = ("target", "host", "label", "draft", "benchmark")
_WORST = ("worst_index", "worst_turn", "worst_token", "worst_margin")


def _worst(part: Measurement) -> dict[str, object]:
    worst = part.worst
    values = (worst.index, worst.turn, worst.position, worst.margin) if worst else (None,) * 4
    return dict(zip(_WORST, values, strict=True))


def page(found: Collected, folder: Path) -> str:
    """The audit for people, benchmarks summed; links to the worst cases are relative to `folder`."""
    tolerance = TIE_TOLERANCE[found.results[0].env["dtype"]]
    lines = [
        {"Target": row.target, "Row": _name(row, label), **_counts(found, row), "Worst case": _link(found, row, folder)}
        for label, row in _rows(found)
        if found.of(row)
    ]
    table = pd.DataFrame(lines)
    align = ["left", "left", *["right"] * (len(table.columns) - 3), "left"]
    return (
        "\n\n".join(
            [
                "# Audit: are the answers the target's own?",
                "Every answer is compared with the stored baseline's, token for token. A *tie* departs where the two "
                f"best logits of the target lie within {tolerance:g}: rounding decides; a *divergent* answer hints at "
                "a bug. Later turns behind an answer that already differed have another prompt.",
                table.to_markdown(index=False, disable_numparse=True, colalign=align)
                if lines
                else "There is no answer.",
            ]
        )
        + "\n"
    )


def _rows(found: Collected) -> list[tuple[str, Row]]:
    """Every row with a draft, by the label it has in its host's table."""
    tables = [rows for host in found.hosts for rows in table_rows(found, host).values()]
    return [(label, row) for rows in tables for label, row in zip(labels(rows), rows, strict=True) if row.host]


def _name(row: Row, label: str) -> str:
    return label if label.startswith(HOSTS.get(row.host, row.host)) else f"{HOSTS.get(row.host, row.host)} {label}"


def _counts(found: Collected, row: Row) -> dict[str, str]:
    parts = list(found.of(row).values())
    audits = [part.audit for part in parts if part.audit]
    if not audits:
        return {"responses": str(sum(part.responses for part in parts)), **dict.fromkeys(HEADS.values(), "no baseline")}
    total = sum(audits, Audit())
    return {"responses": str(total.total), **{head: str(getattr(total, key)) for key, head in HEADS.items()}}


def _link(found: Collected, row: Row, folder: Path) -> str:
    worst = [(name, part.worst) for name, part in found.of(row).items() if part.worst]
    if not worst:
        return ""
    name, where = max(worst, key=lambda pair: float("inf") if pair[1].margin is None else pair[1].margin)
    margin = "margin unknown" if where.margin is None else f"margin {where.margin:.2g}"
    words = f"{benchmark_label(name)}, prompt {where.index}, turn {where.turn}, token {where.position}: {margin}"
    return f"[{words}]({os.path.relpath(found.paths[row, name], folder)})"
