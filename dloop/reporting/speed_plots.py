"""Three pictures of speed: speedups by benchmark, where the time of a round goes, and speedup over the gate."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dloop.reporting import text
from dloop.reporting.figures import DARK, INK, LIGHT, MUTED, places
from dloop.reporting.labels import BASELINE, LOOPED, benchmark_label
from dloop.reporting.measurement import Measurement
from dloop.reporting.panels import Panel

PARTS = {
    "draft": ("draft", DARK),
    "tree_build": ("tree", "#7fb2d9"),
    "verify": ("verify", "#dcdcdc"),
    "commit": ("commit", "#8f8f8f"),
    "gate": ("host", "#404040"),
}
"""The timed parts of a round in their order: name and colour, neighbours apart in grey as well."""
KEY: dict[str, Any] = {
    "loc": "lower left",
    "bbox_to_anchor": (0, 1),
    "borderaxespad": 0.3,
    "borderpad": 0,
    "frameon": False,
}
"""A key in one line between title and picture."""


def speedup(shown: Sequence[Panel]) -> Figure:
    """Speedup by benchmark: the released draft a light dot, the looped one a dark dot, the target alone a line at 1."""
    rows = max(len(panel.benchmarks) for panel in shown)
    figure, axes_of = places(len(shown), width=4.6, height=1.25 + 0.27 * rows)
    for axes, panel in zip(axes_of, shown, strict=True):
        _speedup_panel(axes, panel)
    return figure


def _speedup_panel(axes: Axes, panel: Panel) -> None:
    heights = range(len(panel.benchmarks), 0, -1)
    dots = {panel.bars: (0.14, LIGHT, "o"), LOOPED: (-0.14, DARK, "D")}
    for height, pair in zip(heights, panel.benchmarks.values(), strict=True):
        for (name, (shift, color, marker)), part in zip(dots.items(), pair, strict=True):
            _dot(axes, part, height + shift, color, marker, name if height == len(heights) else "_")
        released, looped = (part.speedup for part in pair)
        if math.isnan(released) and math.isnan(looped):
            axes.annotate("no result", (1, height), xytext=(6, 0), textcoords="offset points", va="center", color=MUTED)
        gain = "" if math.isnan(released + looped) else text.gain(looped / released - 1)
        axes.annotate(gain, (1, height), xycoords=("axes fraction", "data"), ha="right", va="center")
    axes.axvline(1, color=INK, linewidth=1, linestyle="--", zorder=0)
    axes.annotate(BASELINE.lower(), (1, 0.42), xytext=(3, 0), textcoords="offset points", color=MUTED, va="bottom")
    axes.set_yticks(heights, [benchmark_label(name) for name in panel.benchmarks])
    axes.get_yticklabels()[-1].set_fontweight("bold")
    axes.set_ylim(0.4, len(heights) + 0.6)
    _speedup_limits(axes, panel)
    axes.set_xlabel("speedup over autoregressive decoding")
    axes.set_title(panel.title, pad=18)
    handles, names = axes.get_legend_handles_labels()
    wanted = 1 + bool(panel.looped.rounds)
    axes.legend(handles[:wanted], names[:wanted], ncols=2, handletextpad=0.1, columnspacing=1.2, **KEY)


def _dot(axes: Axes, part: Measurement, height: float, color: str, marker: str, name: str) -> None:
    """A speedup with its interval."""
    line = DARK if color == DARK else MUTED
    axes.plot(part.speedup_interval, [height, height], color=line, linewidth=1, zorder=2)
    edge: dict[str, Any] = {"markeredgecolor": INK, "markeredgewidth": 0.6, "markersize": 6, "linestyle": "none"}
    axes.plot(part.speedup, height, marker, color=color, label=name, zorder=3, **edge)


def _speedup_limits(axes: Axes, panel: Panel) -> None:
    numbers = [
        bound
        for pair in panel.benchmarks.values()
        for part in pair
        for bound in (part.speedup, *part.speedup_interval)
        if not math.isnan(bound)
    ]
    low, high = min([1.0, *numbers]), max([1.1, *numbers])
    # Room on the right for the gains.
    axes.set_xlim(low - 0.06 * (high - low), high + 0.24 * (high - low))


def round_time(shown: Sequence[Panel]) -> Figure:
    """Milliseconds of a round by part, the target alone above the drafts."""
    figure, axes_of = places(len(shown), width=4.6, height=2.3)
    for axes, panel in zip(axes_of, shown, strict=True):
        _time_panel(axes, panel)
    return figure


def _time_panel(axes: Axes, panel: Panel) -> None:
    named = {BASELINE: panel.baseline, panel.bars: panel.released, LOOPED: panel.looped}
    rows = {name: part for name, part in named.items() if part.rounds}
    heights = range(len(rows), 0, -1)
    left = [0.0] * len(rows)
    for key, (words, color) in PARTS.items():
        widths = [1000 * part.seconds[key] / part.rounds for part in rows.values()]
        axes.barh(heights, widths, left=left, color=color, edgecolor="white", linewidth=0.5, height=0.62, label=words)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    for height, end, part in zip(heights, left, rows.values(), strict=True):
        per_token = end / part.tau_micro if part.tau_micro == part.tau_micro else math.nan
        words = f"{end:.1f} ms" + (f", {per_token:.1f} a token" if part.tau_micro > 1 else "")
        axes.annotate(words, (end, height), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(heights, list(rows))
    axes.set_xlim(0, 1.42 * max(left, default=1))
    axes.set_xlabel("time of a round (ms)")
    axes.set_title(panel.title, pad=18)
    axes.legend(ncols=5, handlelength=0.7, handletextpad=0.4, columnspacing=1.0, **KEY)


def gate(shown: Sequence[Panel]) -> Figure:
    """Predicted speedup over the gate's threshold, with the measured ones; one panel for each draft's lowest gate."""
    lowest: dict[tuple[str, ...], Panel] = {}
    for panel in shown:
        if panel.looped.gates:
            key = (panel.title.split(" (")[0], *map(str, sorted(panel.gates.items())))
            best = lowest.setdefault(key, panel)
            lowest[key] = min(best, panel, key=lambda part: part.looped.gates[0].threshold)
    figure, axes_of = places(max(len(lowest), 1), width=4.6, height=2.7)
    for axes, panel in zip(axes_of, lowest.values(), strict=False):
        _gate_panel(axes, panel)
    if not lowest:
        axes_of[0].annotate("no run with a loop to replay", (0.5, 0.5), xycoords="axes fraction", ha="center")
        axes_of[0].set_axis_off()
    return figure


def _gate_panel(axes: Axes, panel: Panel) -> None:
    points = panel.looped.gates[::-1]
    names = ["closed" if point.threshold >= 0 else f"{point.threshold:g}" for point in points]
    values = [point.speedup for point in points]
    best = max(range(len(points)), key=lambda spot: values[spot])
    axes.plot(range(len(points)), values, color=DARK, linewidth=1.4, marker="o", markersize=3)
    axes.plot(best, values[best], "o", color=DARK, markersize=7)
    for spot, point in enumerate(points):
        value = panel.gates.get(point.threshold, math.nan)
        if math.isnan(value):
            continue
        axes.plot(spot, value, "D", color="white", markeredgecolor=INK, markersize=6)
        rises = spot == 0 or value >= values[spot - 1]
        place: dict[str, Any] = {"xytext": (-7, 3 if rises else -3), "va": "bottom" if rises else "top", "ha": "right"}
        axes.annotate(f"measured {text.ratio(value)}", (spot, value), textcoords="offset points", **place)
    axes.set_xticks(range(len(points)), names)
    axes.tick_params(axis="x", labelrotation=45 if len(points) > 7 else 0)
    shown = [*values, *(value for value in panel.gates.values() if value == value)]
    pad = max(max(shown) - min(shown), 0.02 * max(shown))
    axes.set_ylim(min(shown) - 0.2 * pad, max(shown) + 0.3 * pad)
    axes.set_xlim(-0.6, len(points) - 0.4)
    axes.set_xlabel("gate threshold g (further right: more stages)")
    axes.set_ylabel("speedup")
    axes.set_title(f"{panel.title}, best predicted: {names[best]}")
