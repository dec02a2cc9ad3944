import math

import pandas as pd
import pytest

from dloop.reporting import layout
from dloop.reporting.collect import collect, read_rows
from dloop.reporting.labels import Row
from dloop.reporting.overview import cells, frame, pairs, sentence
from tests.reporting.tree import ROWS, build

SETS = ["gsm8k", "mt-bench", "my_set"]


def gather(root, listed, sets=SETS):
    return collect(root, "cpu", read_rows(listed), sets)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    return gather(root, build(root, targets=("small", "large"), benchmarks=SETS, prompts=3))


def test_a_grid_a_target_with_benchmarks_in_order_and_their_plain_mean(found):
    grids = layout.grids(found, "dflash")
    assert [grid.target for grid in grids] == ["small", "large"]
    for grid in grids:
        assert list(grid.speedup.index) == list(grid.tau.index) == ["Autoregressive", "DFlash", "+ DLoop", "+ control"]
        assert list(grid.speedup.columns) == [*SETS, "Avg."]
        assert (grid.speedup.loc["Autoregressive"] == 1).all()
        assert grid.tau.at["DFlash", "Avg."] == pytest.approx(grid.tau.loc["DFlash", SETS].mean())


def test_a_missing_cell_makes_the_average_unknown(tmp_path):
    listed = build(tmp_path, benchmarks=SETS, prompts=2)
    (tmp_path / "eval/cpu/tiny/dflash/dloop/trained/mt-bench.json").unlink()
    grid = layout.grids(gather(tmp_path, listed), "dflash")[0]
    assert grid.speedup.loc["+ DLoop"].isna().tolist() == [False, True, False, True]


def test_the_best_method_of_each_column_is_marked_exactly():
    numbers = pd.DataFrame(
        {"a": [9.0, 2.0, 3.0], "b": [9.0, 2.0, 2.0], "c": [9.0, math.nan, 1.0]}, index=["b", "x", "y"]
    )
    marks = layout.best(numbers)
    assert marks["a"].tolist() == [False, False, True]
    assert marks["b"].tolist() == [False, True, True]
    assert marks["c"].tolist() == [False, False, False]


def test_cells_hold_both_numbers_and_the_best_in_bold():
    speedup = pd.DataFrame({"gsm8k": [1.0, 2.004, math.nan], "Avg.": [1.0, 3.0, 2.0]}, index=["b", "x", "y"])
    looped = Row(target="tiny", host="dflash", setting="dloop", draft="trained")
    grid = layout.Grid(
        target="tiny",
        speedup=speedup,
        tau=speedup.iloc[::-1].set_axis(speedup.index),
        speedup_interval=speedup.map(lambda value: (value - 0.25, value + 0.25)),
        tau_interval=speedup.map(lambda value: (math.nan, math.nan)),
        gain=pd.Series({"b": math.nan, "x": math.nan, "y": 0.0825}),
        averages={},
        rows={"y": looped},
    )
    assert layout.texts(grid, "<{}>".format).to_dict("index") == {
        "b": {"GSM8K": "1.00x / --", "Avg.": "1.00x / 2.00", "Gain": ""},
        "x": {"GSM8K": "2.00x / <2.00>", "Avg.": "<3.00x> / <3.00>", "Gain": ""},
        "y": {"GSM8K": "-- / 1.00", "Avg.": "2.00x / 1.00", "Gain": "+8.2 %"},
    }
    with_intervals = layout.texts(grid, str, intervals=True)
    assert with_intervals["Avg."].tolist() == ["1.00x / 2.00", "3.00x [2.75, 3.25] / 3.00", "2.00x [1.75, 2.25] / 1.00"]


def test_the_tidy_frame_holds_every_unrounded_number(found):
    tidy = layout.tidy(found, "dflash")
    assert len(tidy) == 2 * 4 * (len(SETS) + 1)
    key, numbers = next((key, part) for key, part in found.measured.items() if key[0].draft == "trained")
    line = tidy[(tidy.target == key[0].target) & (tidy.draft == "trained") & (tidy.benchmark == key[1])].iloc[0]
    for name in ("speedup", "speedup_micro", "tau", "tau_micro", "tokens_per_second", "extra_stages", "open_share"):
        assert line[name] == getattr(numbers, name)
    assert line["identical"] == numbers.audit.identical == numbers.responses
    assert pd.isna(tidy[tidy.setting == "baseline"]["identical"]).all()


def test_gains_compare_unrounded_averages(found):
    small, large = pairs(found)
    assert small.speedup_gain == pytest.approx(small.looped.speedup / small.released.speedup - 1)
    low, high = small.gain_interval
    assert low < small.speedup_gain < high
    assert (small.control.speedup, small.family, large.row.target) != (small.looped.speedup, "", "small")
    numbers = frame([small, large])
    assert numbers["speedup_gain"].tolist() == [small.speedup_gain, large.speedup_gain]
    assert numbers["control_tau"].tolist() == [small.control.tau, large.control.tau]
    assert list(frame([])) == list(numbers)


def test_trees_are_compared_with_trees_and_variants_with_the_plain_host(tmp_path):
    rows = {
        ("released", "released"): {"skill": 0.0, "openness": 0.0, "gate": 1.0},
        ("dloop-eager", "trained"): {"skill": 0.0, "openness": 0.4, "gate": -1.0},
        ("released-ddtree", "released"): {"skill": 0.05, "openness": 0.0, "gate": 1.0},
        ("dloop-ddtree", "published"): {"skill": 0.05, "openness": 0.2, "gate": -0.5},
        ("dloop-ddtree", "trained"): {"skill": 0.05, "openness": 0.3, "gate": -0.5},
    }
    found = gather(tmp_path, build(tmp_path, rows=rows, benchmarks=["gsm8k"], prompts=3), ["gsm8k"])
    eager, published, trained = pairs(found)
    assert [pair.family for pair in (eager, published, trained)] == [
        *("DFlash (eager)", "DFlash + DDTree (published)", "DFlash + DDTree (trained)")
    ]
    assert eager.released.tau == found.average(found.rows[1]).tau
    assert published.released.tau == trained.released.tau == found.average(found.rows[3]).tau
    assert list(cells(found, [eager, published, trained])) == [
        "Target",
        "Host",
        "Released",
        "+ DLoop",
        "Gain in speedup",
        "Gain in τ",
    ]


def test_a_gate_that_hardly_opened_states_no_gain(tmp_path):
    rows = {**ROWS, ("dloop", "trained"): {"skill": 0.0, "openness": 0.0, "gate": -0.5}}
    found = gather(tmp_path, build(tmp_path, rows=rows, benchmarks=["gsm8k"], prompts=2), ["gsm8k"])
    (pair,) = pairs(found)
    assert pair.hardly_opened
    assert cells(found, [pair]).iloc[0, 4:6].tolist() == ["gate hardly opened", "--"]
    assert "the gate hardly opened, so no gain is stated" in sentence(pair)


def test_without_a_released_row_the_gain_is_unknown(tmp_path):
    listed = build(tmp_path, benchmarks=["gsm8k"], prompts=2)
    (pair,) = pairs(gather(tmp_path, listed[1:2], ["gsm8k"]))
    assert math.isnan(pair.speedup_gain)
    assert math.isnan(pair.gain_interval[0])
    assert pair.control.rounds == 0
