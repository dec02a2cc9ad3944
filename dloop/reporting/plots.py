"""Two pictures of rounds: what they accept, and how many additional stages they draft.

Made to be read in grey: the released draft is light bars, the looped one a dark line; numbers of stages are shades
from light to dark. Words stand at what they name. The same results give the same bytes.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dloop.reporting import speed_plots
from dloop.reporting.collect import Collected
from dloop.reporting.figures import DARK, LIGHT, MUTED, STYLE, places, save
from dloop.reporting.labels import LOOPED, benchmark_label
from dloop.reporting.overview import Pair
from dloop.reporting.panels import Panel, panels
from dloop.reporting.text import length

SHADES = {"1": "#a9cbe3", "2": "#4a8ab8", "3 or more additional stages": "#123a5c"}
LEAST_SCALE = 5.0
"""Percent the stages' axis shows at least, so that a gate that hardly opened looks like one."""


def draw(found: Collected, pairs: Sequence[Pair], folder: Path) -> list[Path]:
    """Write all pictures as SVG and PNG into `folder`; the SVG files are returned, none without a draft's rounds."""
    shown = panels(found, pairs)
    if not shown:
        return []
    with rc_context(STYLE):
        pictures = {
            "speedup": speed_plots.speedup(shown),
            "acceptance_length": acceptance_length(shown),
            "extra_stages": extra_stages(shown),
            "round_time": speed_plots.round_time(shown),
            "gate": speed_plots.gate(shown),
        }
        return [save(figure, folder / name) for name, figure in pictures.items()]


def acceptance_length(shown: Sequence[Panel]) -> Figure:
    """Share of rounds by acceptance length, released against looped."""
    figure, axes_of = places(len(shown), width=4.6, height=2.9)
    for axes, panel in zip(axes_of, shown, strict=True):
        _acceptance_panel(axes, panel)
    return figure


def _acceptance_panel(axes: Axes, panel: Panel) -> None:
    released, looped = _shares(panel.released.acceptance), _shares(panel.looped.acceptance)
    longest = max(released | looped)
    lengths = range(1, longest + 1)
    axes.bar(lengths, [released.get(n, 0) for n in lengths], color=LIGHT, width=0.8)
    axes.set_title(panel.title)
    axes.set_xlabel("acceptance length of a round (tokens)")
    axes.set_ylabel("rounds (%)")
    axes.set_xlim(0.4, longest + 0.6)
    axes.set_ylim(0, 1.28 * max([*released.values(), *looped.values()]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _name_bars(axes, released, looped, f"{panel.bars}, τ {length(panel.released.tau)}")
    if looped:
        axes.plot(lengths, [looped.get(n, 0) for n in lengths], color=DARK, marker="o", markersize=3.5, linewidth=1.6)
        _name_line(axes, released, looped, f"{LOOPED}, τ {length(panel.looped.tau)}")


def _name_bars(axes: Axes, released: dict[int, float], looped: dict[int, float], words: str) -> None:
    """Write the bars' name above the highest of them."""
    if not released:
        return
    place = max(released, key=lambda n: released[n])
    top = max(released[place], looped.get(place, 0))
    side, edge = ("left", place - 0.4) if place < 0.6 * axes.get_xlim()[1] else ("right", place + 0.4)
    axes.annotate(words, (edge, top), xytext=(0, 5), textcoords="offset points", ha=side, color=MUTED)


def _name_line(axes: Axes, released: dict[int, float], looped: dict[int, float], words: str) -> None:
    """Write the line's name above it where it stands alone: beyond what one stage can yield."""
    alone = [n for n in looped if n > max(released, default=0)] or list(looped)
    top = max(looped[n] for n in alone)
    first, end = min(alone) + 0.3, axes.get_xlim()[1]
    side, edge = ("left", first) if first < 0.6 * end else ("right", end)
    axes.annotate(words, (edge, top), xytext=(0, 6), textcoords="offset points", ha=side, color=DARK, weight="bold")


def extra_stages(shown: Sequence[Panel]) -> Figure:
    """Share of rounds with one, two, three or more additional stages, by benchmark."""
    figure, axes_of = places(len(shown), width=4.6, height=0.9 + 0.24 * max(len(panel.stages) for panel in shown))
    for axes, panel in zip(axes_of, shown, strict=True):
        _stages_panel(axes, panel)
    return figure


def _stages_panel(axes: Axes, panel: Panel) -> None:
    heights = range(len(panel.stages), 0, -1)
    left = [0.0] * len(heights)
    for least, (words, color) in enumerate(SHADES.items(), start=1):
        shares = [_stage_share(part.stages, least, words) for part in panel.stages.values()]
        axes.barh(heights, shares, left=left, color=color, height=0.72, label=words)
        left = [start + share for start, share in zip(left, shares, strict=True)]
    for height, end in zip(heights, left, strict=True):
        axes.annotate(f"{end:.1f}", (end, height), xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(heights, [benchmark_label(name) for name in panel.stages])
    axes.set_xlim(0, 1.12 * max(*left, LEAST_SCALE))
    axes.set_xlabel("rounds with an additional stage (%)")
    axes.set_title(panel.title, pad=18)
    if any(left):
        key = {"ncols": 3, "handlelength": 0.7, "handletextpad": 0.5, "columnspacing": 1.2, "borderpad": 0}
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.3, frameon=False, **key)
    else:
        axes.annotate("no round had an additional stage", (0.5, 0.5), xycoords="axes fraction", ha="center")


def _stage_share(stages: Counter[int], least: int, words: str) -> float:
    """Percent of rounds with exactly `least` additional stages, or that many and more for the last shade."""
    wanted = sum(n for extra, n in stages.items() if extra == least or (extra > least and "more" in words))
    return 100 * wanted / (stages.total() or 1)


def _shares(histogram: Counter[int]) -> dict[int, float]:
    return {key: 100 * count / histogram.total() for key, count in sorted(histogram.items())}
