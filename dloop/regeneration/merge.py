"""Joining the files of shards into one run, sorted by input line.

Which server or shard answered first must not decide the order of the training data. Rows stay on disk: only their
places are held (a few numbers a row). Knows nothing of how rows were made.
"""

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from dloop.cli import UserError
from dloop.data.conversations import RowError, parse_row
from dloop.data.jsonl import writing_whole
from dloop.regeneration.dialogue import Status
from dloop.regeneration.ledger import paths
from dloop.regeneration.selection import Selection
from dloop.regeneration.tally import Tally


class _Places:
    """Where the rows of one status stand: line, file and byte offset of each."""

    def __init__(self) -> None:
        self.lines, self.files, self.offsets = array("q"), array("q"), array("q")

    def add(self, line: int, file: int, offset: int) -> None:
        self.lines.append(line)
        self.files.append(file)
        self.offsets.append(offset)

    def in_order(self) -> list[int]:
        return sorted(range(len(self.lines)), key=self.lines.__getitem__)


def merge(shards: Sequence[Path], output: Path, selection: Selection | None) -> Tally:
    """Write `output` and its error and skipped files from those of `shards`; returns the accounting.

    Raises `UserError` if a shard is missing or torn, if a line occurs twice, and, where the input (`selection`) is
    given, if one of its lines occurs nowhere or a row belongs to none of them.
    """
    tally, seen = Tally(), bytearray()
    found = [
        (path, parts := [paths(shard)[status] for shard in shards], _places(parts, status, seen, tally))
        for status, path in paths(output).items()
    ]
    if selection is not None:
        _compare(seen, selection)
    for path, parts, places in found:
        _write_in_order(path, parts, places)
    return tally


def _places(parts: Sequence[Path], status: Status, seen: bytearray, tally: Tally) -> _Places:
    places = _Places()
    for number, part in enumerate(parts):
        if status == "success" and not part.exists():
            raise UserError(f"there is no shard {part}: regenerate it before merging")
        if not part.exists():
            continue
        with open(part, "rb") as file:
            offset = 0
            for raw in tqdm(file, desc=part.name, unit="row", disable=None):
                line = _take(raw, part, status, seen, tally)
                places.add(line, number, offset)
                offset += len(raw)
    return places


def _take(raw: bytes, part: Path, status: Status, seen: bytearray, tally: Tally) -> int:
    """Count one row and mark its line as seen."""
    try:
        row = parse_row(raw)
        line = row["line"]
    except (RowError, KeyError):
        line = None
    if not isinstance(line, int) or line < 0 or not raw.endswith(b"\n"):
        raise UserError(f"{part} holds a row that is torn or has no `line`: run its shard again with --resume")
    seen.extend(bytes(max(0, line + 1 - len(seen))))
    if seen[line]:
        raise UserError(f"line {line} of the input stands twice in the shards (again in {part}): merge each shard once")
    seen[line] = 1
    tally.add(status, row)
    return line


def _compare(seen: bytearray, selection: Selection) -> None:
    wanted = selection.wanted
    length = max(len(seen), len(wanted))
    for line, (found, asked) in enumerate(zip(seen.ljust(length, b"\0"), wanted.ljust(length, b"\0"), strict=True)):
        if asked and not found:
            raise UserError(f"line {line} of {selection.path} stands in no shard: run its shard again with --resume")
        if found and not asked:
            raise UserError(f"the shards hold line {line}, which is no row of {selection.path}: give their own input")


def _write_in_order(path: Path, parts: Sequence[Path], places: _Places) -> None:
    with ExitStack() as stack:
        append = stack.enter_context(writing_whole(path))
        files = {}
        for number in set(places.files):
            files[number] = stack.enter_context(open(parts[number], "rb"))
        for place in tqdm(places.in_order(), desc=path.name, unit="row", disable=None):
            file = files[places.files[place]]
            file.seek(places.offsets[place])
            append(file.readline())
