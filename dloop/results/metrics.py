"""Numbers computed from results: acceptance length, speedup, the lossless audit, and what may be compared.

Pure functions of records, no files, no torch. A response that stopped at its first token has no round and
stays out of every mean of rounds or times. Definitions follow z-lab/dflash and liranringel/ddtree.
"""

import math
import os.path
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dloop.results.record import ResponseRecord, Result

TIE_TOLERANCE = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""Top-1 minus top-2 logit up to which another choice of the target counts as a tie.

Four times the spacing of the 16-bit formats between 16 and 32, where top logits lie; for float32 the rounding
that sums over thousands of products leave."""

Records = Sequence[ResponseRecord]


def tau(records: Records) -> float | None:
    """Mean over responses of the mean acceptance length of their rounds; None without any round."""
    return _mean(fmean(record.acceptance_lengths) for record in _with_rounds(records))


def tau_micro(records: Records) -> float | None:
    """Mean acceptance length over all rounds of all responses; None without any round."""
    return _mean(length for record in records for length in record.acceptance_lengths)


def histogram(records: Records) -> dict[int, int]:
    """Number of rounds by acceptance length, ascending."""
    return dict(sorted(Counter(n for record in records for n in record.acceptance_lengths).items()))


def extra_stage_histogram(records: Records) -> dict[int, int]:
    """Number of rounds by additional stages, ascending."""
    return dict(sorted(Counter(n for record in records for n in record.extra_stages).items()))


def mean_extra_stages(records: Records) -> float | None:
    """Mean number of additional stages over all rounds; None without any round."""
    return _mean(extra for record in records for extra in record.extra_stages)


def open_share(records: Records) -> float | None:
    """Share of all rounds with at least one additional stage; None without any round."""
    return _mean(extra > 0 for record in records for extra in record.extra_stages)


def mean_tpot(records: Records) -> float | None:
    """Mean over responses of the seconds per output token; None without any round."""
    return _mean(record.tpot for record in _with_rounds(records))


def throughput(records: Records) -> float | None:
    """Tokens a second: 1 / mean seconds per output token."""
    return _ratio(1.0, mean_tpot(records))


def speedup(method: Records, baseline: Records) -> float | None:
    """Ratio of the mean seconds per output token, baseline over method."""
    return _ratio(mean_tpot(baseline), mean_tpot(method))


def speedup_micro(method: Records, baseline: Records) -> float | None:
    """As `speedup`, with total decode time over total tokens on each side."""
    return _ratio(_pooled_tpot(baseline), _pooled_tpot(method))


def summarise(records: Records, baseline: Result | None = None, baseline_path: str | None = None) -> dict[str, Any]:
    """The `summary` of a result file; what needs the baseline is None without one."""
    against = baseline.responses if baseline else None
    return {
        "num_responses": len(records),
        "tokens": sum(record.num_output_tokens for record in records),
        "mean_tpot": mean_tpot(records),
        "throughput": throughput(records),
        "tau": tau(records),
        "tau_micro": tau_micro(records),
        "mean_extra_stages": mean_extra_stages(records),
        "verify_calls": sum(len(record.acceptance_lengths) for record in records),
        "histogram": {str(length): rounds for length, rounds in histogram(records).items()},
        "baseline_path": baseline_path if baseline else None,
        "speedup": speedup(records, against) if against else None,
        "speedup_micro": speedup_micro(records, against) if against else None,
        "identical_to_baseline": audit(records, against, dtype="float32").identical if against else None,
    }


def first_divergence(ids: Sequence[int], reference: Sequence[int]) -> int | None:
    """Position of the first token at which two answers differ (or one ends); None when they are equal."""
    for position, (token, expected) in enumerate(zip(ids, reference, strict=False)):
        if token != expected:
            return position
    return None if len(ids) == len(reference) else min(len(ids), len(reference))


@dataclass(frozen=True)
class Audit:
    """Responses compared with the baseline's answers, token for token."""

    identical: int = 0
    tie: int = 0
    """Differ first where the target itself hardly prefers one token: top-2 margin within `TIE_TOLERANCE`."""
    divergent: int = 0
    """Differ although the margin is larger, or no margin is known."""
    other_prompt: int = 0
    """Later turns behind an earlier answer unlike the baseline's, so that their prompt is another one."""

    def __add__(self, other: "Audit") -> "Audit":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Audit(*(mine + theirs for mine, theirs in pairs))

    @property
    def total(self) -> int:
        """All responses."""
        return self.identical + self.tie + self.divergent + self.other_prompt


def audit(method: Records, baseline: Records, *, dtype: str) -> Audit:
    """Compare each response of `method` with the baseline's of the same (index, turn); dtype sets the bound.

    A response the baseline lacks counts as divergent. Differences are recomputed from the ids; only the
    margin is taken from the record, and only if it belongs to the difference found.
    """
    answers = {(record.index, record.turn): record.output_ids for record in baseline}
    verdicts: Counter[str] = Counter()
    parted: set[int] = set()
    for record in method:
        expected = answers.get((record.index, record.turn), [])
        verdict = _verdict(record, expected, TIE_TOLERANCE[dtype])
        verdicts["other_prompt" if record.index in parted else verdict] += 1
        if verdict != "identical":
            parted.add(record.index)
    return Audit(**verdicts)


def _verdict(record: ResponseRecord, expected: Sequence[int], tolerance: float) -> str:
    position = first_divergence(record.output_ids, expected)
    if position is None:
        return "identical"
    margin = record.divergence_margin if record.first_divergence == position else None
    return "tie" if margin is not None and margin <= tolerance else "divergent"


@dataclass(frozen=True)
class Departure:
    """Where a response leaves the baseline's answer."""

    index: int
    turn: int
    position: int
    """The first token that differs."""
    margin: float | None
    """The target's preference there; None when unknown."""


def worst_departure(method: Records, baseline: Records) -> Departure | None:
    """The departure that a tie explains least: of unknown margin, or of the largest; None without any.

    Later turns behind an answer that already differed have another prompt and do not count.
    """
    answers = {(record.index, record.turn): record.output_ids for record in baseline}
    found: dict[int, Departure] = {}
    for record in method:
        position = first_divergence(record.output_ids, answers.get((record.index, record.turn), []))
        if position is not None and record.index not in found:
            margin = record.divergence_margin if record.first_divergence == position else None
            found[record.index] = Departure(record.index, record.turn, position, margin)
    return max(found.values(), key=lambda part: math.inf if part.margin is None else part.margin, default=None)


def compare_settings(method: Result, baseline: Result) -> tuple[list[str], list[str]]:
    """(errors, warnings): why the settings and surroundings of `method` must not, or should not, be compared with
    those of `baseline`; sentences. Looks at no response, so that it can be asked before a run."""
    if baseline.kind != "baseline":
        return [f"the baseline is a {baseline.kind} result"], []
    errors = [
        f"{name} is {_short(mine)} here and {_short(theirs)} in the baseline"
        for name, get in _MUST_AGREE.items()
        if (mine := get(method)) != (theirs := get(baseline))
    ]
    warnings = [
        f"{name} is {_short(mine)} in a result and {_short(theirs)} in its baseline"
        for name, get in _SHOULD_AGREE.items()
        if (mine := get(method)) != (theirs := get(baseline))
    ]
    return errors, warnings


def compare_runs(method: Result, baseline: Result) -> tuple[list[str], list[str]]:
    """As `compare_settings`, and the responses must answer the same prompts."""
    errors, warnings = compare_settings(method, baseline)
    return errors or _other_prompts(method, baseline), warnings


def _option(name: str) -> Callable[[Result], Any]:
    return lambda result: result.config.get(name)


def _env(name: str) -> Callable[[Result], Any]:
    return lambda result: result.env.get(name)


def _target(result: Result) -> str:
    return os.path.normpath(str(result.config.get("model")))


_MUST_AGREE: dict[str, Callable[[Result], Any]] = {
    "the target (--model)": _target,
    "--revision": _option("revision"),
    "the benchmark": lambda result: result.dataset.name,
    "the number of benchmark rows": lambda result: result.dataset.total_rows,
    "the selection of rows": lambda result: result.dataset.selected_rows,
    "--max-new-tokens": _option("max_new_tokens"),
    "--thinking": _option("thinking"),
    "--stop-token-ids": _option("stop_token_ids"),
    "--target-runtime": _option("target_runtime"),
    # Results from before there was a choice are eager ones.
    "--runtime": lambda result: result.config.get("runtime", "eager"),
    "the device": _env("gpu"),
    "the number of processes": _env("processes"),
    "the dtype": _env("dtype"),
    "the attention implementation": _env("attn"),
}
_SHOULD_AGREE: dict[str, Callable[[Result], Any]] = {
    "the torch version": _env("torch"),
    "the transformers version": _env("transformers"),
    "the CUDA version": _env("cuda"),
    "the number of torch threads": _env("torch_threads"),
    "the hash of the measured code": _env("code"),
    "the machine (hash of its name)": _env("hostname_hash"),
    "the benchmark's revision": lambda result: result.dataset.revision,
}


def _other_prompts(method: Result, baseline: Result) -> list[str]:
    lengths = {(r.index, r.turn): r.num_input_tokens for r in baseline.responses}
    if {(r.index, r.turn) for r in method.responses} != lengths.keys():
        return ["the responses are not those of the baseline (other rows or turns)"]
    # Later turns contain the run's own answers and may differ in length where those do.
    unlike = [r.index for r in method.responses if r.turn == 0 and lengths[r.index, 0] != r.num_input_tokens]
    return [f"prompt {unlike[0]} has another length than in the baseline"] if unlike else []


def _with_rounds(records: Records) -> Iterable[ResponseRecord]:
    return (record for record in records if record.acceptance_lengths)


def _pooled_tpot(records: Records) -> float | None:
    measured = list(_with_rounds(records))
    return _ratio(sum(r.decode_time for r in measured), sum(r.num_output_tokens for r in measured))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
