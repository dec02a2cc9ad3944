"""Bookkeeping: what counts as done, what a resumed run keeps, and what it refuses."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.data.jsonl import dump_row
from dloop.regeneration.dialogue import Outcome
from dloop.regeneration.ledger import Ledger, paths
from dloop.regeneration.selection import select

SETTINGS = {"model": "m", "temperature": 0.7}


def outcome(line, status="success"):
    answer = {"role": "assistant", "content": f"answer {line}"}
    row = {"id": str(line), "conversations": [answer], "status": status, "line": line}
    return Outcome(line, status, row if status == "success" else row | {"error": "why"})


def rows(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture
def selection(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(dump_row({"id": str(n), "conversations": []}) for n in range(6)))
    return select(path)


@pytest.fixture
def output(tmp_path):
    return tmp_path / "a.jsonl.d" / "out.jsonl"


def write(output, selection, outcomes, **options):
    with Ledger(output, selection, SETTINGS, **options) as ledger:
        ledger.write(outcomes)
    return ledger


def test_the_three_files_are_named_after_the_output(output, tmp_path):
    assert [path.name for path in paths(output).values()] == ["out.jsonl", "out_error.jsonl", "out_skipped.jsonl"]
    assert len(set(paths(tmp_path / "no_suffix").values())) == 3


def test_rows_go_to_the_file_of_their_status_and_are_counted(output, selection):
    ledger = write(output, selection, [outcome(2), outcome(0, "skipped"), outcome(1, "error"), outcome(3)])
    assert {status: [row["line"] for row in rows(path)] for status, path in paths(output).items()} == {
        "success": [2, 3],
        "error": [1],
        "skipped": [0],
    }
    assert dict(ledger.tally.rows) == {"success": 2, "error": 1, "skipped": 1}
    with pytest.raises(UserError, match="6 rows were asked for, but 4"):
        ledger.tally.check(selection.count)


def test_a_finished_line_is_not_written_again(output, selection):
    write(output, selection, [outcome(1), outcome(0, "skipped")])
    with Ledger(output, selection, SETTINGS, resume=True) as ledger:
        assert ledger.write([outcome(0), outcome(1), outcome(2)]) == 1
    assert [row["line"] for row in rows(output)] == [1, 2]
    assert ledger.tally.rows.total() == 3


def test_errors_are_retried_and_everything_else_kept(output, selection):
    write(output, selection, [outcome(1), outcome(2, "error"), outcome(3, "skipped")])
    ledger = Ledger(output, selection, SETTINGS, resume=True)
    assert [ledger.is_done(line) for line in range(6)] == [False, True, False, True, False, False]
    assert rows(paths(output)["error"]) == []


@pytest.mark.parametrize(
    "torn", [b'{"line": 4, "conv', b'{"line": 4, "conversations": []}', b"\x00\x00\n", b'{"a": "\xc3']
)
def test_a_torn_last_line_is_cut_off(output, selection, torn):
    write(output, selection, [outcome(1), outcome(2)])
    whole = output.read_bytes()
    output.write_bytes(whole + torn)
    ledger = write(output, selection, [outcome(4)], resume=True)
    assert output.read_bytes() == whole + dump_row(outcome(4).row)
    assert ledger.tally.rows["success"] == 3


def test_a_broken_row_in_the_middle_is_refused(output, selection):
    write(output, selection, [outcome(1)])
    output.write_bytes(b'{"line": 4, "conv\n' + output.read_bytes())
    with pytest.raises(UserError, match="line 1 is no row"):
        Ledger(output, selection, SETTINGS, resume=True)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_a_run_killed_at_any_byte_resumes_to_the_same_rows(tmp_path_factory, data):
    """Rows of one file are appended in order, so a killed run leaves a prefix of each file."""
    folder = tmp_path_factory.mktemp("killed")
    (folder / "in.jsonl").write_bytes(b"".join(dump_row({"id": n}) for n in range(6)))
    selection, output = select(folder / "in.jsonl"), folder / "out.jsonl"
    statuses = data.draw(st.lists(st.sampled_from(["success", "error", "skipped"]), min_size=6, max_size=6))
    outcomes = [outcome(line, status) for line, status in enumerate(statuses)]
    write(output, selection, outcomes)
    wanted = {path: sorted(path.read_bytes().splitlines()) for path in paths(output).values()}
    for path in wanted:
        path.write_bytes(path.read_bytes()[: data.draw(st.integers(0, path.stat().st_size))])
    ledger = write(output, selection, outcomes, resume=True)
    assert {path: sorted(path.read_bytes().splitlines()) for path in wanted} == wanted
    ledger.tally.check(6)


def test_an_existing_output_is_only_touched_when_told_so(output, selection):
    write(output, selection, [outcome(1), outcome(2, "skipped")])
    with pytest.raises(UserError, match="--resume goes on"):
        Ledger(output, selection, SETTINGS)
    write(output, selection, [outcome(5)], overwrite=True)
    assert [row["line"] for row in rows(output)] == [5]
    assert rows(paths(output)["skipped"]) == []


def test_other_settings_are_refused_or_begin_anew(output, selection):
    write(output, selection, [outcome(1)])
    with pytest.raises(UserError, match=r"temperature 0\.7, now 1\.0"):
        Ledger(output, selection, SETTINGS | {"temperature": 1.0}, resume=True)
    Ledger(output, selection, SETTINGS, resume=True, overwrite=True)
    assert [row["line"] for row in rows(output)] == [1]
    Ledger(output, selection, SETTINGS | {"temperature": 1.0}, resume=True, overwrite=True)
    assert rows(output) == []


def test_rows_of_other_lines_are_refused(output, selection):
    write(output, selection, [outcome(5)])
    smaller = select(selection.path, num_samples=5)
    with pytest.raises(UserError, match="line 5"):
        Ledger(output, smaller, SETTINGS, resume=True)


def legacy(output, *outcomes):
    """An output as other programs write it: no line numbers, no settings beside it."""
    output.parent.mkdir()
    for each in outcomes:
        row = {key: value for key, value in each.row.items() if key != "line"}
        with open(paths(output)[each.status], "ab") as file:
            file.write(dump_row(row))


def test_rows_without_a_line_are_matched_by_id_and_repaired(output, selection):
    blank = outcome(4)
    blank.row["conversations"][0]["content"] = None
    legacy(output, outcome(3), outcome(1), outcome(3), blank, outcome(2, "error"))
    ledger = Ledger(output, selection, SETTINGS, resume=True)
    assert [line for line in range(6) if ledger.is_done(line)] == [1, 3]
    assert [row["line"] for row in rows(output)] == [3, 1]


@pytest.mark.parametrize("ids", [["0", "0"], ["0", None]])
def test_without_usable_ids_such_rows_cannot_be_resumed(output, tmp_path, ids):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(dump_row({"id": identifier}) for identifier in ids))
    legacy(output, outcome(0))
    with pytest.raises(UserError, match="ids of"):
        Ledger(output, select(path), SETTINGS, resume=True)


def test_resuming_nothing_begins(output, selection):
    ledger = write(output, selection, [outcome(0)], resume=True)
    assert ledger.tally.rows.total() == 1
