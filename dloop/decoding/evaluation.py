"""Answering a benchmark's prompts with one method and recording every round; the lossless audit behind the clock.

Knows the loop and the records, not the command line, the processes or the files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from dloop.data.benchmarks import Prompt
from dloop.data.chat_template import prompt_ids
from dloop.decoding.clock import OUTSIDE_DECODING, Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Generation, Settings, generate
from dloop.decoding.target import Target
from dloop.hosts.host import Drafter
from dloop.results.metrics import first_divergence
from dloop.results.record import ResponseRecord

PARTS = ("draft", "tree_build", "verify", "commit", "gate")
WARM_UP_TOKENS = 64
WARM_UP_STAGES = 3
"""Additional stages a warm-up round may have where the run itself sets no cap."""


@dataclass(frozen=True)
class Answer:
    """A record and the prompt it answers, which the audit needs again."""

    record: ResponseRecord
    prompt_ids: list[int]


@dataclass
class Evaluator:
    """One method on one target. `tokenizer` may be None where prompts are token ids; `drafts` is False for the
    baseline; `histories` maps (index, turn) to an answer that stands in for the run's own in later turns."""

    target: Target
    drafter: Drafter
    settings: Settings
    tokenizer: Any
    drafts: bool
    thinking: bool = False
    histories: Mapping[tuple[int, int], str] | None = None

    def warm_up(self, prompt: Prompt, runs: int, tokens: int = WARM_UP_TOKENS) -> None:
        """Decode `tokens` outside any measurement, once with an open gate so that loop shapes are warm too."""
        limit = min(tokens, self.settings.max_new_tokens)
        settings = replace(self.settings, max_new_tokens=limit, stop_ids=frozenset())
        open_gate = Gate(-math.inf, self.settings.gate.max_extra_stages or WARM_UP_STAGES)
        loops = self.drafts and self.settings.gate.threshold < 0
        ids = self._warm_up_ids(prompt)
        for run in range(runs):
            this = replace(settings, gate=open_gate) if loops and run == 0 else settings
            generate(self.target, self.drafter, ids, this, Clock(self.target.device))

    def _warm_up_ids(self, prompt: Prompt) -> list[int]:
        if self.tokenizer is None:
            return prompt.prompt_ids or []
        return prompt_ids([{"role": "user", "content": "Warmup"}], self.tokenizer)

    def answers(self, index: int, prompt: Prompt) -> Iterator[Answer]:
        """One answer a turn; a later turn's prompt holds the earlier answers."""
        if prompt.turns is None:
            yield self._answer(index, prompt.row, 0, list(prompt.prompt_ids or []))
            return
        messages: list[dict[str, str]] = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            answer = self._answer(index, prompt.row, turn, prompt_ids(messages, self.tokenizer, self.thinking))
            yield answer
            own = answer.record.text or ""
            said = self.histories.get((index, turn), own) if self.histories else own
            messages.append({"role": "assistant", "content": said})

    def _answer(self, index: int, row: int, turn: int, ids: list[int]) -> Answer:
        clock = Clock(self.target.device)
        generation = generate(self.target, self.drafter, ids, self.settings, clock)
        text = None
        if self.tokenizer is not None:
            text = self.tokenizer.decode(generation.output_ids, skip_special_tokens=True)
        measured = self._measured(generation, clock.read())
        record = ResponseRecord(index=index, row=row, turn=turn, num_input_tokens=len(ids), text=text, **measured)
        return Answer(record, ids)

    def _measured(self, generation: Generation, seconds: Mapping[str, float]) -> dict[str, Any]:
        rounds = generation.rounds
        decode_time = sum(value for part, value in seconds.items() if part not in OUTSIDE_DECODING)
        drafted = [r.segments for r in rounds] if self.drafts else []
        return {
            "num_output_tokens": len(generation.output_ids),
            "ttft": seconds["prefill"],
            "draft_prefill_time": seconds.get("draft_prefill", 0.0) if self.drafts else 0.0,
            "decode_time": decode_time,
            "tpot": decode_time / max(len(generation.output_ids), 1),
            "acceptance_lengths": [r.acceptance_length for r in rounds],
            "extra_stages": [len(r.segments) - 1 for r in rounds],
            "verified_tokens": [r.verified_tokens for r in rounds],
            "gate_sums": [[segment.gate_sum for segment in segments] for segments in drafted],
            "stage_lengths": [[len(segment.chain) for segment in segments] for segments in drafted],
            "stage_times": {part: seconds.get(part, 0.0) for part in PARTS},
            "stage_rows": [list(r.stage_rows) for r in rounds] if self.drafts else [],
            "stage_accepted": [list(r.stage_accepted) for r in rounds] if self.drafts else [],
            "finish": generation.finish,
            "output_ids": generation.output_ids,
        }

    def audit(self, answer: Answer, expected: list[int] | None) -> ResponseRecord:
        """The record with its first token unlike `expected` and, there, how little the target preferred its choice.

        Runs the target once more, teacher-forced; never call it while the clock matters.
        """
        place = None if expected is None else first_divergence(answer.record.output_ids, expected)
        if place is None:
            return answer.record
        prefix = answer.prompt_ids + answer.record.output_ids[:place]
        with torch.inference_mode():
            self.target.reset(len(prefix))
            margin = self.target.top_margin(prefix)
        return replace(answer.record, first_divergence=place, divergence_margin=margin)
