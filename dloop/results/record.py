"""Result files, schema 1: one run of one method on one benchmark, with every round of every response.

Turns results into JSON and back, and refuses a file whose parts contradict each other. Knows no model,
computes no metric. Times are seconds, lengths are tokens.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from dloop.cli import UserError
from dloop.results import atomic, checks

SCHEMA = 1

PartT = TypeVar("PartT", "ResponseRecord", "Dataset")


@dataclass(kw_only=True)
class ResponseRecord:
    """One answer: one turn of one benchmark row. Lists over rounds are empty when the first token stops."""

    index: int
    """Position of the row in the selection, from 0."""
    row: int
    """Row number in the benchmark."""
    turn: int
    """Turn of the conversation, from 0."""
    num_input_tokens: int
    num_output_tokens: int
    """New tokens, cut at the limit and behind the first stop token; includes the prefill's one."""
    ttft: float
    """Seconds of the target's prefill, the first token included."""
    draft_prefill_time: float
    """Seconds of the first draft stage, which reads the prompt; in no other time. Baseline: 0."""
    decode_time: float
    tpot: float
    """`decode_time / num_output_tokens`."""
    acceptance_lengths: list[int]
    """A round's accepted draft tokens plus the target's own one, before cutting."""
    extra_stages: list[int]
    """A round's drafting stages after the first."""
    verified_tokens: list[int]
    """Rows of a round's target forward, root included."""
    gate_sums: list[list[float]]
    """Summed log-probability (nats) of each stage of each round; [] for a baseline."""
    stage_lengths: list[list[int]]
    """Chain tokens of each stage of each round; [] for a baseline."""
    stage_times: dict[str, float]
    """Seconds by part: draft, tree_build, verify, commit, gate."""
    finish: str
    """`stop` or `length`."""
    output_ids: list[int]
    text: str | None
    """The decoded answer; null without a tokenizer."""
    first_divergence: int | None = None
    """First token unlike the baseline's answer; null when identical or when no baseline was given."""
    divergence_margin: float | None = None
    """The target's top-1 minus top-2 logit at `first_divergence`."""
    stage_rows: list[list[int]] = field(default_factory=list)
    """Tree nodes of each stage of each round; [] for a baseline and in files of before they were recorded."""
    stage_accepted: list[list[int]] = field(default_factory=list)
    """Accepted nodes of each stage of each round; empty as `stage_rows` is."""


@dataclass(kw_only=True)
class Dataset:
    """The benchmark and what was selected of it."""

    name: str
    hub_id: str | None
    config: str | None
    split: str | None
    revision: str | None
    total_rows: int
    selected_rows: list[int]
    """Row numbers in evaluation order."""


@dataclass(kw_only=True)
class Result:
    """One result file."""

    kind: str
    """`baseline` or `speculative`."""
    host: str | None
    """Family of the draft; null for a baseline."""
    config: dict[str, Any]
    """Every option of the run, resolved."""
    env: dict[str, Any]
    """What it ran on: `dloop.results.provenance.environment`."""
    dataset: Dataset
    responses: list[ResponseRecord]
    """Sorted by (index, turn)."""
    summary: dict[str, Any]
    """`dloop.results.metrics.summarise` of the responses."""
    schema: int = field(default=SCHEMA)


def read_result(path: str | Path) -> Result:
    """The result in the file `path`; UserError when it is missing, no result, or contradicts itself."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"result file {path} cannot be read ({error.strerror}); run the evaluation first") from None
    except ValueError as error:
        raise UserError(f"result file {path} is not JSON ({error}); delete it and run the evaluation again") from None
    try:
        return from_json(raw)
    except ValueError as error:
        raise UserError(f"result file {path}: {error}; delete it and run the evaluation again") from None


def write_result(path: str | Path, result: Result) -> None:
    """Check `result` and write it, one response a line; ValueError when it contradicts itself."""
    checks.check_result(result)
    head = to_json(result)
    responses = head.pop("responses")
    summary = head.pop("summary")
    lines = ["{", *(f" {_dumps(key)}: {_dumps(value)}," for key, value in head.items())]
    lines += [' "responses": [', ",\n".join("  " + _dumps(response) for response in responses), " ],"]
    lines += [f' "summary": {_dumps(summary)}', "}"]
    atomic.write_text(path, "\n".join(lines) + "\n")


def to_json(result: Result) -> dict[str, Any]:
    """`result` as plain JSON values; numbers that JSON cannot hold become strings (`"-inf"`)."""
    parts = {f.name: getattr(result, f.name) for f in fields(result) if f.name != "schema"}
    parts["dataset"] = vars(result.dataset)
    parts["responses"] = [vars(response) for response in result.responses]
    return {"schema": result.schema, **_encode(parts)}


def from_json(raw: Any) -> Result:
    """The result in parsed JSON; ValueError with one sentence when a rule is broken."""
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        found = raw.get("schema") if isinstance(raw, dict) else type(raw).__name__
        raise ValueError(f"schema is {found!r}, this version reads schema {SCHEMA}")
    checks.check_keys("the file", raw, [f.name for f in fields(Result)])
    checks.check_types("the file", raw, checks.RESULT_TYPES)
    result = Result(
        **{
            **raw,
            "config": _decode(raw["config"]),
            "summary": _decode(raw["summary"]),
            "dataset": _part(Dataset, raw["dataset"], "dataset"),
            "responses": [
                _part(ResponseRecord, part, f"response {place}") for place, part in enumerate(raw["responses"])
            ],
        }
    )
    checks.check_result(result)
    return result


def _part(kind: type[PartT], raw: Any, where: str) -> PartT:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is no object")
    if kind is ResponseRecord:
        raw = {**{key: [] for key in checks.RECORDED_LATER}, **raw}
    checks.check_keys(where, raw, [f.name for f in fields(kind)])
    if kind is ResponseRecord:
        raw["gate_sums"] = _decode(raw["gate_sums"])
        checks.check_types(where, raw, checks.RESPONSE_TYPES)
    else:
        checks.check_types(where, raw, checks.DATASET_TYPES)
    return kind(**raw)


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def _decode(value: Any) -> Any:
    if isinstance(value, str) and value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict):
        return {key: _decode(part) for key, part in value.items()}
    return [_decode(part) for part in value] if isinstance(value, list) else value


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
