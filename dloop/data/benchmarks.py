"""The eight benchmarks: where they come from, how a row becomes a prompt, which rows are evaluated.

Prompts and selection follow liranringel/ddtree:benchmark.py and deepseek-ai/DeepSpec:eval_datasets; a JSONL
file of one's own can stand in for any of them. It knows no tokenizer and no model. Used by `python -m
dloop.benchmark --dataset NAME_OR_FILE`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dloop.cli import UserError
from dloop.data.conversations import RowError, iter_lines, parse_row, refuse_json_array
from dloop.data.hub import load_hub_rows

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

SELECTION_SEED = 0
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_WRITE_SOLUTION = "Write a solution to the following problem and make sure that it passes the tests:"
_EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will "
    "generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program"
)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _humaneval(row: Row) -> list[str]:
    return [f"{_WRITE_SOLUTION}\n{_fenced(row['prompt'])}"]


def _livecodebench(row: Row) -> list[str]:
    starter = row["starter_code"]
    if starter:
        form = f"### Format: Use the following code structure:\n{_fenced(starter)}"
    else:
        form = f"### Format: Write your code in the following format:\n{_fenced('# YOUR CODE HERE')}"
    question = f"### Question:\n{row['question_content']}"
    return ["\n\n".join([_EXPERT, question, form, "### Answer: (use the provided format with backticks)"])]


def _alpaca(row: Row) -> list[str]:
    given = row["input"]
    return [f"{row['instruction']}\n\nInput:\n{given}" if given else row["instruction"]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One benchmark on the hub."""

    hub_id: str
    config: str | None = None
    split: str
    files: tuple[str, ...] | None = None
    """Files of the repository read in this order instead of the split."""
    revision: str | None = None
    """Pinned revision; None is the newest, and the one found is recorded."""
    total_rows: int
    """Rows the split had when the published selections were made."""
    evaluated: int
    """Rows the paper evaluates."""
    turns: Callable[[Row], list[str]]
    """A row's user turns."""


BENCHMARKS: dict[str, Source] = {
    "gsm8k": Source(
        hub_id="openai/gsm8k",
        config="main",
        split="test",
        total_rows=1319,
        evaluated=128,
        turns=lambda row: [row["question"] + BOXED],
    ),
    "math500": Source(
        hub_id="HuggingFaceH4/MATH-500",
        split="test",
        total_rows=500,
        evaluated=128,
        turns=lambda row: [row["problem"] + BOXED],
    ),
    "aime25": Source(
        hub_id="MathArena/aime_2025",
        split="train",
        total_rows=30,
        evaluated=30,
        turns=lambda row: [row["problem"] + BOXED],
    ),
    "humaneval": Source(
        hub_id="openai/openai_humaneval", split="test", total_rows=164, evaluated=164, turns=_humaneval
    ),
    "mbpp": Source(
        hub_id="google-research-datasets/mbpp",
        config="sanitized",
        split="test",
        total_rows=257,
        evaluated=128,
        turns=lambda row: [row["prompt"]],
    ),
    "livecodebench": Source(
        hub_id="livecodebench/code_generation_lite",
        split="test",
        files=("test.jsonl", *(f"test{part}.jsonl" for part in range(2, 7))),
        total_rows=1055,
        evaluated=128,
        turns=_livecodebench,
    ),
    "mt-bench": Source(
        hub_id="HuggingFaceH4/mt_bench_prompts",
        split="train",
        total_rows=80,
        evaluated=80,
        turns=lambda row: list(row["prompt"]),
    ),
    "alpaca": Source(hub_id="tatsu-lab/alpaca", split="train", total_rows=52002, evaluated=128, turns=_alpaca),
}
"""The names `--dataset` accepts, in the order of the tables."""


@dataclass(frozen=True)
class Prompt:
    """User turns as texts, or the token ids of one prompt; `row` counts from 0 in the data set."""

    row: int
    turns: list[str] | None
    prompt_ids: list[int] | None


@dataclass(frozen=True)
class Benchmark:
    """The prompts to evaluate, in order, and where they come from.

    For a file, `hub_id`, `config` and `split` are None and `revision` is `sha256:` and the sum of its bytes.
    """

    name: str
    hub_id: str | None
    config: str | None
    split: str | None
    revision: str | None
    total_rows: int
    prompts: list[Prompt]


def load_benchmark(name_or_path: str, *, max_samples: int | None = None, revision: str | None = None) -> Benchmark:
    """A benchmark by name, from the hub, or a JSONL file by path, selected in evaluation order.

    A hub benchmark is cut to the paper's number of rows, or to `max_samples`, by `selected_rows`. A file is
    taken to be in evaluation order already: all its rows, or the first `max_samples`. `revision` replaces
    the registry's. Raises `UserError` for an unknown name, a malformed row (with file and line), or a hub
    that cannot be reached.
    """
    if max_samples is not None and max_samples < 1:
        raise UserError(f"{max_samples} samples were asked for: at least 1 must be evaluated")
    if name_or_path in BENCHMARKS:
        return _from_hub(name_or_path, max_samples, revision)
    path = Path(name_or_path)
    if not path.is_file():
        raise UserError(
            f"{name_or_path!r} is neither a benchmark nor a file: use one of {', '.join(BENCHMARKS)}, "
            "or the path of a JSONL file"
        )
    if revision is not None:
        raise UserError(f"{path} is a file and has no revision {revision!r}: leave the revision out")
    return _from_file(path, max_samples)


def selected_rows(total: int, evaluated: int) -> list[int]:
    """The first `evaluated` rows of the seed-0 shuffle if there are more, else all rows in their order.

    The shuffle is the one of `datasets.Dataset.shuffle(seed=0)`.
    """
    if total <= evaluated:
        return list(range(total))
    import numpy as np

    return np.random.default_rng(SELECTION_SEED).permutation(total)[:evaluated].tolist()


def _from_hub(name: str, max_samples: int | None, revision: str | None) -> Benchmark:
    source = BENCHMARKS[name]
    rows, resolved = load_hub_rows(
        source.hub_id,
        config=source.config,
        split=source.split,
        revision=revision or source.revision,
        files=source.files,
    )
    if len(rows) != source.total_rows:
        log.warning(
            "%s has %d rows, %d were expected: its selection is not the paper's",
            source.hub_id,
            len(rows),
            source.total_rows,
        )
    chosen = selected_rows(len(rows), max_samples or source.evaluated)
    return Benchmark(
        name=name,
        hub_id=source.hub_id,
        config=source.config,
        split=source.split,
        revision=resolved,
        total_rows=len(rows),
        prompts=[Prompt(row, _turns(source, rows, row), None) for row in chosen],
    )


def _turns(source: Source, rows: Sequence[Row], row: int) -> list[str]:
    try:
        return source.turns(rows[row])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"row {row} of {source.hub_id} does not have the fields its prompt is made of ({error}): "
            "use a revision of the data set that has them"
        ) from error


def _from_file(path: Path, max_samples: int | None) -> Benchmark:
    refuse_json_array(path)
    prompts = [
        _file_prompt(raw, position, f"{path}:{line + 1}") for position, (line, raw) in enumerate(iter_lines(path))
    ]
    if not prompts:
        raise UserError(f"{path} holds no prompts: it needs one JSON object with `turns` or `prompt_ids` a line")
    return Benchmark(
        name=path.stem,
        hub_id=None,
        config=None,
        split=None,
        revision=f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
        total_rows=len(prompts),
        prompts=prompts[:max_samples],
    )


def _file_prompt(raw: bytes, position: int, where: str) -> Prompt:
    """A line of a prompts file; its own `row` (place in the data set) wins over `position`."""
    try:
        fields = parse_row(raw)
    except RowError as error:
        raise UserError(f"{where} is not a prompt ({error}): write one JSON object in UTF-8 a line") from error
    turns, ids, row = fields.get("turns"), fields.get("prompt_ids"), fields.get("row", position)
    if (turns is None) == (ids is None):
        raise UserError(f"{where} must have exactly one of `turns` and `prompt_ids`: give the one that is meant")
    if turns is not None and not _list_of(turns, lambda turn: isinstance(turn, str)):
        raise UserError(f'{where} has `turns` that are not a list of texts: write ["the user\'s first turn"]')
    if ids is not None and not _list_of(ids, _is_count):
        raise UserError(f"{where} has `prompt_ids` that are not a list of token ids: write [1, 2, 3]")
    if not _is_count(row):
        raise UserError(f"{where} has the row {row!r}, which is not a number from 0: correct or remove it")
    return Prompt(row, turns, ids)


def _list_of(value: Any, accepts: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and bool(value) and all(map(accepts, value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
