"""Writing rows as JSON lines: UTF-8, one LF a line, and a file that appears whole or not at all.

Knows nothing about what a row means; reading is in `conversations.py`, because there every line can be bad.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def dump_row(row: dict[str, Any]) -> bytes:
    """One row as a line, LF included."""
    return json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"


@contextmanager
def writing_whole(path: Path) -> Iterator[Callable[[bytes], Any]]:
    """Yield a function that appends bytes; the file gets its name when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(partial, "wb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
