"""Joining shards: sorted by line, nothing lost, nothing doubled."""

import json
import random

import pytest

from dloop.cli import UserError
from dloop.data.jsonl import dump_row
from dloop.regeneration.ledger import paths
from dloop.regeneration.merge import merge
from dloop.regeneration.selection import select


@pytest.fixture
def shards(tmp_path):
    """Three shards of ten lines, each in random order; line 4 an error, line 8 skipped."""
    (tmp_path / "in.jsonl").write_bytes(b"".join(b'{"n": %d}\n' % n for n in range(10)))
    files = [tmp_path / f"{i + 1}-of-3.jsonl" for i in range(3)]
    order = random.Random(0)
    for index, file in enumerate(files):
        lines = list(range(index, 10, 3))
        order.shuffle(lines)
        for line in lines:
            status = {4: "error", 8: "skipped"}.get(line, "success")
            row = {"conversations": [{"role": "assistant", "content": "é" * line}], "status": status, "line": line}
            with open(paths(file)[status], "ab") as out:
                out.write(dump_row(row))
    return files


def lines_of(path):
    return [json.loads(line)["line"] for line in path.read_bytes().splitlines()]


def test_rows_are_sorted_by_line_and_counted(shards, tmp_path):
    output = tmp_path / "all.jsonl"
    tally = merge(shards, output, select(tmp_path / "in.jsonl"))
    assert lines_of(output) == [0, 1, 2, 3, 5, 6, 7, 9]
    assert lines_of(paths(output)["error"]) == [4]
    assert lines_of(paths(output)["skipped"]) == [8]
    assert dict(tally.rows) == {"success": 8, "error": 1, "skipped": 1}
    together = b"".join(shard.read_bytes() for shard in shards)
    assert sorted(output.read_bytes().splitlines()) == sorted(together.splitlines())
    reverse = tmp_path / "reverse.jsonl"
    merge(shards[::-1], reverse, None)
    assert reverse.read_bytes() == output.read_bytes()


def test_a_missing_line_a_foreign_line_and_a_double_line_are_named(shards, tmp_path):
    output = tmp_path / "all.jsonl"
    with pytest.raises(UserError, match=r"line 1 of .* stands in no shard"):
        merge([shards[0], shards[2]], output, select(tmp_path / "in.jsonl"))
    with pytest.raises(UserError, match="hold line 9"):
        merge(shards, output, select(tmp_path / "in.jsonl", num_samples=9))
    with pytest.raises(UserError, match="stands twice"):
        merge([*shards, shards[0]], output, None)
    assert not output.exists()


def test_torn_and_missing_shards_are_refused(shards, tmp_path):
    with pytest.raises(UserError, match="no shard"):
        merge([*shards, tmp_path / "absent.jsonl"], tmp_path / "all.jsonl", None)
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(UserError, match="torn"):
        merge(shards, tmp_path / "all.jsonl", None)
