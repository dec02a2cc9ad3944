"""The three files of a run (output, errors, skipped) and which input lines are done.

A line is done when a whole row with its number stands in one of the files; that is all a resumed run needs, in
whatever order the rows were written. Knows nothing about how answers are made.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from dloop.cli import UserError
from dloop.data.conversations import RowError, parse_row
from dloop.data.jsonl import dump_row, writing_whole
from dloop.regeneration.dialogue import STATUSES, Outcome, Status
from dloop.regeneration.selection import Selection
from dloop.regeneration.tally import Tally
from dloop.results.atomic import write_json

DONE = 2
"""Mark of a finished line beside `Selection.wanted`'s 0 and 1."""


def companion(output: Path, what: str) -> Path:
    """`<output without .jsonl>_<what>`."""
    return output.with_name(output.name.removesuffix(".jsonl") + f"_{what}")


def paths(output: Path) -> dict[Status, Path]:
    """The file of each status."""
    names = {status: companion(output, f"{status}.jsonl") for status in STATUSES}
    return names | {"success": output}


class Ledger:
    """Open files of a run; use it as a context manager around the work.

    `settings` are what decides the answers; they are kept beside the files and must be the same when a run is
    resumed. Raises `UserError` for files it may not touch: a non-empty output without `resume` or `overwrite`,
    other settings (with `resume` and `overwrite` together the run then begins anew), rows of other lines.
    """

    def __init__(
        self,
        output: Path,
        selection: Selection,
        settings: dict[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self.tally = Tally()
        self._selection = selection
        self._states = bytearray(selection.wanted)
        self._paths = paths(output)
        self._settings_file = companion(output, "run.json")
        output.parent.mkdir(parents=True, exist_ok=True)
        if self._continues(output, settings, resume, overwrite):
            self._recover()
        else:
            self._begin()
        write_json(self._settings_file, settings)

    def _continues(self, output: Path, settings: dict[str, Any], resume: bool, overwrite: bool) -> bool:
        """Whether what lies there is to be kept."""
        if not resume:
            if output.exists() and output.stat().st_size and not overwrite:
                raise UserError(f"{output} is not empty: --resume goes on with it, --overwrite begins anew")
            return False
        changed = self._changed(settings)
        if changed and not overwrite:
            raise UserError(
                f"{output} was begun with other settings ({'; '.join(changed)}), and answers of two kinds must not "
                "be mixed: use the same settings, or --overwrite to begin anew"
            )
        return not changed

    def _changed(self, settings: dict[str, Any]) -> list[str]:
        """What differs from the settings stored beside the files; nothing where none are stored."""
        if not self._settings_file.exists():
            return []
        stored = json.loads(self._settings_file.read_text("utf-8"))
        names = sorted(stored.keys() | settings.keys())
        return [
            f"{name} {stored.get(name)!r}, now {settings.get(name)!r}"
            for name in names
            if stored.get(name) != settings.get(name)
        ]

    def _begin(self) -> None:
        for path in self._paths.values():
            path.write_bytes(b"")

    def _recover(self) -> None:
        """Keep the whole rows of the output and skipped files, drop what a killed run tore; errors are retried."""
        numbers = _LineNumbers(self._selection)
        for status in ("success", "skipped"):
            path = self._paths[status]
            with writing_whole(path) as append:
                for row in _whole_rows(path):
                    line = numbers.of(row, path)
                    if self._states[line] == DONE or (status == "success" and not _answered(row)):
                        continue
                    self._states[line] = DONE
                    row["line"] = line
                    self.tally.add(status, row)
                    append(dump_row(row))
        self._paths["error"].write_bytes(b"")

    def __enter__(self) -> "Ledger":
        self._stack = ExitStack()
        # Without a buffer a row that was written survives the end of the process, however it comes.
        self._files: dict[Status, IO[bytes]] = {
            status: self._stack.enter_context(path.open("ab", buffering=0)) for status, path in self._paths.items()
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def is_done(self, line: int) -> bool:
        """Whether the line has a row in one of the files."""
        return self._states[line] == DONE

    def write(self, outcomes: Iterable[Outcome]) -> int:
        """Append outcomes, those of one file in one write, and return how many; finished lines are left alone."""
        fresh = [outcome for outcome in outcomes if not self.is_done(outcome.line)]
        for status, file in self._files.items():
            rows = b"".join(dump_row(outcome.row) for outcome in fresh if outcome.status == status)
            _write_all(file, rows)
        for outcome in fresh:
            self._states[outcome.line] = DONE
            self.tally.add(outcome.status, outcome.row)
        return len(fresh)


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _answered(row: dict[str, Any]) -> bool:
    """Other programs also count a conversation with blank answers as a success."""
    answers = [turn["content"] for turn in row["conversations"] if turn["role"] == "assistant"]
    return bool(answers) and all(isinstance(text, str) and text.strip() for text in answers)


def _whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an output file without a torn last line. Raises `UserError` if a row before it is broken."""
    if not path.exists():
        return
    broken = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            if broken:
                raise UserError(f"{path}, line {broken} is no row of this program: repair it, or use --overwrite")
            try:
                row = parse_row(raw)
            except RowError:
                broken = number
                continue
            if raw.endswith(b"\n"):
                yield row


class _LineNumbers:
    """Input lines of output rows: by `line`, or by `id` in files of other programs, which do not write `line`."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._by_id: dict[str, int] | None = None

    def of(self, row: dict[str, Any], path: Path) -> int:
        line = row["line"] if "line" in row else self._ids().get(json.dumps(row.get("id")))
        wanted = self._selection.wanted
        if not isinstance(line, int) or not 0 <= line < len(wanted) or not wanted[line]:
            raise UserError(
                f"{path} holds a row (line {line}, id {row.get('id')!r}) that is not among the rows asked for: "
                "use the same input, --shard and --num-samples, or another output file"
            )
        return line

    def _ids(self) -> dict[str, int]:
        if self._by_id is None:
            self._by_id = {}
            for line, raw in self._selection.lines():
                identifier = _identifier(raw)
                if identifier is None or identifier in self._by_id:
                    raise UserError(
                        f"the rows to resume have no `line`, and the ids of {self._selection.path} cannot replace it "
                        f"(line {line + 1} has none, or one that occurs twice): begin anew with --overwrite"
                    )
                self._by_id[identifier] = line
        return self._by_id


def _identifier(raw: bytes) -> str | None:
    try:
        identifier = parse_row(raw).get("id")
    except RowError:
        return None
    return None if identifier is None else json.dumps(identifier)
