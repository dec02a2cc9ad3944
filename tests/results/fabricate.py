"""Results as an evaluation would write them, invented: every round comes from a seeded generator."""

import random
from pathlib import Path

from dloop.results.metrics import audit, first_divergence, summarise
from dloop.results.record import Dataset, ResponseRecord, Result, write_result

ENV = {
    "gpu": "CPU: Model 7",
    "gpu_count": 0,
    "processes": 1,
    "hostname_hash": "0123456789ab",
    "dtype": "float32",
    "attn": "sdpa",
    "torch": "2.13.0+cpu",
    "torch_threads": 1,
    "transformers": "5.24.0",
    "cuda": None,
    "dloop": "0.1.0",
    "code": "00112233aabbccdd",
    "git": "8f3a9c0de1" + 30 * "0" + "-dirty",
    "started": "2026-11-30T12:00:00+00:00",
}
CONFIG = {
    "model": "models/tiny",
    "draft_model": None,
    "max_new_tokens": 256,
    "dtype": "float32",
    "thinking": False,
    "loop_gate": 1.0,
    "max_extra_stages": None,
    "stop_token_ids": None,
}
BLOCK = 7
"""Tokens a stage drafts."""

STEP, STAGE, ROW = 4.0e-3, 0.9e-3, 0.2e-3
"""Invented seconds: a target step with one row, a drafting stage, each further row."""


def response(**changes) -> ResponseRecord:
    """A speculative response of two rounds that is valid as it stands; `changes` make it something else."""
    values = {
        "index": 0,
        "row": 0,
        "turn": 0,
        "num_input_tokens": 11,
        "num_output_tokens": 7,
        "ttft": 0.01,
        "draft_prefill_time": 0.002,
        "decode_time": 0.07,
        "tpot": 0.01,
        "acceptance_lengths": [4, 2],
        "extra_stages": [1, 0],
        "verified_tokens": [7, 4],
        "gate_sums": [[-0.1, -2.0], [-1.5]],
        "stage_lengths": [[3, 3], [3]],
        "stage_rows": [[3, 3], [3]],
        "stage_accepted": [[3, 0], [1]],
        "stage_times": {"draft": 0.01, "verify": 0.06},
        "finish": "stop",
        "output_ids": [5, 6, 7, 8, 9, 10, 1],
        "text": "an answer",
    }
    return ResponseRecord(**{**values, **changes})


def result(responses, **changes) -> Result:
    """A result around `responses`; rows are numbered like indices."""
    rows = 1 + max((part.index for part in responses), default=0)
    dataset = Dataset(
        name="gsm8k",
        hub_id=None,
        config=None,
        split=None,
        revision=None,
        total_rows=rows,
        selected_rows=[*range(rows)],
    )
    values = {
        "kind": "speculative",
        "host": "dflash",
        "config": dict(CONFIG),
        "env": dict(ENV),
        "dataset": dataset,
        "responses": responses,
        "summary": summarise(responses),
    }
    return Result(**{**values, **changes})


def invented(
    benchmark,
    *,
    host=None,
    skill=0.8,
    openness=0.0,
    prompts=6,
    turns=1,
    ties=0.0,
    seed=0,
    config=None,
    env=None,
):
    """A whole result: a baseline without `host`, else drafts accepted with probability `skill` a token.

    `openness` is the probability that a stage is followed by another; `ties` that an answer parts from the
    baseline's (its margin is then small). The answers depend on the benchmark alone.
    """
    words = random.Random(benchmark)
    noise = random.Random(f"{benchmark}/{host}/{skill}/{openness}/{seed}")
    responses = []
    for index in range(prompts):
        for turn in range(turns):
            ids = [words.randrange(5, 900) for _ in range(words.randrange(40, 90))]
            responses.append(_invented_response(index, turn, ids, host, skill, openness, ties, noise))
    dataset = Dataset(
        name=benchmark,
        hub_id=None,
        config=None,
        split=None,
        revision=None,
        total_rows=prompts,
        selected_rows=[*range(prompts)],
    )
    return Result(
        kind="speculative" if host else "baseline",
        host=host,
        config={**CONFIG, **(config or {})},
        env={**ENV, **(env or {})},
        dataset=dataset,
        responses=responses,
        summary=summarise(responses),
    )


def _invented_response(index, turn, ids, host, skill, openness, ties, noise):
    ids = list(ids)
    divergence = None
    if host and noise.random() < ties:
        divergence = noise.randrange(len(ids))
        ids[divergence] += 1
    rounds = {
        "acceptance_lengths": [],
        "extra_stages": [],
        "verified_tokens": [],
        "gate_sums": [],
        "stage_lengths": [],
        "stage_rows": [],
        "stage_accepted": [],
    }
    seconds, produced = 0.0, 1
    while produced < len(ids):
        extra = 0
        while host and noise.random() < openness:
            extra += 1
        drafted = BLOCK * (1 + extra) if host else 0
        accepted = 1
        # A round that opened was sure of its first stage.
        while accepted <= drafted and noise.random() < (0.97 if extra else skill):
            accepted += 1
        seconds += (STEP + ROW * drafted + STAGE * (1 + extra) * bool(host)) * noise.uniform(0.9, 1.15)
        produced += accepted
        _append_round(rounds, accepted, extra, drafted, host, noise)
    return ResponseRecord(
        index=index,
        row=index,
        turn=turn,
        num_input_tokens=30 + index,
        num_output_tokens=len(ids),
        ttft=2 * STEP,
        draft_prefill_time=STAGE if host else 0.0,
        decode_time=seconds,
        tpot=seconds / len(ids),
        **rounds,
        stage_times={"draft": 0.2 * seconds, "verify": 0.8 * seconds} if host else {"verify": seconds},
        finish="stop",
        output_ids=ids,
        text=None,
        first_divergence=divergence,
        divergence_margin=None if divergence is None else 1e-4,
    )


def _append_round(rounds, accepted, extra, drafted, host, noise):
    rounds["acceptance_lengths"].append(accepted)
    rounds["extra_stages"].append(extra)
    rounds["verified_tokens"].append(1 + drafted)
    if host:
        rounds["gate_sums"].append([-noise.random() for _ in range(1 + extra)])
        rounds["stage_lengths"].append([BLOCK] * (1 + extra))
        rounds["stage_rows"].append([BLOCK] * (1 + extra))
        rounds["stage_accepted"].append([min(max(accepted - 1 - BLOCK * s, 0), BLOCK) for s in range(1 + extra)])


def compare(method: Result, baseline: Result, path: str | None = None) -> Result:
    """`method` with the audit fields and the summary that a run given the baseline would write."""
    answers = {(part.index, part.turn): part.output_ids for part in baseline.responses}
    for part in method.responses:
        assert first_divergence(part.output_ids, answers[part.index, part.turn]) == part.first_divergence
    assert audit(method.responses, baseline.responses, dtype="float32").divergent == 0
    method.summary = summarise(method.responses, baseline, path)
    return method


def write(root: Path, path: str, made: Result) -> Path:
    """Write `made` below `root` and return where it lies."""
    write_result(root / path, made)
    return root / path
