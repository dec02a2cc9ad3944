"""Drafting with the Gemma 4 assistant: k steps of one recurrence a stage, over the target's own keys and values.

The assistant has no cache. Every step of a round stands at the root's position and attends what the target has
committed; only the token and the hidden state move on. So an additional stage is nothing but k more steps, and there
is nothing to roll back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dloop.hosts.host import Segment
from dloop.hosts.mtp.gemma4_network import LAYER_TYPES, advance, logits
from dloop.hosts.target_model import embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dloop.hosts.target_cache import TargetCache

_ALL_VISIBLE = dict.fromkeys(LAYER_TYPES)


class Gemma4Drafter:
    """Batch 1; `stage_length` steps a stage."""

    def __init__(self, assistant: Any, target: PreTrainedModel, cache: TargetCache, stage_length: int) -> None:
        self.assistant, self.cache, self.stage_length = assistant, cache, stage_length
        self.embed = embedding(target)
        self.device = self.embed.weight.device

    def reset(self, capacity: int) -> None:
        """Nothing is kept from response to response."""

    def begin(self, features: Tensor, tokens: Sequence[int]) -> None:
        """Take the final-norm states [n, D] of the newly committed rows; only the last goes with the root."""
        self._hidden_11D = features[None, -1:]
        self._token_11 = torch.tensor([[tokens[-1]]], device=self.device)
        self._position_11 = torch.tensor([[self.cache.length]], device=self.device)
        self._kv = self.cache.shared_kv()

    def first_stage(self) -> Segment:
        """Draft behind the root."""
        return self._steps()

    def next_stage(self) -> Segment:
        """The recurrence goes on behind the last drafted token."""
        return self._steps()

    def end(self) -> None:
        """The stages wrote nothing."""

    def _steps(self) -> Segment:
        tokens, log_probs = [], []
        for _ in range(self.stage_length):
            states, self._hidden_11D = advance(
                self.assistant,
                self.embed(self._token_11),
                self._hidden_11D,
                self._position_11,
                self._kv,
                _ALL_VISIBLE,
            )
            scores_1V = logits(self.assistant, states[0]).float()
            best_1, token_1 = scores_1V.max(dim=-1)
            self._token_11 = token_1[None]
            tokens.append(token_1)
            log_probs.append(best_1 - scores_1V.logsumexp(dim=-1))
        # One read of the device a stage.
        packed = torch.stack((torch.cat(tokens).double(), torch.cat(log_probs).double()))
        chain, chain_log_probs = packed.tolist()
        return Segment([int(token) for token in chain], chain_log_probs)
