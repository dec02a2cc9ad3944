"""Two pictures of rounds: what they accept, and how many additional stages they draft.

Made to be read in grey: the released draft is light bars, the looped one a dark line; numbers of stages are shades
from light to dark. Words stand at what they name. The same results give the same bytes.
"""

import io
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dloop.reporting.collect import Collected
from dloop.reporting.labels import HOSTS, LOOPED, benchmark_label
from dloop.reporting.measurement import Measurement
from dloop.reporting.overview import Pair
from dloop.reporting.text import length
from dloop.results import atomic

LIGHT, MUTED, DARK, INK = "#c9c9c9", "#666666", "#1f4e79", "#333333"
SHADES = {"1": "#a9cbe3", "2": "#4a8ab8", "3 or more": "#123a5c"}
LEAST_SCALE = 5.0
"""Percent the stages' axis shows at least, so that a gate that hardly opened looks like one."""

STYLE = {
    "svg.hashsalt": "dloop",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
}


def draw(found: Collected, pairs: Sequence[Pair], folder: Path) -> list[Path]:
    """Write both pictures as SVG and PNG into `folder`; the SVG files are returned, none without a looped row."""
    known = [pair for pair in pairs if pair.looped.rounds]
    if not known:
        return []
    with rc_context(STYLE):
        pictures = {"acceptance_length": acceptance_length(known), "extra_stages": extra_stages(found, known)}
        return [_save(figure, folder / name) for name, figure in pictures.items()]


def acceptance_length(pairs: Sequence[Pair]) -> Figure:
    """Share of rounds by acceptance length, released against looped, a panel each pair."""
    figure, panels = _panels(len(pairs), width=4.6, height=2.9)
    for axes, pair in zip(panels, pairs, strict=True):
        _acceptance_panel(axes, pair)
    return figure


def _acceptance_panel(axes: Axes, pair: Pair) -> None:
    released, looped = _shares(pair.released.acceptance), _shares(pair.looped.acceptance)
    longest = max(released | looped)
    places = range(1, longest + 1)
    axes.bar(places, [released.get(n, 0) for n in places], color=LIGHT, width=0.8)
    axes.plot(places, [looped.get(n, 0) for n in places], color=DARK, marker="o", markersize=3.5, linewidth=1.6)
    axes.set_title(f"{pair.row.target}: {pair.family}")
    axes.set_xlabel("acceptance length of a round (tokens)")
    axes.set_ylabel("rounds (%)")
    axes.set_xlim(0.4, longest + 0.6)
    axes.set_ylim(0, 1.28 * max([*released.values(), *looped.values()]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _name_bars(axes, released, looped, f"{HOSTS.get(pair.row.host, pair.row.host)}, τ {length(pair.released.tau)}")
    _name_line(axes, released, looped, f"{LOOPED}, τ {length(pair.looped.tau)}")


def _name_bars(axes: Axes, released: dict[int, float], looped: dict[int, float], words: str) -> None:
    """Write the bars' name above the highest of them."""
    if not released:
        return
    place = max(released, key=lambda n: released[n])
    top = max(released[place], looped.get(place, 0))
    axes.annotate(words, (place - 0.4, top), xytext=(0, 5), textcoords="offset points", color=MUTED)


def _name_line(axes: Axes, released: dict[int, float], looped: dict[int, float], words: str) -> None:
    """Write the line's name above its highest point where it stands alone: beyond what one stage can yield."""
    alone = [n for n in looped if n > max(released, default=0)] or list(looped)
    place = max(alone, key=lambda n: looped[n])
    side = "left" if place < 0.6 * axes.get_xlim()[1] else "right"
    axes.annotate(
        words, (place, looped[place]), xytext=(0, 6), textcoords="offset points", ha=side, color=DARK, weight="bold"
    )


def extra_stages(found: Collected, pairs: Sequence[Pair]) -> Figure:
    """Share of rounds with one, two, three or more additional stages, by benchmark, a panel each pair."""
    figure, panels = _panels(len(pairs), width=4.6, height=0.9 + 0.24 * (len(found.benchmarks) + 1))
    for axes, pair in zip(panels, pairs, strict=True):
        _stages_panel(axes, {**found.of(pair.row), "all rounds": pair.looped}, pair)
    return figure


def _stages_panel(axes: Axes, stages: dict[str, Measurement], pair: Pair) -> None:
    names = list(stages)
    places = range(len(names), 0, -1)
    left = [0.0] * len(names)
    for least, (words, color) in enumerate(SHADES.items(), start=1):
        shares = [_stage_share(part.stages, least, words) for part in stages.values()]
        axes.barh(places, shares, left=left, color=color, height=0.72)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    for place, end in zip(places, left, strict=True):
        axes.annotate(f"{end:.1f}", (end, place), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(places, [benchmark_label(name) for name in names])
    axes.set_xlim(0, 1.12 * max(*left, LEAST_SCALE))
    axes.set_xlabel("rounds with an additional stage (%)")
    axes.set_title(f"{pair.row.target}: {pair.family}", pad=18)
    _name_shades(axes)


def _name_shades(axes: Axes) -> None:
    """The shades' key in one line above the bars, in the order in which they follow each other in a bar."""
    x = 0.0
    for words, color in SHADES.items():
        axes.annotate("■", (x, 1.02), xycoords="axes fraction", color=color, va="bottom")
        axes.annotate(words, (x + 0.045, 1.02), xycoords="axes fraction", va="bottom")
        x += 0.14
    axes.annotate("additional stages", (x + 0.1, 1.02), xycoords="axes fraction", va="bottom")


def _stage_share(stages: Counter[int], least: int, words: str) -> float:
    """Percent of rounds with exactly `least` additional stages, or that many and more for the last shade."""
    wanted = sum(n for extra, n in stages.items() if extra == least or (extra > least and words.endswith("more")))
    return 100 * wanted / (stages.total() or 1)


def _shares(histogram: Counter[int]) -> dict[int, float]:
    return {key: 100 * count / histogram.total() for key, count in sorted(histogram.items())}


def _panels(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def _save(figure: Figure, path: Path) -> Path:
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        content = io.BytesIO()
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
        atomic.write_bytes(path.with_suffix(suffix), content.getvalue())
    return path.with_suffix(".svg")
