"""Rules a result must obey, each with its sentence; `dloop.results.record` applies them reading and writing.

Raises ValueError only; the reader adds the file's name and the remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dloop.results.record import ResponseRecord, Result

Check = Callable[[Any], bool]


def _only(*types: type) -> Check:
    # The exact type, because bool is an int to isinstance.
    return lambda value: type(value) in types


def _list_of(*types: type) -> Check:
    # Result files hold millions of numbers: one pass in C over each list.
    return lambda value: type(value) is list and set(map(type, value)) <= set(types)


def _lists_of(*types: type) -> Check:
    def check(value: Any) -> bool:
        return _list_of(list)(value) and set(map(type, chain.from_iterable(value))) <= set(types)

    return check


_INT, _TEXT, _OBJECT = _only(int), _only(str), _only(dict)
_NUMBER, _MAYBE_TEXT = _only(int, float), _only(str, type(None))

BY_STAGE = ("gate_sums", "stage_lengths", "stage_rows", "stage_accepted")
"""Lists with one number a stage for every round."""

RESULT_TYPES: dict[str, Check] = {
    "kind": _TEXT,
    "host": _MAYBE_TEXT,
    "config": _OBJECT,
    "env": _OBJECT,
    "summary": _OBJECT,
    "responses": _list_of(dict),
}
DATASET_TYPES: dict[str, Check] = {
    "name": _TEXT,
    "hub_id": _MAYBE_TEXT,
    "config": _MAYBE_TEXT,
    "split": _MAYBE_TEXT,
    "revision": _MAYBE_TEXT,
    "total_rows": _INT,
    "selected_rows": _list_of(int),
}
RESPONSE_TYPES: dict[str, Check] = {
    **dict.fromkeys(("index", "row", "turn", "num_input_tokens", "num_output_tokens"), _INT),
    **dict.fromkeys(("ttft", "draft_prefill_time", "decode_time", "tpot"), _NUMBER),
    **dict.fromkeys(("acceptance_lengths", "extra_stages", "verified_tokens", "output_ids"), _list_of(int)),
    "gate_sums": _lists_of(int, float),
    **dict.fromkeys(("stage_lengths", "stage_rows", "stage_accepted"), _lists_of(int)),
    "stage_times": lambda value: type(value) is dict and all(map(_NUMBER, value.values())),
    "finish": _TEXT,
    "text": _MAYBE_TEXT,
    "first_divergence": _only(int, type(None)),
    "divergence_margin": _only(int, float, type(None)),
}
RECORDED_LATER = ("stage_rows", "stage_accepted")
"""Keys of a response that files of schema 1 may lack."""
ENV_KEYS = (
    *("gpu", "gpu_count", "processes", "hostname_hash", "dtype", "attn"),
    *("torch", "torch_threads", "transformers", "cuda"),
    *("dloop", "code", "git", "started"),
)


def check_keys(where: str, raw: Mapping[str, Any], expected: Iterable[str]) -> None:
    """ValueError unless the keys of `raw` are exactly `expected`."""
    expected = set(expected)
    if missing := sorted(expected - raw.keys()):
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    if unknown := sorted(raw.keys() - expected):
        raise ValueError(f"{where} has unknown keys: {', '.join(unknown)}")


def check_types(where: str, raw: Mapping[str, Any], types: Mapping[str, Check]) -> None:
    """ValueError unless every value of `raw` passes its check."""
    for key, check in types.items():
        if not check(raw[key]):
            raise ValueError(f"{where} has {key} = {str(raw[key])[:60]!r}, which is of the wrong type")


def check_result(result: Result) -> None:
    """ValueError unless the parts of `result` agree with each other."""
    if result.kind not in ("baseline", "speculative"):
        raise ValueError(f"kind is {result.kind!r}, it is either baseline or speculative")
    if (result.host is None) != (result.kind == "baseline"):
        raise ValueError(f"a {result.kind} result has host {result.host!r}; only speculative ones name a host")
    if missing := [key for key in ENV_KEYS if key not in result.env]:
        raise ValueError(f"env lacks {', '.join(missing)}")
    places = [(response.index, response.turn) for response in result.responses]
    if places != sorted(set(places)):
        raise ValueError("responses are not sorted by (index, turn), or one is there twice")
    for response in result.responses:
        try:
            _check_response(response, result)
        except ValueError as error:
            raise ValueError(f"response (index {response.index}, turn {response.turn}): {error}") from None


def _check_response(response: ResponseRecord, result: Result) -> None:
    _check_row(response, result.dataset.selected_rows)
    _check_rounds(response)
    if result.kind == "baseline":
        _check_baseline_rounds(response)
    else:
        _check_stages(response)
    _check_output(response, result.config.get("max_new_tokens"))
    _check_times(response)


def _check_row(response: ResponseRecord, selected_rows: list[int]) -> None:
    if not 0 <= response.index < len(selected_rows):
        raise ValueError(f"index lies outside the selection of {len(selected_rows)} rows")
    if selected_rows[response.index] != response.row:
        raise ValueError(f"row is {response.row}, the selection has {selected_rows[response.index]} there")


def _check_rounds(response: ResponseRecord) -> None:
    rounds = len(response.acceptance_lengths)
    for name in ("extra_stages", "verified_tokens"):
        if len(getattr(response, name)) != rounds:
            raise ValueError(f"{name} has {len(getattr(response, name))} rounds, acceptance_lengths {rounds}")
    for accepted, verified, extra in zip(
        response.acceptance_lengths, response.verified_tokens, response.extra_stages, strict=True
    ):
        if not 1 <= accepted <= verified:
            raise ValueError(
                f"a round accepted {accepted} tokens of {verified} verified ones (at least 1, at most all)"
            )
        if extra < 0:
            raise ValueError(f"a round has {extra} additional stages")


def _check_baseline_rounds(response: ResponseRecord) -> None:
    if filled := [name for name in BY_STAGE if getattr(response, name)]:
        raise ValueError(f"a baseline drafts nothing, but {filled[0]} is filled")
    if set(response.acceptance_lengths) - {1} or any(response.extra_stages):
        raise ValueError("a baseline yields one token a round, without additional stages")


def _check_stages(response: ResponseRecord) -> None:
    for name in BY_STAGE:
        stages = [len(part) for part in getattr(response, name)]
        if name in RECORDED_LATER and not stages:
            continue
        if stages != [extra + 1 for extra in response.extra_stages]:
            raise ValueError(f"{name} must hold one number a stage: the first and each of extra_stages")
    for name, whole in zip(RECORDED_LATER, ("verified_tokens", "acceptance_lengths"), strict=True):
        sums = [1 + sum(part) for part in getattr(response, name)]
        if sums and sums != getattr(response, whole):
            raise ValueError(f"{name} of a round must add up to {whole} less one")


def _check_output(response: ResponseRecord, limit: int | None) -> None:
    tokens, lengths = response.num_output_tokens, response.acceptance_lengths
    if tokens != len(response.output_ids):
        raise ValueError(f"num_output_tokens is {tokens}, output_ids holds {len(response.output_ids)}")
    # Only tokens of the last round are ever cut, and all of them where the limit fell on its root (the public loops
    # verify once more there).
    least = 1 + sum(lengths[:-1])
    if not least <= tokens <= 1 + sum(lengths):
        raise ValueError(f"num_output_tokens is {tokens}, the rounds produced {least} to {1 + sum(lengths)}")
    if response.finish not in ("stop", "length"):
        raise ValueError(f"finish is {response.finish!r}, it is either stop or length")
    if limit is not None and (tokens > limit or (response.finish == "length" and tokens != limit)):
        raise ValueError(f"finish is {response.finish} after {tokens} tokens with max_new_tokens {limit}")


def _check_times(response: ResponseRecord) -> None:
    if not math.isclose(response.tpot, response.decode_time / response.num_output_tokens, rel_tol=1e-6):
        raise ValueError("tpot is not decode_time / num_output_tokens")
    if response.divergence_margin is not None and response.first_divergence is None:
        raise ValueError("divergence_margin is given without first_divergence")
