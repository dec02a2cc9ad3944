"""The audit table: counts by row, and the departure that a tie explains least."""

import pandas as pd
import pytest

from dloop.reporting import auditing
from dloop.reporting.collect import collect, read_rows
from dloop.results.metrics import Departure, worst_departure
from dloop.results.record import read_result, write_result
from tests.reporting.tree import build
from tests.results.fabricate import response

SETS = ["gsm8k", "mt-bench"]
WORST = "eval/cpu/tiny/dflash/dloop/trained/mt-bench.json"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    listed = build(root, benchmarks=SETS, prompts=3)
    result = read_result(root / WORST)
    for part, margin in zip(result.responses[:3], (2e-4, 5e-2, 1e-5), strict=True):
        part.output_ids[7] += 1
        part.first_divergence, part.divergence_margin = 7, margin
    write_result(root / WORST, result)
    return root, collect(root, "cpu", read_rows(listed), SETS)


def test_every_result_is_a_line_of_counts(found):
    _, numbers = found
    frame = auditing.frame(numbers).set_index(["label", "benchmark"])
    assert len(frame) == 3 * len(SETS)
    spoilt = frame.loc["+ DLoop", "mt-bench"]
    # Second turns behind a departure have another prompt and are never the worst.
    assert spoilt[["identical", "tie", "divergent", "other_prompt"]].tolist() == [2, 2, 0, 2]
    assert spoilt[["worst_index", "worst_turn", "worst_token"]].tolist() == [0, 0, 7]
    assert spoilt["worst_margin"] == 2e-4
    assert spoilt["file"].endswith(WORST)
    assert pd.isna(frame.loc["DFlash", "gsm8k"]["worst_index"])


def test_the_page_links_the_worst_case(found):
    root, numbers = found
    page = auditing.page(numbers, root / "tables" / "cpu")
    assert f"[MT-Bench, prompt 0, turn 0, token 7: margin 0.0002](../../{WORST})" in page
    row = next(line for line in page.splitlines() if "+ DLoop" in line)
    assert [cell.strip() for cell in row.split("|")[3:8]] == ["9", "5", "2", "0", "2"]


def test_an_unknown_margin_is_worse_than_any():
    baseline = [response(index=index) for index in range(3)]
    method = [response(index=index, output_ids=[5, 6, 7, 8, 9, 10, 2]) for index in range(3)]
    for part, margin in zip(method, (0.25, None, 9.0), strict=True):
        part.first_divergence, part.divergence_margin = 6, margin
    assert worst_departure(method, baseline) == Departure(1, 0, 6, None)
    assert worst_departure(baseline, baseline) is None
