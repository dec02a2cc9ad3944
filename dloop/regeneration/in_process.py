"""The target answers in this process: fixed batches of input lines, each with a random state of its own.

A batch is a function of its lines, the settings and the seed, and is written whole; so a killed and resumed run ends
with the same rows as one that was left alone. Knows prompts and texts, not how tokens are drawn (`sampling.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from dloop.cli import UserError
from dloop.data.chat_template import prompt_ids
from dloop.data.conversations import RowError
from dloop.hosts.target_model import stop_tokens
from dloop.regeneration.dialogue import Answer, Dialogue, Outcome, Reasoning, Rejected, open_dialogue, skipped
from dloop.regeneration.ledger import Ledger
from dloop.regeneration.sampling import BatchSampler, Sampling
from dloop.regeneration.selection import Selection

Line = tuple[int, bytes]


def batches(selection: Selection, size: int) -> Iterator[list[Line]]:
    """The wanted lines, `size` at a time in the order of the file, whether done or not."""
    lines = selection.lines()
    while batch := list(islice(lines, size)):
        yield batch


def random_state(seed: int, first_line: int, device: torch.device) -> torch.Generator:
    """The generator of the batch that begins with `first_line`."""
    digest = hashlib.sha256(f"{seed}/{first_line}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class LocalTarget:
    """A loaded target with its tokenizer, answering batches of dialogues."""

    def __init__(self, model: Any, tokenizer: Any, sampling: Sampling, reasoning: Reasoning) -> None:
        """Raises `UserError` if the tokenizer cannot write prompts."""
        self._tokenizer, self._reasoning = tokenizer, reasoning
        self._stops = stop_tokens(model, tokenizer)
        self._sampler = BatchSampler(model, self._stops, sampling)
        self.device: torch.device = model.device
        self._prompt([{"role": "user", "content": "Hello"}])

    def outcomes(self, batch: Sequence[Line], generator: torch.Generator) -> list[Outcome]:
        """The outcomes of all lines of a batch; turn by turn, the dialogues are answered together."""
        ended: list[Outcome] = []
        going: list[Dialogue] = []
        for line, raw in batch:
            try:
                going.append(open_dialogue(line, raw, self._reasoning))
            except RowError as error:
                ended.append(skipped(line, raw, error))
        while going:
            going = self._answer_turn(going, ended, generator)
        return ended

    def _answer_turn(
        self, dialogues: list[Dialogue], ended: list[Outcome], generator: torch.Generator
    ) -> list[Dialogue]:
        """Answer the next question of each dialogue; returns those that go on."""
        asked: list[tuple[Dialogue, list[int]]] = []
        for dialogue in dialogues:
            messages = dialogue.request()
            if messages is None:
                ended.append(dialogue.finished())
                continue
            try:
                asked.append((dialogue, self._fitting_prompt(messages)))
            except Rejected as rejection:
                ended.append(dialogue.failed(rejection.status, rejection.reason))
        if not asked:
            return []
        answers = self._sampler.answers([prompt for _, prompt in asked], generator)
        return [
            dialogue for (dialogue, _), tokens in zip(asked, answers, strict=True) if self._add(dialogue, tokens, ended)
        ]

    def _add(self, dialogue: Dialogue, tokens: list[int], ended: list[Outcome]) -> bool:
        """Whether the dialogue goes on with this answer."""
        stopped = tokens[-1] in self._stops
        text = self._tokenizer.decode(tokens[:-1] if stopped else tokens, skip_special_tokens=True)
        try:
            dialogue.add(Answer(text, finish="stop" if stopped else "length"))
        except Rejected as rejection:
            ended.append(dialogue.failed(rejection.status, rejection.reason, rejection.answer))
            return False
        return True

    def _prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        return prompt_ids(messages, self._tokenizer, thinking=self._reasoning == "save")

    def _fitting_prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            prompt = self._prompt(messages)
        except UserError as error:
            raise Rejected("error", str(error)) from error
        if self._sampler.room(prompt) <= 0:
            raise Rejected("error", "prompt_too_long")
        return prompt


def answer_batches(
    target: LocalTarget,
    selection: Selection,
    ledger: Ledger,
    *,
    batch_size: int,
    seed: int,
    advance: Callable[[int], Any],
) -> None:
    """Answer every batch that is not done and write it; `advance` is told how many lines each one added."""
    for batch in batches(selection, batch_size):
        if all(ledger.is_done(line) for line, _ in batch):
            continue
        generator = random_state(seed, batch[0][0], target.device)
        advance(ledger.write(target.outcomes(batch, generator)))
