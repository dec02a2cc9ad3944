"""Rows of a file by number: the index, its cache, and the same rows as a reader of lines sees."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.data.conversations import iter_lines
from dloop.data.row_index import RowFile, build_index

CASES = Path(__file__).parents[1] / "golden" / "cases"
BY_FILE = [
    pytest.param(path, json.loads(path.read_text("utf-8")), id=path.name.split("_")[0])
    for path in sorted(CASES.glob("*.expected.json"))
    if "rows" in json.loads(path.read_text("utf-8"))
]


def write(path, data):
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("source", sorted(CASES.glob("*.jsonl")), ids=lambda path: path.name.split("_")[0])
def test_rows_are_those_of_the_line_reader(source, tmp_path):
    rows = RowFile(source, tmp_path)
    lines = list(iter_lines(source))
    assert [rows[row] for row in range(len(rows))] == [raw for _, raw in lines]
    assert [rows.where(row) for row in range(len(rows))] == [f"{source}:{line + 1}" for line, _ in lines]


@pytest.mark.parametrize(("path", "expected"), BY_FILE)
def test_ids_of_file_level_cases(path, expected, tmp_path):
    rows = RowFile(path.with_name(path.name.replace(".expected.json", ".jsonl")), tmp_path)
    ids, bad = [], []
    for row in range(len(rows)):
        try:
            ids.append(json.loads(rows[row])["id"])
        except json.JSONDecodeError:
            bad.append(int(rows.where(row).rsplit(":", 1)[1]))
    assert ids == expected["ids"]
    assert len(ids) == expected["rows"]
    assert bad == [line["line"] for line in expected["bad_lines"]]


@given(
    st.lists(st.sampled_from([b"{}", b"", b"  ", b"\r", b"a\r", b"\xe2\x80\xa8", b"\xff"]), max_size=8), st.booleans()
)
def test_any_bytes(tmp_path_factory, lines, ends_with_newline):
    path = write(tmp_path_factory.mktemp("rows") / "f.jsonl", b"{}\n" + b"\n".join(lines) + b"\n" * ends_with_newline)
    rows = RowFile(path)
    assert [rows[row] for row in range(len(rows))] == [raw for _, raw in iter_lines(path)]


def test_index_is_int64_beside_the_file_and_built_once(tmp_path):
    path = write(tmp_path / "f.jsonl", b'{"a":1}\n\n{"b":2}\n')
    index = build_index(path)
    assert index.parent == tmp_path
    assert np.load(index).tolist() == [0, 9]
    assert np.load(index).dtype == np.int64
    os.utime(index, ns=(1, 1))
    assert build_index(path) == index
    assert index.stat().st_mtime_ns == 1
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, index.name])


def test_changed_file_gets_a_new_index(tmp_path):
    path = write(tmp_path / "f.jsonl", b"{}\n")
    first = build_index(path)
    write(path, b"{}\n{}\n")
    assert build_index(path) != first
    assert len(RowFile(path)) == 2


def test_same_size_but_other_time_is_another_file(tmp_path):
    path = write(tmp_path / "f.jsonl", b"{}\n{}\n")
    first = build_index(path)
    os.utime(path, ns=(5, 5))
    assert build_index(path) != first


def test_cache_folder_is_made_and_used(tmp_path):
    path = write(tmp_path / "f.jsonl", b"{}\n")
    index = build_index(path, tmp_path / "cache" / "rows")
    assert index.parent == tmp_path / "cache" / "rows"
    assert os.listdir(tmp_path / "cache" / "rows") == [index.name]


def test_pickled_rows_are_read_again(tmp_path):
    rows = RowFile(write(tmp_path / "f.jsonl", b'{"a":1}\n{"b":2}\n'))
    assert rows[1] == b'{"b":2}'
    assert pickle.loads(pickle.dumps(rows))[1] == b'{"b":2}'
    assert len(pickle.dumps(rows)) < 1000


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        build_index(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="JSON array"):
        build_index(write(tmp_path / "array.jsonl", b"[{}]\n"))
    with pytest.raises(UserError, match="holds no rows"):
        build_index(write(tmp_path / "blank.jsonl", b"\n  \n"))


def test_folder_that_cannot_be_written_is_named(tmp_path):
    path = write(tmp_path / "f.jsonl", b"{}\n")
    with pytest.raises(UserError, match="choose a folder"):
        build_index(path, write(tmp_path / "file", b""))
