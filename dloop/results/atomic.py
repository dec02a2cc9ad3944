"""Files and folders that appear whole or not at all.

Everything is written beside its destination under a temporary name, forced to the disk and renamed, so that a
killed process leaves the old content or the new one. Knows nothing of what it writes. Temporary names start
with a dot and end in `.tmp`; those of a killed process may be deleted at any time.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file `path` by `text` (UTF-8, line ends as given); parent folders are made."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Replace the file `path` by `value` as indented JSON; ValueError for numbers that JSON cannot hold."""
    write_text(path, json.dumps(value, ensure_ascii=False, allow_nan=False, indent=1) + "\n")


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Replace the file `path` by `content`; parent folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder to fill; at the end it is forced to the disk and becomes `path`.

    An existing folder `path` is replaced (renamed away first: between two renames `path` may be missing, but
    it is never half written). When the block raises, `path` stays as it was and what was written is deleted.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"))
    try:
        fresh.chmod(0o777 & ~_umask())
        yield fresh
        _sync_tree(fresh)
        _rename_over(fresh, target)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    _sync_folder(target.parent)


def _rename_over(fresh: Path, target: Path) -> None:
    if not target.exists():
        fresh.rename(target)
        return
    # rename(2) cannot put a folder in the place of one that holds files.
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old.", suffix=".tmp"))
    os.replace(target, old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            _sync_folder(path)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    # There is no call that only reads it.
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
