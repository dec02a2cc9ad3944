"""Drafting with a block drafter: the host's stage, loop stages behind it, and the rollback after verification.

A stage runs the block [anchor, MASK, ...] over the cached context. A loop stage sees, besides the target's features
before the root, the draft's own states of the tokens drafted since (one row a token, at the token's position; the
root's position stays a hole, since neither the target nor the draft has a state for it). Everything the stages wrote
beyond the target's features is dropped when the round ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dloop.hosts.block.cached import CachedBackbone
from dloop.hosts.greedy import greedy_tokens
from dloop.hosts.host import Segment
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.target_model import embedding, head
from dloop.hosts.tree_options import TreeOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockDrafter(ABC):
    """Batch 1; a family says how the block's rows become a chain, and a tree if one is asked for."""

    def __init__(self, network: Any, target: PreTrainedModel, tree: TreeOptions) -> None:
        config = network.config
        self.tree = tree
        self.network, self.embed, self.head = network, embedding(target), head(target)
        self.device = self.embed.weight.device
        self.stage_length = config.stage_length
        self.cache = KVCache(config.layers, config.kv_heads, config.head_dim, network.fc.weight.dtype, self.device)
        self.backbone = CachedBackbone(network, self.cache)
        self._mask_ids = torch.full((config.block_size,), config.mask_token_id, device=self.device)

    @abstractmethod
    def propose(self, rows_TD: Tensor, anchor: int) -> Segment:
        """The host's greedy chain from the block's draft rows, after its own logit corrections, and its tree."""

    def reset(self, capacity: int) -> None:
        """Empty the cache and make room for `capacity` committed tokens and one block behind them."""
        self.cache.rollback(0)
        self.cache.reserve(capacity + self.network.config.block_size)

    def begin(self, features: Tensor, tokens: Sequence[int]) -> None:
        """Take features [n, F] of the positions behind the cached ones; of the tokens only the root is of interest."""
        self._context = self.network.context(features)
        self._chain = [tokens[-1]]
        self._root_position = self.cache.length + len(features)
        self._bank = features.new_empty(0, self.network.config.hidden_size)

    def first_stage(self) -> Segment:
        """The host's own block behind the root."""
        return self._stage(self._context, first_position=self.cache.length)

    def next_stage(self) -> Segment:
        """A loop stage behind the last drafted token."""
        cached = self.cache.length - self._root_position
        # The newest token is the block's first row, so its state stays out until a later stage.
        fresh = self.network.loop_context(self._bank, cached, len(self._chain) - 2)
        return self._stage(fresh, first_position=self._root_position + 1 + cached)

    def end(self) -> None:
        """Keep the target's features alone."""
        self.cache.rollback(self._root_position)

    def _stage(self, context_CD: Tensor, first_position: int) -> Segment:
        anchor_position = self._root_position + len(self._chain) - 1
        block_ids = self._mask_ids.clone()
        block_ids[0] = self._chain[-1]
        raw_RD = self.backbone(self.embed(block_ids), context_CD, first_position, anchor_position)
        raw_TD = raw_RD[self.network.config.first_draft_row :]
        hidden_TD = self.network.norm(raw_TD)
        self._bank = torch.cat((self._bank, self.network.loop_rows(raw_TD, hidden_TD)))
        segment = self.propose(hidden_TD, self._chain[-1])
        self._chain += segment.chain
        return segment


def read_chain(logits_TV: Tensor, normaliser_T1: Tensor | None = None) -> tuple[list[int], list[float]]:
    """Greedy tokens and their float32 log-probabilities, brought to the host in one packed read.

    `normaliser_T1` is the float32 log-sum-exp of the rows, where the caller has it already.
    """
    logits_TV = logits_TV.float()
    if normaliser_T1 is None:
        normaliser_T1 = logits_TV.logsumexp(-1, keepdim=True)
    best_T = logits_TV.amax(-1) - normaliser_T1[:, 0]
    chain, log_probs = torch.stack((greedy_tokens(logits_TV).double(), best_T.double())).tolist()
    return [int(token) for token in chain], log_probs
