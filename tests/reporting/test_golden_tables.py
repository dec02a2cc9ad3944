"""Hand-made results with known means, a tie and a missing cell give exactly these tables; a foreign baseline none."""

import math
import re
import shutil
import subprocess

import pandas as pd
import pytest

from dloop import tables
from dloop.cli import UserError, parse
from dloop.results.record import write_result
from tests.reporting.tree import arguments
from tests.results.fabricate import CONFIG, response, result

SETS = ["gsm8k", "mbpp"]
ROWS = {
    # (host, setting, draft): seconds per token and acceptance lengths by benchmark; None: no file.
    ("eagle3", "released", "released"): {"gsm8k": (0.05, [2, 4]), "mbpp": (0.04, [5])},
    ("eagle3", "dloop", "published"): {"gsm8k": (0.04, [4, 4]), "mbpp": (0.04, [3, 7])},
    ("mtp", "released", "released"): {"gsm8k": (0.08, [2, 2]), "mbpp": (0.05, [3])},
    ("mtp", "dloop", "published"): {"gsm8k": (0.05, [3, 3]), "mbpp": None},
}
STEP = 0.1


def answers(seconds, lengths, *, drafts=True):
    """Two equal responses; every second round of a draft has an additional stage."""
    count = 1 + sum(lengths)
    extra = [place % 2 if drafts else 0 for place in range(len(lengths))]
    rounds = {
        "acceptance_lengths": lengths,
        "extra_stages": extra,
        "verified_tokens": [1 + 8 * (1 + more) if drafts else 1 for more in extra],
        "gate_sums": [[-0.1] * more + [-2.0] for more in extra] if drafts else [],
        "stage_lengths": [[8] * (1 + more) for more in extra] if drafts else [],
        "stage_rows": [[8] * (1 + more) for more in extra] if drafts else [],
        "stage_accepted": [[length - 1] + [0] * more for length, more in zip(lengths, extra, strict=True)]
        if drafts
        else [],
    }
    times = {"decode_time": seconds * count, "tpot": seconds, "num_output_tokens": count}
    same = {"output_ids": [7] * count, **times, **rounds}
    return [response(index=index, row=index, **same) for index in range(2)]


def store(root, place, name, responses, **changes):
    made = result(responses, **changes)
    made.dataset.name = name
    write_result(root / place / f"{name}.json", made)


@pytest.fixture
def golden_results(tmp_path):
    longest = {"gsm8k": 9, "mbpp": 11}
    for name in SETS:
        plain = answers(STEP, [1] * longest[name], drafts=False)
        store(tmp_path, "baseline/cpu/tiny", name, plain, kind="baseline", host=None)
    listed = []
    for (host, setting, draft), cells in ROWS.items():
        gate = -0.5 if setting == "dloop" else 1.0
        for name, cell in cells.items():
            if cell:
                where = f"eval/cpu/tiny/{host}/{setting}/{draft}"
                store(tmp_path, where, name, answers(*cell), host=host, config={**CONFIG, "loop_gate": gate})
        flags = {"loop_gate": gate}
        listed.append({"target": "tiny", "host": host, "setting": setting, "draft": draft, "flags": flags})
    return tmp_path, listed


def make(root, listed, *more):
    tables.make(parse(tables.Options, arguments(root, listed, *more, benchmarks=SETS)))
    return root / "tables" / "cpu"


def test_the_tables_are_exactly_these(golden_results):
    folder = make(*golden_results)
    rows = {
        host: [
            [cell.strip() for cell in line.strip("|").split("|")]
            for line in (folder / f"{host}.md").read_text().splitlines()
            if re.match(r"\| (EAGLE|MTP|\+ DLoop|Autoreg)", line)
        ][:3]
        for host in ("eagle3", "mtp")
    }
    assert rows["eagle3"] == [
        ["Autoregressive", "1.00x / 1.00", "1.00x / 1.00", "1.00x / 1.00", ""],
        # Both are fastest on MBPP and have the same mean length there: ties are all bold.
        ["EAGLE-3", "2.00x / 3.00", "**2.50x** / **5.00**", "2.25x / 4.00", ""],
        ["+ DLoop", "**2.50x** / **4.00**", "**2.50x** / **5.00**", "**2.50x** / **4.50**", "+11.1 %"],
    ]
    assert rows["mtp"] == [
        ["Autoregressive", "1.00x / 1.00", "1.00x / 1.00", "1.00x / 1.00", ""],
        ["MTP", "1.25x / 2.00", "2.00x / 3.00", "1.62x / 2.50", ""],
        ["+ DLoop", "**2.00x** / **3.00**", "-- / --", "-- / --", "--"],
    ]


def test_the_numbers_behind_them_are_unrounded_with_gains_and_intervals(golden_results):
    folder = make(*golden_results)
    frame = pd.read_csv(folder / "eagle3.csv").set_index(["setting", "benchmark"])
    looped = frame.loc[("dloop", "Avg.")]
    assert looped["speedup_gain"] == pytest.approx(2.5 / 2.25 - 1)
    # Equal responses: drawing them again changes nothing.
    assert looped["speedup_low"] == pytest.approx(2.5) == looped["speedup_high"]
    assert looped["tau_low"] == pytest.approx(4.5) == looped["tau_high"]
    assert looped["speedup_gain_low"] == pytest.approx(looped["speedup_gain"])
    missing = pd.read_csv(folder / "mtp.csv").query("setting == 'dloop' and benchmark == 'Avg.'").iloc[0]
    assert math.isnan(missing["speedup"])
    assert math.isnan(missing["speedup_gain"])


def test_intervals_stand_in_the_cells_if_asked(golden_results):
    folder = make(*golden_results, "--intervals")
    assert "2.00x [2.00, 2.00] / 3.00 [3.00, 3.00]" in (folder / "eagle3.md").read_text()
    assert r"2.00$\times$ {\scriptsize[2.00, 2.00]}" in (folder / "eagle3.tex").read_text()


def test_a_foreign_baseline_is_refused(golden_results):
    root, listed = golden_results
    plain = answers(STEP, [1] * 9, drafts=False)
    config = {**CONFIG, "model": "models/other"}
    store(root, "baseline/cpu/tiny", "gsm8k", plain, kind="baseline", host=None, config=config)
    with pytest.raises(UserError, match=r"the target \(--model\) is 'models/tiny' here and 'models/other'"):
        make(root, listed)
    assert not (root / "tables").exists()


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here: test_writers checks the syntax alone")
@pytest.mark.parametrize("more", [[], ["--intervals"]], ids=["plain", "intervals"])
def test_the_latex_compiles_and_fits_the_page(golden_results, more):
    folder = make(*golden_results, *more)
    inputs = "\n".join(rf"\input{{{name}}}" for name in ("overview", "eagle3", "mtp"))
    page = rf"\documentclass{{article}}\usepackage{{booktabs,graphicx}}\begin{{document}}{inputs}\end{{document}}"
    (folder / "paper.tex").write_text(page)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-1500:]
    assert "Overfull" not in done.stdout
