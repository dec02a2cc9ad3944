"""Which lines of the input are asked for: a shard of them, or the first few.

One scan counts the rows and takes their digest, so that a resumed run can tell that it reads the same file; the
text itself is streamed again later and never held. Knows nothing about what a row means.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from dloop.cli import UserError
from dloop.data.conversations import iter_lines, refuse_json_array


@dataclass(frozen=True)
class Selection:
    """Lines of the file `path`: `wanted[line]` is 1 for the `count` lines asked for. `digest` is of all rows."""

    path: Path
    wanted: bytearray
    count: int
    digest: str

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """(line number, bytes) of the wanted lines, in the order of the file."""
        for line, raw in iter_lines(self.path):
            if line >= len(self.wanted):
                return
            if self.wanted[line]:
                yield line, raw


def select(path: Path, shard: str | None = None, num_samples: int | None = None) -> Selection:
    """Scan `path`: the first `num_samples` rows, of these the lines of `shard`.

    Raises `UserError` for a missing file, a JSON array, a file without rows and a shard that cannot be.
    """
    if not path.is_file():
        raise UserError(f"there is no file {path}: give --input-file-path the output of `python -m dloop.prompts`")
    refuse_json_array(path)
    index, shards = parse_shard(shard)
    digest, wanted, count = hashlib.sha256(), bytearray(), 0
    # The digest is of the whole file: a longer --num-samples may continue a shorter run.
    rows = iter_lines(path)
    for line, raw in islice(rows, num_samples):
        digest.update(raw + b"\n")
        wanted.extend(bytes(line + 1 - len(wanted)))
        if line % shards == index:
            wanted[line] = 1
            count += 1
    for _, raw in rows:
        digest.update(raw + b"\n")
    if not wanted:
        raise UserError(f"{path} holds no rows: nothing can be answered")
    return Selection(path, wanted, count, digest.hexdigest())


def parse_shard(shard: str | None) -> tuple[int, int]:
    """`i-of-n` as (i - 1, n); (0, 1) for None."""
    match = re.fullmatch(r"(\d+)-of-(\d+)", shard or "1-of-1")
    index, shards = (int(match[1]) - 1, int(match[2])) if match else (0, 0)
    if not 0 <= index < shards:
        raise UserError(f"--shard is {shard!r}, but a shard is written i-of-n with 1 <= i <= n, such as 2-of-8")
    return index, shards
