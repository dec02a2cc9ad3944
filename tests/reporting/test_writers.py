import re
import shutil
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from dloop.reporting import latex, layout, markdown, plots, remarks, terminal
from dloop.reporting.collect import collect, read_rows
from dloop.reporting.modelled import read_cost_table
from dloop.reporting.overview import pairs
from dloop.results.metrics import Audit
from tests.reporting.tree import build, cost_table

PICTURES = ["speedup", "acceptance_length", "extra_stages", "round_time", "gate"]
SETS = ["gsm8k", "my_set&more"]
NOTE = "The demo:\n  100 % of it."


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    listed = build(root, benchmarks=SETS, prompts=3, ties=0.5, env={"torch": "2.13.0"})
    costs = [read_cost_table(cost_table(root / "c.json"))]
    return collect(root, "cpu", read_rows(listed), SETS, costs)


def tables(page):
    """Every table of a Markdown page as rows of texts, as a renderer that knows tables sees it."""
    found, tokens = [], MarkdownIt().enable("table").parse(page)
    for place, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            found[-1][-1].append(tokens[place + 1].content)
    return found


def test_the_page_of_a_host_renders_as_two_tables(found):
    page = markdown.host_page(found, "dflash", pairs(found), NOTE)
    main, details = tables(page)
    assert main[0] == ["Speedup / τ", "GSM8K", "my_set&more", "Avg.", "Gain"]
    assert [line[0] for line in main[1:]] == ["Autoregressive", "DFlash", "+ DLoop", "+ control"]
    assert main[1][1:] == [*["1.00x / 1.00"] * 3, ""]
    assert [line[-1] != "" for line in main[1:]] == [False, False, True, True]
    plain = re.compile(r"(\*\*)?\d\.\d\dx\1? / (\*\*)?\d+\.\d\d\2?")
    assert all(plain.fullmatch(text.replace("**", "")) for line in main[1:] for text in line[1:-1])
    assert page.count("**") >= 2 * 2 * 3
    assert "modelled" in details[0]
    assert [line[1] for line in details[1:]] == ["", "closed", "-0.5", "-0.5"]


def test_the_overview_names_pictures_relative_to_itself(found):
    page = markdown.overview_page(
        found, pairs(found), NOTE, [Path("/r/plots/cpu/extra_stages.svg")], Path("/r/tables/cpu")
    )
    assert "![extra stages](../../plots/cpu/extra_stages.svg)" in page
    assert "> The demo: 100 % of it." in page
    assert "[DFlash](dflash.md)" in page
    assert tables(page)[0][0][-1] == "+ control"


def test_every_page_says_what_it_was_measured_on(found):
    for page in (
        markdown.host_page(found, "dflash", pairs(found), None),
        markdown.overview_page(found, pairs(found), None, [], Path()),
    ):
        assert "Measured on CPU: Model 7 (1 process of 1 thread) in float32 with sdpa attention" in page
        assert "torch 2.13.0, transformers 5.24.0, dloop 0.1.0 (commit 8f3a9c0de1-dirty, " in page
        assert "at most 256 new tokens" in page


def test_the_audit_is_a_sentence():
    assert remarks.lossless([None], "float32") == ""
    all_equal = remarks.lossless([Audit(identical=3), None, Audit(identical=2)], "float32")
    assert all_equal == "Lossless: all 5 responses are, token for token, those of autoregressive decoding."
    mixed = remarks.lossless([Audit(identical=1, tie=2, divergent=3, other_prompt=4)], "bfloat16")
    assert "Of 10 responses 1 are" in mixed
    assert "2 part from it at a tie (the target's two best logits within 0.5)" in mixed
    assert "3 diverge without a tie" in mixed.replace("**", "")
    assert "4 are later turns" in mixed


def test_warnings_are_listed(found):
    assert "Mind" not in markdown.host_page(found, "dflash", pairs(found), None)
    found.warnings["the torch version differs"] += 2
    found.missing.extend(["a.json", "b.json"])
    try:
        page = markdown.host_page(found, "dflash", pairs(found), None)
    finally:
        found.warnings.clear()
        found.missing.clear()
    assert "- missing: a.json and 1 more\n- the torch version differs (2 of 8 results)" in page


@pytest.mark.parametrize("kind", ["host", "overview", "nothing"])
def test_latex_rows_have_as_many_cells_as_columns(found, kind):
    text = {
        "host": lambda: latex.host_table(found, "dflash", NOTE),
        "overview": lambda: latex.overview_table(found, pairs(found), NOTE),
        "nothing": lambda: latex.overview_table(found, [], NOTE),
    }[kind]()
    wanted = len(re.search(r"\\begin\{tabular\}\{([lrc]+)\}", text).group(1))
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) >= 1
    for row in rows:
        spans = [int(n) for n in re.findall(r"\\multicolumn\{(\d+)\}", row)]
        assert len(re.findall(r"(?<!\\)&", row)) + 1 - len(spans) + sum(spans) == wanted
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert "100 \\% of it." in text
    assert text.isascii()


def test_latex_opens_a_target_s_rows_with_a_rule_and_its_name(found):
    lines = latex.host_table(found, "dflash", None).splitlines()
    place = lines.index(r"\midrule \multicolumn{8}{l}{\textit{tiny}} \\")
    assert [line.split(" & ")[0] for line in lines[place + 1 : place + 5]] == [
        *("Autoregressive", "DFlash", "+ DLoop", "+ control")
    ]
    assert lines[place - 1].startswith(r"\cmidrule(lr){2-3}\cmidrule(lr){4-5}\cmidrule(lr){6-7} & Spd. & $\tau$ & Spd.")
    assert lines[place + 5] == r"\bottomrule"
    bold = sum(line.count(r"\textbf{") for line in lines[place + 2 : place + 5])
    assert bold == sum(layout.best(part).sum().sum() for part in (grid(found).speedup, grid(found).tau))


def grid(found):
    return layout.grids(found, "dflash")[0]


def test_latex_escapes_what_it_would_read_as_commands(found):
    text = latex.overview_table(found, pairs(found), "a_b & 5% $x #1 {~^} \\n τ")
    assert r"a\_b \& 5\% \$x \#1 \{\textasciitilde \textasciicircum \} \textbackslash n $\tau$}" in text
    assert r"my\_set\&more" in latex.host_table(found, "dflash", None)


def test_the_terminal_shows_benchmarks_downwards(found, capsys):
    terminal.show(found, pairs(found), "[a note]", [Path("some/overview.md")])
    out = capsys.readouterr().out
    assert "DFlash on tiny: speedup / acceptance length, autoregressive" in out
    assert re.search(r"│ GSM8K +│ \d\.\d\dx / +\d\.\d\d │", out)
    assert "[a note]" in out
    assert "some/overview.md" in out
    assert max(map(len, out.splitlines())) <= 100


def test_pictures_are_the_same_bytes_each_time(found, tmp_path):
    for folder in ("a", "b"):
        written = plots.draw(found, pairs(found), tmp_path / folder)
    assert [path.stem for path in written] == PICTURES
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {f"{name}.{kind}" for name in PICTURES for kind in ("svg", "png")}
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_bars_and_the_line_are_shares_of_rounds(found):
    (axes,) = plots.acceptance_length(plots.panels(found, pairs(found))).axes
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(100)
    assert sum(axes.lines[0].get_ydata()) == pytest.approx(100)


def test_the_stages_of_a_bar_add_up_to_the_open_share(found):
    lines = pairs(found)
    (axes,) = plots.extra_stages(plots.panels(found, lines)).axes
    last_of_each_shade = axes.patches[len(SETS) :: len(SETS) + 1]
    assert sum(bar.get_width() for bar in last_of_each_shade) == pytest.approx(100 * lines[0].looped.open_share)
    assert [words.get_text() for words in axes.get_legend().get_texts()] == list(plots.SHADES)


@pytest.fixture(scope="module")
def released_alone(tmp_path_factory):
    root = tmp_path_factory.mktemp("released")
    listed = build(root, benchmarks=SETS, prompts=2)[:1]
    return collect(root, "cpu", read_rows(listed), SETS)


def test_without_a_looped_row_the_pictures_show_the_released_draft_alone(released_alone, tmp_path):
    assert [path.stem for path in plots.draw(released_alone, [], tmp_path)] == PICTURES
    shown = plots.panels(released_alone, pairs(released_alone))
    (axes,) = plots.acceptance_length(shown).axes
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(100)
    assert not axes.lines
    (axes,) = plots.extra_stages(shown).axes
    assert "no round had an additional stage" in [words.get_text() for words in axes.texts]
    page = markdown.overview_page(released_alone, [], None, [], tmp_path)
    assert "nothing to compare" in page


def test_without_a_draft_s_rounds_there_is_no_picture(tmp_path):
    listed = build(tmp_path, benchmarks=["gsm8k"], prompts=1)
    shutil.rmtree(tmp_path / "eval")
    assert plots.draw(collect(tmp_path, "cpu", read_rows(listed), ["gsm8k"]), [], tmp_path) == []
