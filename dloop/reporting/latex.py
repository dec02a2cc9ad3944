"""The tables for papers: a `table*` each, to be `\\input` in a document with booktabs and graphicx."""

import math
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from dloop.reporting import overview, text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import BASELINE, HOSTS, benchmark_label
from dloop.reporting.layout import GAIN, Grid, best, bounds, grids, texts
from dloop.reporting.overview import Pair

UNITS = ("Spd.", r"$\tau$")
"""The two numbers below a benchmark."""
PRINTED = {"speedup": r"{:.2f}$\times$", "tau": "{:.2f}"}


def host_table(found: Collected, host: str, note: str | None, *, intervals: bool = False) -> str:
    """A host's table: for each benchmark speedup and acceptance length, targets below each other."""
    sections = grids(found, host)
    numbers = pd.concat({grid.target: _cells(grid, intervals=intervals) for grid in sections})
    marks = pd.concat({grid.target: _paired(best(grid.speedup), best(grid.tau)) for grid in sections})
    marks[GAIN, ""] = False
    width = 1 + len(numbers.columns)
    # What is to stand at the start of a line of LaTeX goes in front of its first cell.
    numbers.columns.names = ["", "".join(rf"\cmidrule(lr){{{left}-{left + 1}}}" for left in range(2, width - 1, 2))]
    title = rf"\midrule \multicolumn{{{width}}}{{l}}{{\textit{{%s}}}} \\" + "\n"
    words = [title % _escaped(target) * (label == BASELINE) + _escaped(label) for target, label in numbers.index]
    names: dict[object, str] = dict(enumerate(words))

    style = numbers.reset_index(drop=True).style
    style.apply(lambda _: np.where(marks, "textbf:--rwrap;", ""), axis=None)
    style.format_index(lambda name: benchmark_label(str(name)), escape="latex", axis="columns", level=0)
    style.format_index(names.__getitem__, axis="index")
    style.set_table_styles([{"selector": rule, "props": f":{rule}"} for rule in ("toprule", "bottomrule")])
    tabular = style.to_latex(column_format="l" + "rc" * (width // 2 - 1) + "r", multicol_align="c")
    caption = (
        f"{_escaped(HOSTS.get(host, host))}: speedup over autoregressive decoding (Spd.) and mean acceptance length τ. "
        "Bold: the best of a target's drafts. Gain: average speedup over the released host's."
    )
    return _float(tabular, caption, f"tab:{host}", note)


def _cells(grid: Grid, *, intervals: bool) -> pd.DataFrame:
    """A target's cells as LaTeX: (benchmark, unit), and the gain behind them."""
    shown = {}
    for name, numbers, spread in (
        ("speedup", grid.speedup, grid.speedup_interval),
        ("tau", grid.tau, grid.tau_interval),
    ):
        cells = numbers.map(lambda value, show=PRINTED[name]: text.MISSING if math.isnan(value) else show.format(value))
        shown[name] = cells + bounds(spread, r" {{\scriptsize[{:.2f}, {:.2f}]}}") if intervals else cells
    cells = _paired(shown["speedup"], shown["tau"])
    cells[GAIN, ""] = [_escaped(words) for words in texts(grid, str)[GAIN]]
    return cells


def _paired(speedup: pd.DataFrame, tau: pd.DataFrame) -> pd.DataFrame:
    """Both frames' columns side by side: (benchmark, unit)."""
    both = pd.concat([speedup, tau], axis="columns", keys=list(UNITS)).swaplevel(axis="columns")
    return both[pd.MultiIndex.from_product([speedup.columns, list(UNITS)])]


def overview_table(found: Collected, pairs: Sequence[Pair], note: str | None) -> str:
    """The overview: one line for each pair of released and looped draft."""
    cells = overview.cells(found, pairs)
    style = cells.style.hide(axis="index").format(_times, escape="latex").format_index(escape="latex", axis="columns")
    tabular = style.to_latex(hrules=True, column_format="ll" + "r" * (len(cells.columns) - 2))
    caption = f"Speedup over autoregressive decoding / mean acceptance length τ, mean of {len(found.benchmarks)} sets."
    return _float(tabular, caption, "tab:overview", note)


def _times(words: object) -> str:
    return re.sub(r"(?<=\.\d\d)x", r"$\\times$", str(words))


def _escaped(words: str) -> str:
    """`words` as LaTeX text, on one line."""
    cell = pd.DataFrame([" ".join(words.split())]).style.format(escape="latex")
    return cell.hide(axis="index").hide(axis="columns").to_string().strip()


def _float(tabular: str, caption: str, label: str, note: str | None) -> str:
    """A `tabular` in a float of both columns' width, shrunk where it is wider."""
    remark = f" {_escaped(note)}" if note else ""
    page = rf"""% needs \usepackage{{booktabs,graphicx}}
\begin{{table*}}[t]
\centering\small\setlength{{\tabcolsep}}{{3.5pt}}
\caption{{{caption}{remark}}}
\label{{{label}}}
\resizebox{{\ifdim\width>\textwidth\textwidth\else\width\fi}}{{!}}{{%
{tabular.strip()}}}
\end{{table*}}
"""
    return page.replace("τ", r"$\tau$")
