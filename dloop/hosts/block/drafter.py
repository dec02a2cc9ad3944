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
from dloop.hosts.host import Segment, TreeSegment
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.target_model import embedding, head
from dloop.hosts.tree_options import TreeOptions
from dloop.trees.nodes import Nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class BlockDrafter(ABC):
    """Batch 1; a family says how the block's rows become a chain, and a tree if one is asked for.

    Shape letters: R rows of a block, T drafts a stage, D hidden, F features, C context rows, V vocabulary.
    """

    def __init__(self, network: Any, target: PreTrainedModel, tree: TreeOptions) -> None:
        config = network.config
        self.tree = tree
        self.network, self.embed, self.head = network, embedding(target), head(target)
        self.device = self.embed.weight.device
        self.stage_length = config.stage_length
        self.cache = KVCache(config.layers, config.kv_heads, config.head_dim, network.fc.weight.dtype, self.device)
        self.backbone = CachedBackbone(network, self.cache, self.embed)
        self._mask_ids = torch.full((config.block_size,), config.mask_token_id, device=self.device)

    @abstractmethod
    def read(self, rows_TD: Tensor, anchor_1: Tensor) -> tuple[Tensor, ...]:
        """The host's greedy chain behind `anchor_1` after its own logit corrections, packed (`pack_chain`), then what
        `grow` wants of the stage. Stays on the device and never waits for it."""

    @abstractmethod
    def grow(self, budget: int, anchor: int, rows_TD: Tensor, *kept: Tensor) -> Nodes:
        """The host's tree of `budget` nodes, from the draft rows of the stage and what `read` kept of it."""

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
        anchor = self._chain[-1]
        ids_R = self._mask_ids.clone()
        ids_R[0] = anchor
        loop_rows_TD, chain_2T, *kept = self.backbone(ids_R, context_CD, first_position, anchor_position, self._finish)
        self._bank = torch.cat((self._bank, loop_rows_TD))
        segment = self.segment(anchor, chain_2T, *kept)
        self._chain += segment.chain
        return segment

    def segment(self, anchor: int, chain_2T: Tensor, *kept: Tensor) -> TreeSegment:
        """A stage on the host, from its rows and what `read` made of them."""
        chain, log_probs = chain_2T.tolist()
        tokens = [int(token) for token in chain]
        return TreeSegment(tokens, log_probs, grow=lambda budget: self.grow(budget, anchor, *kept))

    def _finish(self, raw_RD: Tensor, anchor_1: Tensor) -> tuple[Tensor, ...]:
        """All that a stage leaves, of its rows before the final norm: loop rows, packed chain, rows, what grows."""
        raw_TD = raw_RD[self.network.config.first_draft_row :]
        rows_TD = self.network.norm(raw_TD)
        chain_2T, *kept = self.read(rows_TD, anchor_1)
        return self.network.loop_rows(raw_TD, rows_TD), chain_2T, rows_TD, *kept


def pack_chain(logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy tokens and their float32 log-probabilities [2, T] in one tensor, so that one read brings both to the host;
    and the rows' log-sum-exp [T, 1]."""
    logits_TV = logits_TV.float()
    tokens_T1 = greedy_tokens(logits_TV)[:, None]
    best_T1 = logits_TV.gather(-1, tokens_T1)
    # torch.logsumexp would look for the largest entries again.
    behind_best_T1 = (logits_TV - best_T1).exp_().sum(-1, keepdim=True).log_()
    return torch.cat((tokens_T1.double(), -behind_best_T1.double()), -1).T, best_T1 + behind_best_T1
