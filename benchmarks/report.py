"""What a comparison of decoders says: a table in the terminal, a JSON file, a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dloop.results.atomic import write_json
from dloop.results.provenance import environment

GREEDY = "ours, autoregressive"


@dataclass(frozen=True)
class Row:
    """One decoder. Times are milliseconds a round; `operators` are counted, views excluded."""

    name: str
    against: str | None
    tokens_per_second: float
    tau: float
    verified: float
    extra_stages: float
    round_ms: float
    target_ms: float
    draft_ms: float
    operators: float
    parts_ms: dict[str, float]

    @property
    def host_ms(self) -> float:
        """What is left outside the networks."""
        return self.round_ms - self.target_ms - self.draft_ms


def derived(row: Row, rows: dict[str, Row]) -> dict[str, float]:
    """Ratios to other rows: to the library's counterpart, to our autoregressive decoding, and to what the networks'
    own times allow (`ceiling`: with drafts for free; `network_ceiling`: with nothing but the networks)."""
    greedy = rows[GREEDY]
    speedup = row.tau * greedy.round_ms / row.round_ms
    return {
        "ratio": row.tokens_per_second / rows[row.against].tokens_per_second if row.against else 0.0,
        "speedup": speedup,
        "ceiling": row.tau * greedy.target_ms / row.target_ms,
        "network_ceiling": row.tau * greedy.target_ms / (row.target_ms + row.draft_ms),
        "host_share": row.host_ms / row.round_ms,
    }


@dataclass(frozen=True)
class Group:
    """Decoders of one target."""

    title: str
    rows: list[Row]


def show(group: Group) -> None:
    """Print two tables: what a user gets, and where a round's time goes."""
    rows = group.rows
    by_name = {row.name: row for row in rows}
    console = Console(width=max(Console().width, 110))
    speed = _table(
        group.title,
        *("tokens/s", "x transformers", "speedup", "tau", "rows a round", "extra stages"),
    )
    time = _table(
        "Milliseconds a round, prompt excluded",
        *("round", "target", "draft", "host", "host %", "operators", "of ceiling", "of networks"),
    )
    for row in rows:
        d = derived(row, by_name)
        mine = row.name.startswith("ours")
        speed.add_row(
            row.name,
            f"{row.tokens_per_second:.1f}",
            f"{d['ratio']:.2f}" if d["ratio"] else "",
            f"{d['speedup']:.2f}" if mine else "",
            f"{row.tau:.2f}",
            f"{row.verified:.1f}",
            f"{row.extra_stages:.2f}",
        )
        time.add_row(
            row.name,
            *(f"{value:.2f}" for value in (row.round_ms, row.target_ms, row.draft_ms, row.host_ms)),
            f"{100 * d['host_share']:.1f}",
            f"{row.operators:.0f}",
            *(f"{100 * d['speedup'] / d[limit]:.0f} %" if mine else "" for limit in ("ceiling", "network_ceiling")),
        )
    console.print(speed, time)
    for row in rows:
        if row.parts_ms:
            parts = "  ".join(f"{part} {value:.2f}" for part, value in row.parts_ms.items())
            console.print(f"{row.name}: {parts}")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    table.add_column("decoder", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def write(folder: Path, groups: list[Group], options: dict[str, Any], device: torch.device) -> None:
    """`decode.json` and `decode.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    write_json(
        folder / "decode.json",
        {
            "options": values,
            "env": environment(device, options["dtype"] or "default", "sdpa"),
            "groups": [{"title": group.title, "rows": _plain(group.rows)} for group in groups],
        },
    )
    plot(folder / "decode.png", groups)
    Console().print(f"{folder / 'decode.json'}, {folder / 'decode.png'}")


def _plain(rows: list[Row]) -> list[dict[str, Any]]:
    by_name = {row.name: row for row in rows}
    return [asdict(row) | {"host_ms": row.host_ms} | derived(row, by_name) for row in rows]


def plot(path: Path, groups: list[Group]) -> None:
    """Milliseconds a token by decoder, stacked: target, draft, everything else; one panel a target."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    heights = [len(group.rows) for group in groups]
    figure, panels = pyplot.subplots(
        len(groups),
        figsize=(9, 0.5 * sum(heights) + 1.4 * len(groups)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    for axes, group in zip(panels[:, 0], groups, strict=True):
        left = [0.0] * len(group.rows)
        for part, colour in (("target", "#4c72b0"), ("draft", "#dd8452"), ("host", "#8c8c8c")):
            widths = [getattr(row, f"{part}_ms") / row.tau for row in group.rows]
            axes.barh([row.name for row in group.rows], widths, left=left, color=colour, label=part)
            left = [before + width for before, width in zip(left, widths, strict=True)]
        for place, (row, end) in enumerate(zip(group.rows, left, strict=True)):
            axes.text(end, place, f" {row.tokens_per_second:.0f} tokens/s", va="center", fontsize=9)
        axes.invert_yaxis()
        axes.set_title(group.title, fontsize=10, loc="left")
        axes.set_xlabel("milliseconds a token")
        axes.set_xlim(0, max(left) * 1.2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0, 0].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
