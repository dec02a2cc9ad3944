"""What all pictures share: colours that survive grey print and colour-blind eyes, sizes, and how they are saved."""

import io
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dloop.results import atomic

LIGHT, MUTED, DARK, INK = "#c9c9c9", "#666666", "#1f4e79", "#333333"
"""The released draft, words about it, the looped one, everything else."""

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


def places(count: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of `count` panels of this size (inches), at most three abreast."""
    columns = min(count, 3)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, [figure.add_subplot(rows, columns, place + 1) for place in range(count)]


def save(figure: Figure, path: Path) -> Path:
    """Write the figure as PNG and SVG, the same bytes each time; the SVG's path is returned."""
    for suffix, metadata in ((".png", {"Software": None}), (".svg", {"Date": None, "Creator": None})):
        content = io.BytesIO()
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=metadata)
        atomic.write_bytes(path.with_suffix(suffix), content.getvalue())
    return path.with_suffix(".svg")
