"""Sampling from a causal language model for a batch of prompts, on the device it lies on.

Prompts are padded on the left; rows that have ended leave the batch. The tokens are a function of the prompts, the
settings and the random generator. Knows nothing of texts or conversations. Shape letters: B rows still in the
batch, S padded length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dloop.regeneration.batch_cache import BatchCache, cache_argument

SHRINK_AT = 0.75
"""The batch is packed when at most this share of its rows still goes on; packing copies the cache."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is drawn: temperature, then the k likeliest, then the smallest set of probability `top_p`."""

    temperature: float
    """0 takes the likeliest token."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int


def draw(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token a row [B], drawn on the device of the logits."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    scaled = logits_BV.float() / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return torch.multinomial(scaled.softmax(-1), 1, generator=generator)[:, 0]
    count = min(sampling.top_k or scaled.shape[-1], scaled.shape[-1])
    ranked, tokens = scaled.topk(count, dim=-1)
    chances = ranked.softmax(-1)
    if sampling.top_p is not None:
        # A token stays while those likelier than it do not reach top_p; the first one always does.
        chances = chances * (chances.cumsum(-1) - chances < sampling.top_p)
    return tokens.gather(1, torch.multinomial(chances, 1, generator=generator))[:, 0]


class BatchSampler:
    """Draws answers from `model`; `stops` are the tokens that end one."""

    def __init__(self, model: Any, stops: Iterable[int], sampling: Sampling) -> None:
        self._model, self._sampling = model, sampling
        self._stops = frozenset(stops)
        self._context = model.config.get_text_config().max_position_embeddings

    def room(self, prompt: Sequence[int]) -> int:
        """How many tokens an answer to `prompt` may have; at most 0 if the prompt fills the context."""
        return min(self._sampling.max_tokens, self._context - len(prompt))

    @torch.inference_mode()
    def answers(self, prompts: Sequence[Sequence[int]], generator: torch.Generator) -> list[list[int]]:
        """New tokens of each prompt (each with `room`), up to and with its stop token."""
        answers: list[list[int]] = [[] for _ in prompts]
        batch = _Batch(self._model, prompts)
        while batch.rows:
            tokens = draw(batch.logits_BV, self._sampling, generator)
            going = []
            for place, (row, token) in enumerate(zip(batch.rows, tokens.tolist(), strict=True)):
                if row is None:
                    continue
                answers[row].append(token)
                if token in self._stops or len(answers[row]) == self.room(prompts[row]):
                    batch.rows[place] = None
                else:
                    going.append(place)
            if not going:
                break
            batch.step(tokens, going)
        return answers


class _Batch:
    """The model's state for the rows of a batch: cache, mask, positions and the logits of the next token."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self.rows: list[int | None] = list(range(len(prompts)))
        """Which prompt stands at each place; None once its answer has ended."""
        self._cache = BatchCache(model.config)
        self._cache_argument = {cache_argument(model): self._cache}
        ids_BS, self._mask_BS = _padded(prompts, model.device)
        positions_BS = (self._mask_BS.cumsum(-1) - 1).clamp(min=0)
        self._next_position_B = positions_BS[:, -1:] + 1
        self.logits_BV = self._forward(ids_BS, positions_BS)

    def _forward(self, ids_BS: Tensor, positions_BS: Tensor) -> Tensor:
        output = self._model(
            input_ids=ids_BS,
            attention_mask=self._mask_BS,
            position_ids=positions_BS,
            use_cache=True,
            logits_to_keep=1,
            **self._cache_argument,
        )
        return output.logits[:, -1]

    def step(self, tokens_B: Tensor, going: list[int]) -> None:
        """Append one token a row; `going` are the places that still matter."""
        if self._cache.can_select and len(going) <= SHRINK_AT * len(self.rows):
            tokens_B = self._shrink(tokens_B, going)
        self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=1)
        self.logits_BV = self._forward(tokens_B[:, None], self._next_position_B)
        self._next_position_B = self._next_position_B + 1

    def _shrink(self, tokens_B: Tensor, going: list[int]) -> Tensor:
        places = torch.tensor(going, device=tokens_B.device)
        self.rows = [self.rows[place] for place in going]
        self._cache.batch_select_indices(places)
        self._mask_BS, self._next_position_B = self._mask_BS[places], self._next_position_B[places]
        return tokens_B[places]


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, S], padded on the left with 0, which the mask hides."""
    length = max(map(len, prompts))
    ids = [[0] * (length - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
