"""Which lines of the input are asked for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.regeneration.selection import parse_shard, select


@settings(deadline=None, max_examples=40)
@given(st.lists(st.booleans(), min_size=1).filter(any), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 20)))
def test_shards_share_the_first_rows_without_overlap(tmp_path_factory, filled, shards, num_samples):
    """`filled` says which lines hold a row; the others are blank and counted."""
    path = tmp_path_factory.mktemp("selection") / "in.jsonl"
    path.write_bytes(b"".join(b'{"n": %d}\r\n' % n if full else b"  \n" for n, full in enumerate(filled)))
    parts = [select(path, f"{i + 1}-of-{shards}", num_samples) for i in range(shards)]
    found = [line for part in parts for line, _ in part.lines()]
    assert sorted(found) == [n for n, full in enumerate(filled) if full][:num_samples]
    for index, part in enumerate(parts):
        lines = list(part.lines())
        assert part.count == len(lines)
        assert all(line % shards == index and raw == b'{"n": %d}' % line for line, raw in lines)
    assert len({part.digest for part in parts}) == 1


def test_another_text_has_another_digest(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    digest = select(path, num_samples=1).digest
    path.write_bytes(b'{"a": 1}\n{"a": 3}\n')
    assert select(path, num_samples=1).digest != digest


@pytest.mark.parametrize("shard", ["0-of-2", "3-of-2", "1-of-0", "1of2", "1-of-2 ", "-1-of-2"])
def test_shards_that_cannot_be(shard):
    with pytest.raises(UserError, match="i-of-n"):
        parse_shard(shard)


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        select(tmp_path / "absent")
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n \n")
    with pytest.raises(UserError, match="no rows"):
        select(path)
    path.write_bytes(b'[{"conversations": []}]')
    with pytest.raises(UserError, match="JSON array"):
        select(path)
