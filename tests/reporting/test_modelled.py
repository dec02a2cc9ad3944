import pytest

from dloop.cli import UserError
from dloop.reporting.modelled import CostTable, read_cost_table
from dloop.results.atomic import write_json
from tests.reporting.tree import cost_table
from tests.results.fabricate import response

TABLE = CostTable(((1, 1.0), (4, 1.3), (8, 2.1)), first_stage=0.5, next_stage=0.25, env={})

OTHERWISE_FINE = {"model": "t", "host": "dflash", "draft_stage_seconds": {"first": 1, "next": 1}, "env": {}}


@pytest.mark.parametrize(("rows", "seconds"), [(1, 1.0), (2, 1.1), (4, 1.3), (6, 1.7), (8, 2.1), (10, 2.5), (3, 1.2)])
def test_rows_between_entries_are_interpolated_and_the_last_slope_goes_on(rows, seconds):
    assert TABLE.verify(rows) == pytest.approx(seconds)


def test_the_modelled_speedup_charges_every_round():
    records = [
        response(acceptance_lengths=[4, 2], extra_stages=[1, 0], verified_tokens=[8, 4]),
        response(acceptance_lengths=[3], extra_stages=[0], verified_tokens=[4]),
    ]
    seconds = (0.5 + 0.25 + 2.1) + (0.5 + 1.3) + (0.5 + 1.3)
    assert TABLE.speedup(records) == pytest.approx(9 * 1.0 / seconds)
    assert TABLE.speedup([]) is None


def test_rounds_beyond_the_table_are_counted():
    assert TABLE.beyond([response(verified_tokens=[9, 8])]) == 1


def test_a_cost_table_is_read_back(tmp_path):
    table = read_cost_table(cost_table(tmp_path / "c.json"))
    assert table.verify(1) == pytest.approx(4.0e-3)
    assert table.env["gpu"] == "CPU: Model 7"


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({}, "KeyError"),
        ([], "is not one"),
        (OTHERWISE_FINE | {"verify_seconds": {"1": 1}}, "at least one more"),
        (OTHERWISE_FINE | {"verify_seconds": {"2": 1, "4": 2}}, "for 1 row"),
        (OTHERWISE_FINE | {"verify_seconds": {"1": 0, "4": 2}}, "positive"),
    ],
)
def test_what_is_no_cost_table_is_refused(raw, sentence, tmp_path):
    write_json(tmp_path / "c.json", raw)
    with pytest.raises(UserError, match=sentence):
        read_cost_table(tmp_path / "c.json")


def test_a_missing_cost_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"c\.json cannot be read"):
        read_cost_table(tmp_path / "c.json")
