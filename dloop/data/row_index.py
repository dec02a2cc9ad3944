"""Where each row of a large JSONL file starts, so that one row can be read without the others.

The index is one int64 a row, built in one scan, stored beside the file (or in a cache folder) and
memory-mapped; it is found again by the file's path, size and time, so a changed file gets a new one. It
knows nothing about what a row holds. Local rank 0 calls `build_index` while the other ranks of its node
wait at a barrier.
"""

from __future__ import annotations

import hashlib
import json
import os
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from dloop.cli import UserError
from dloop.data.conversations import BOM, clean_line, refuse_json_array
from dloop.results.atomic import write_bytes

FORMAT_VERSION = 1
_LINES_A_REPORT = 10_000
_CHUNK = 1 << 24


def build_index(path: str | Path, cache_dir: str | Path | None = None) -> Path:
    """The index file of a JSONL file: byte offsets of its rows, int64; built unless it is there already.

    `cache_dir` is where indexes are kept (default: the file's own folder). Raises `UserError` for a file
    that is missing, is a JSON array, has no rows or changes during the scan, and for a folder that cannot
    be written.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"there is no file {path}: name a JSONL file with one conversation a line")
    index = _index_path(path, cache_dir)
    if index.exists():
        return index
    refuse_json_array(path)
    offsets = _scan(path)
    if not len(offsets):
        raise UserError(f"{path} holds no rows: name a JSONL file with one conversation a line")
    if _index_path(path, cache_dir) != index:
        raise UserError(f"{path} changed while it was read: wait until it is written, then start again")
    _save(index, offsets)
    return index


def _index_path(path: Path, cache_dir: str | Path | None) -> Path:
    stat = path.stat()
    key = json.dumps([os.path.abspath(path), stat.st_size, stat.st_mtime_ns, FORMAT_VERSION])
    folder = path.parent if cache_dir is None else Path(cache_dir)
    return folder / f"{path.name}.{hashlib.sha256(key.encode()).hexdigest()[:16]}.rows.npy"


def _scan(path: Path) -> np.ndarray:
    """Offsets of the lines that are rows; a byte-order mark is not part of the first one."""
    offsets, position = [], 0
    progress = tqdm(total=path.stat().st_size, unit="B", unit_scale=True, desc=f"index {path.name}", delay=2)
    with open(path, "rb") as file, progress:
        for number, raw in enumerate(file):
            mark = len(BOM) if number == 0 and raw.startswith(BOM) else 0
            if clean_line(raw[mark:]):
                offsets.append(position + mark)
            position += len(raw)
            if number % _LINES_A_REPORT == 0:
                progress.update(position - progress.n)
    return np.asarray(offsets, dtype=np.int64)


def _save(index: Path, offsets: np.ndarray) -> None:
    content = BytesIO()
    np.save(content, offsets)
    try:
        write_bytes(index, content.getvalue())
    except OSError as error:
        raise UserError(
            f"the row index {index} cannot be written ({error.strerror}): "
            "choose a folder that can be written as the cache folder"
        ) from error


class RowFile:
    """Rows of a JSONL file by number, as bytes; picklable, opened on first use, safe in forked workers."""

    def __init__(self, path: str | Path, cache_dir: str | Path | None = None) -> None:
        """Raises `UserError` as `build_index` does."""
        self.path = Path(path)
        self._index = build_index(path, cache_dir)
        self._opened: tuple[FileIO, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    def _open(self) -> tuple[FileIO, np.ndarray]:
        if self._opened is None:
            self._opened = FileIO(self.path), np.load(self._index, mmap_mode="r")
        return self._opened

    def __len__(self) -> int:
        return len(self._open()[1])

    def __getitem__(self, row: int) -> bytes:
        """Row `row`, counted from 0, without its line end."""
        file, offsets = self._open()
        start = int(offsets[row])
        stop = int(offsets[row + 1]) if row + 1 < len(offsets) else os.fstat(file.fileno()).st_size
        # pread has no file position that forked workers could move under each other.
        return clean_line(os.pread(file.fileno(), stop - start, start).split(b"\n", 1)[0])

    def where(self, row: int) -> str:
        """`FILE:LINE` of row `row`, lines counted from 1. Reads the file up to there: for messages only."""
        file, offsets = self._open()
        position, line, target = 0, 1, int(offsets[row])
        while position < target:
            chunk = os.pread(file.fileno(), min(_CHUNK, target - position), position)
            line += chunk.count(b"\n")
            position += len(chunk)
        return f"{self.path}:{line}"
