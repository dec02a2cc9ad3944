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


def show(rows: list[Row], options: dict[str, Any]) -> None:
    """Print two tables: what a user gets, and where a round's time goes."""
    by_name = {row.name: row for row in rows}
    console = Console(width=max(Console().width, 110))
    speed = _table(
        f"Decoding, our target by the {options['target_runtime']} runtime",
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


def write(folder: Path, rows: list[Row], options: dict[str, Any], device: torch.device) -> None:
    """`decode.json` and `decode.png` in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {row.name: row for row in rows}
    values = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    write_json(
        folder / "decode.json",
        {
            "options": values,
            "env": environment(device, options["dtype"] or "default", "sdpa"),
            "rows": [asdict(row) | {"host_ms": row.host_ms} | derived(row, by_name) for row in rows],
        },
    )
    plot(folder / "decode.png", rows)
    Console().print(f"{folder / 'decode.json'}, {folder / 'decode.png'}")


def plot(path: Path, rows: list[Row]) -> None:
    """Milliseconds a token by decoder, stacked: target, draft, everything else."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.2), layout="constrained")
    left = [0.0] * len(rows)
    names = [row.name for row in rows]
    for part, colour in (("target", "#4c72b0"), ("draft", "#dd8452"), ("host", "#8c8c8c")):
        widths = [getattr(row, f"{part}_ms") / row.tau for row in rows]
        axes.barh(names, widths, left=left, color=colour, label=part)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    for place, (row, end) in enumerate(zip(rows, left, strict=True)):
        axes.text(end, place, f" {row.tokens_per_second:.0f} tokens/s", va="center", fontsize=9)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a token")
    axes.set_xlim(0, max(left) * 1.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
