"""Drafting with Qwen3.5's head: one recurrence, k steps a stage, over a cache of rows made of true target states.

A round first reads the rows whose target states are new; its last row predicts the first draft. Every further step adds
one row made of the draft's own state. Those rows are dropped when the round ends and read again, with true states, as
far as they were accepted. An additional stage is nothing but k more steps. Shape letters: S fresh rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.hosts.host import Segment
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.mtp.qwen35_network import Qwen35Head
from dloop.hosts.target_model import embedding, head

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Qwen35Drafter:
    """Batch 1; `stage_length` steps a stage."""

    def __init__(self, network: Qwen35Head, target: PreTrainedModel, stage_length: int) -> None:
        config = network.config
        self.network, self.embed, self.head = network, embedding(target), head(target)
        self.device, self.stage_length = self.embed.weight.device, stage_length
        self.cache = KVCache(1, config.kv_heads, config.head_dim, network.fc.weight.dtype, self.device)

    def reset(self, capacity: int) -> None:
        """Empty the cache and make room for `capacity` committed tokens and one stage behind them."""
        self.cache.rollback(0)
        self.cache.reserve(capacity + self.stage_length)

    def begin(self, features: Tensor, tokens: Sequence[int]) -> None:
        """Take final-norm states [S, D] of the positions behind the cached ones, each with the token behind it."""
        self._confirmed = self.cache.length + len(features)
        self._hidden_SD = features
        self._ids_S = torch.tensor(tokens, device=self.device)

    def first_stage(self) -> Segment:
        """Read the new rows and draft behind the root."""
        return self._steps()

    def next_stage(self) -> Segment:
        """The recurrence goes on behind the last drafted token."""
        return self._steps()

    def end(self) -> None:
        """Keep the rows made of the target's states alone."""
        self.cache.rollback(self._confirmed)

    def _steps(self) -> Segment:
        tokens, log_probs = list[Tensor](), list[Tensor]()
        for _ in range(self.stage_length):
            self._hidden_SD = self._run()[-1:]
            logits_1V = self.head(self._hidden_SD).float()
            best_1, self._ids_S = logits_1V.max(dim=-1)
            tokens.append(self._ids_S)
            log_probs.append(best_1 - logits_1V.logsumexp(dim=-1))
        # One read of the device a stage.
        packed = torch.stack((torch.cat(tokens).double(), torch.cat(log_probs).double()))
        chain, chain_log_probs = packed.tolist()
        return Segment([int(token) for token in chain], chain_log_probs)

    def _run(self) -> Tensor:
        """Outputs [S, D] of the rows at hand, whose keys and values join the cache."""
        past, rows = self.cache.length, len(self._ids_S)
        self.cache.reserve(past + rows)
        causal = rows > 1 and past == 0
        mask = None
        if rows > 1 and not causal:
            mask = torch.ones(rows, past + rows, dtype=torch.bool, device=self.device).tril(past)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.write(0, k, v)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=True)

        positions_S = torch.arange(past, past + rows, device=self.device)
        out_1SD = self.network(self.embed(self._ids_S)[None], self._hidden_SD[None], positions_S[None], attend)
        self.cache.advance(rows)
        return out_1SD[0]
