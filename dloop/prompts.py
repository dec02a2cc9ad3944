"""Stage 1: prompts. A public data set or a local file becomes a JSONL of conversations to be answered.

Takes rows in the ShareGPT form (`from`/`value`) or the OpenAI form (`role`/`content`), keeps user and
assistant turns, and drops rows without a question. It knows no model: the assistant turns it keeps are
replaced by `dloop.regenerate`.

    python -m dloop.prompts --dataset perfectblend --output results/prompts/perfectblend.jsonl
    python -m dloop.prompts --data-path mine.jsonl --output results/prompts/mine.jsonl
"""

import json
import math
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dloop.cli import UserError, parse, run
from dloop.data.conversations import BOM, RowError, parse_row, text_of
from dloop.data.jsonl import dump_row, writing_whole

HUB_IDS = {"perfectblend": "mlabonne/open-perfectblend", "sharegpt": "Aeala/ShareGPT_Vicuna_unfiltered"}

SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
}
"""Speakers whose turns are kept (those of sgl-project/SpecForge:scripts/prepare_data.py, and the roles)."""

EVAL_SHARE, EVAL_SEED = 0.05, 42


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write the prompts of a data set as conversations, one JSON object a line."""

    dataset: Literal["perfectblend", "sharegpt"] | None = None
    """Data set on the hub; with --data-path only the name of the output file."""
    data_path: Path | None = None
    """Local file with `conversations` rows (JSON lines, or one JSON array) instead of the hub."""
    revision: str | None = None
    """Revision of the hub data set (default: its newest)."""
    output_path: Path = Path("cache/dataset")
    """Folder of <dataset>_train.jsonl (and _test.jsonl)."""
    output: Path | None = None
    """The output file itself, instead of a folder."""
    sample_size: int | None = None
    """Only the first N source rows."""
    split_eval: bool = False
    """Put a random 5 % of the rows into <dataset>_test.jsonl (seed 42)."""
    overwrite: bool = False
    """Replace an existing output file."""


@dataclass(frozen=True)
class Prepared:
    """One source row after conversion: the row to write, or None and the reason; how many messages it lost."""

    row: dict[str, Any] | None
    reason: str | None = None
    skipped_messages: int = 0


def prepare(source: dict[str, Any], number: int, *, own_id: bool) -> Prepared:
    """Convert one source row; its id is `number`, or with `own_id` the row's own id if it has one.

    Messages of other speakers (system, tool, ...) are left out and counted.
    """
    conversation = source.get("conversations")
    if not isinstance(conversation, list):
        return Prepared(None, "missing_conversations")
    try:
        messages = [_message(message) for message in conversation]
    except RowError as error:
        return Prepared(None, error.reason)
    kept = [message for message in messages if message is not None]
    skipped = len(messages) - len(kept)
    if not any(message["role"] == "user" for message in kept):
        return Prepared(None, "no_user", skipped)
    identifier = source.get("id") if own_id else None
    return Prepared({"id": str(number if identifier is None else identifier), "conversations": kept}, None, skipped)


def _message(source: Any) -> dict[str, str] | None:
    if not isinstance(source, dict):
        raise RowError("bad_message")
    role = SPEAKERS.get(str(source.get("from") or source.get("role")))
    return {"role": role, "content": text_of(source)} if role else None


class LocalRows(Sequence[dict[str, Any]]):
    """Rows of a local JSONL file by number, read when they are asked for; a bad one raises `RowError`."""

    def __init__(self, path: Path, index_folder: str) -> None:
        from dloop.data.row_index import RowFile

        self._lines = RowFile(path, index_folder)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: Any) -> Any:
        return parse_row(self._lines[number])


def local_rows(path: Path, index_folder: str) -> Sequence[Any]:
    """Rows of a JSONL file, or of one JSON array. Raises `UserError` for a file without rows."""
    if not path.is_file():
        raise UserError(f"there is no file {path}: give --data-path a JSONL file with one conversation a line")
    with open(path, "rb") as file:
        if not file.read(4096).removeprefix(BOM).lstrip().startswith(b"["):
            return LocalRows(path, index_folder)
    try:
        return json.loads(path.read_text("utf-8-sig"))
    except ValueError as error:
        raise UserError(
            f"{path} starts like a JSON array, but is none ({error}): repair it or write JSON lines"
        ) from None


def split(count: int) -> tuple[list[int], list[int]]:
    """Row numbers of training and test part, in the order of `datasets`' train_test_split(0.05, seed=42)."""
    import numpy

    order = numpy.random.default_rng(EVAL_SEED).permutation(count).tolist()
    tests = math.ceil(EVAL_SHARE * count)
    return order[tests:], order[:tests]


def write(path: Path, rows: Sequence[Any], numbers: Sequence[int], *, own_id: bool) -> Counter[str]:
    """Convert the rows `numbers`, in that order, into `path`; returns the rows kept and what was left out."""
    from tqdm import tqdm

    counts: Counter[str] = Counter()
    with writing_whole(path) as append:
        for number in tqdm(numbers, desc=path.name, unit="row"):
            prepared = _prepare_at(rows, number, own_id=own_id)
            counts["messages"] += prepared.skipped_messages
            if prepared.row is None:
                counts[str(prepared.reason)] += 1
            else:
                counts["rows"] += 1
                append(dump_row(prepared.row))
        if not counts["rows"]:
            raise UserError(f"no row can be used ({_spell(counts)}): prompts need `conversations` with a user turn")
    return counts


def _prepare_at(rows: Sequence[Any], number: int, *, own_id: bool) -> Prepared:
    try:
        source = rows[number]
    except RowError as error:
        return Prepared(None, error.reason)
    return prepare(source, number, own_id=own_id) if isinstance(source, dict) else Prepared(None, "not_object")


def _spell(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count and name != "rows")


def _destination(options: Options) -> Path:
    """The training file; raises `UserError` for options that contradict each other."""
    if options.dataset is None and options.data_path is None:
        raise UserError("nothing to read: give --dataset perfectblend, or --data-path FILE")
    if options.sample_size is not None and options.sample_size <= 0:
        raise UserError(f"--sample-size is {options.sample_size}, but must be at least 1")
    if options.output is None:
        return options.output_path / f"{options.dataset or Path(str(options.data_path)).stem}_train.jsonl"
    if options.split_eval:
        raise UserError("--split-eval writes two files, but --output names one: use --output-path FOLDER")
    return options.output


def _test_file(training: Path) -> Path:
    return training.with_name(training.name.removesuffix("_train.jsonl") + "_test.jsonl")


def _source(options: Options, index_folder: str) -> tuple[Sequence[Any], str]:
    """The source rows and the words that name them."""
    from dloop.data.hub import load_hub_rows

    if options.data_path is not None:
        return local_rows(options.data_path, index_folder), str(options.data_path)
    hub_id = HUB_IDS[str(options.dataset)]
    rows, revision = load_hub_rows(hub_id, split="train", revision=options.revision)
    return rows, f"{hub_id}, revision {revision or 'unknown'}"


def prepare_file(options: Options) -> None:
    """Write the files the options ask for, unless they are there already."""
    destination = _destination(options)
    if destination.exists() and not options.overwrite:
        print(f"{destination} exists, nothing to do (--overwrite makes it again)")
        return
    with tempfile.TemporaryDirectory() as index_folder:
        rows, name = _source(options, index_folder)
        count = min(len(rows), options.sample_size or len(rows))
        parts: list[tuple[Path, Sequence[int]]] = [(destination, range(count))]
        if options.split_eval:
            training, test = split(count)
            # The training file comes last, because it is the one looked for above.
            parts = [(_test_file(destination), test), (destination, training)]
        # Without an id of its own a row is known by its number, as the rows of the hub always are.
        own_id = options.data_path is not None or options.dataset == "sharegpt"
        for path, numbers in parts:
            counts = write(path, rows, numbers, own_id=own_id)
            print(f"{path}: {counts['rows']} of {len(numbers)} rows of {name}; left out: {_spell(counts) or 'nothing'}")


def main() -> None:
    """Command line."""
    prepare_file(parse(Options))


if __name__ == "__main__":
    run(main)
