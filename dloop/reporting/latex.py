"""The tables for papers: a `table*` each, to be `\\input` in a document with booktabs and graphicx."""

from collections.abc import Iterable, Sequence

from dloop.reporting import overview, text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import HOSTS, benchmark_label
from dloop.reporting.layout import Grid, grids, marked
from dloop.reporting.overview import Pair

_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "τ": r"$\tau$",
}


def escape(words: str) -> str:
    """`words` as LaTeX text."""
    return "".join(_ESCAPES.get(sign, sign) for sign in words)


def host_table(found: Collected, host: str, note: str | None) -> str:
    """A host's table: for each benchmark speedup and acceptance length, targets below each other."""
    sections = grids(found, host)
    columns = list(sections[0].speedup.columns)
    heads = " & ".join(rf"\multicolumn{{2}}{{c}}{{{escape(benchmark_label(name))}}}" for name in columns)
    rules = "".join(rf"\cmidrule(lr){{{2 * i + 2}-{2 * i + 3}}}" for i in range(len(columns)))
    units = r" & Spd. & $\tau$" * len(columns)
    lines = [rf" & {heads} \\", rules, rf"{units} \\"]
    for grid in sections:
        title = rf"\multicolumn{{{1 + 2 * len(columns)}}}{{l}}{{\textit{{{escape(grid.target)}}}}} \\"
        lines += [r"\midrule", title, *_lines(grid)]
    caption = (
        f"{HOSTS.get(host, host)}: speedup over autoregressive decoding (Spd.) and mean acceptance length τ. "
        "Bold: the best of a target's drafts."
    )
    return _table("l" + "rc" * len(columns), lines, caption, f"tab:{host}", note)


def overview_table(found: Collected, pairs: Sequence[Pair], note: str | None) -> str:
    """The overview: one line for each pair of released and looped draft."""
    heads, cells = overview.cells(found, pairs)
    lines = [_line(map(_times, heads)), r"\midrule", *(_line(map(_times, line)) for line in cells)]
    caption = f"Speedup over autoregressive decoding / mean acceptance length τ, mean of {len(found.benchmarks)} sets."
    return _table("ll" + "r" * (len(heads) - 2), lines, caption, "tab:overview", note)


def _lines(grid: Grid) -> list[str]:
    speedups = marked(grid.speedup, _ratio, _bold)
    taus = marked(grid.tau, text.length, _bold)
    return [
        _line([escape(label), *(part for both in zip(*line, strict=True) for part in both)])
        for label, *line in zip(grid.rows, speedups, taus, strict=True)
    ]


def _ratio(value: float) -> str:
    return _times(text.ratio(value))


def _bold(words: str) -> str:
    return rf"\textbf{{{words}}}"


def _times(words: str) -> str:
    escaped = escape(words)
    # Only behind a digit is an x a multiplication sign.
    return "".join(
        r"$\times$" if sign == "x" and place and escaped[place - 1].isdigit() else sign
        for place, sign in enumerate(escaped)
    )


def _line(parts: Iterable[str]) -> str:
    return " & ".join(parts) + r" \\"


def _table(columns: str, lines: Sequence[str], caption: str, label: str, note: str | None) -> str:
    remark = escape(" " + " ".join(note.split())) if note else ""
    return "\n".join(
        [
            "% needs \\usepackage{booktabs,graphicx}",
            r"\begin{table*}[t]",
            r"\centering\small\setlength{\tabcolsep}{3.5pt}",
            rf"\caption{{{escape(caption)}{remark}}}",
            rf"\label{{{label}}}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table*}",
            "",
        ]
    )
