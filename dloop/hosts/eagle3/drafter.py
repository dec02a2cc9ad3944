"""Drafting with EAGLE-3: extend over what the target confirmed, expand a beam level by level, loop behind its chain.

The cache holds one row a committed token, made of the target's features; behind them come, for a later stage, the rows
of the chains drafted so far, and at its end the rows of the beam at work. Only the first kind survives a verification.

Shape letters: K rows of a level, D hidden, V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.hosts.eagle3.network import Eagle3Network
from dloop.hosts.host import Segment, TreeSegment
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.target_model import embedding
from dloop.hosts.tree_options import TreeOptions
from dloop.trees.dynamic import expand, rerank

if TYPE_CHECKING:
    from transformers import PreTrainedModel


DEFAULT_WIDTH = 10
"""Prefixes a level expands, and tokens tried behind each (SafeAILab/EAGLE)."""


class Eagle3Drafter:
    """Batch 1."""

    def __init__(self, network: Eagle3Network, target: PreTrainedModel, tree: TreeOptions) -> None:
        config = network.config
        self.network, self.depth = network, tree.tree_depth
        self.width = (tree.topk_k or DEFAULT_WIDTH) if tree.tree_budget else 1
        self.embed = getattr(network, "embed_tokens", None) or embedding(target)
        self.device = self.embed.weight.device
        self.stage_length = self.depth + 1
        self.cache = KVCache(1, config.kv_heads, config.head_dim, network.fc.weight.dtype, self.device)
        self.target_ids = network.target_ids
        self._tokens: list[int] = self.target_ids.tolist()

    def reset(self, capacity: int) -> None:
        """Empty the cache and make room for `capacity` committed tokens and one beam behind them."""
        self.cache.rollback(0)
        self.cache.reserve(capacity + 1 + self.width * self.depth)

    def begin(self, features: Tensor, tokens: Sequence[int]) -> None:
        """Extend over features [n, F] of the positions behind the cached ones; each row reads the token behind it."""
        self._extend(self.network.fuse(features), tokens)
        self._confirmed = self.cache.length

    def first_stage(self) -> Segment:
        """The beam behind the root. The budget of its tree counts the root, as EAGLE's does."""
        return self._stage(counts_root=True)

    def next_stage(self) -> Segment:
        """A beam behind the last chain: of the last beam's rows only those of the chain stay."""
        token, rows = self._anchor
        state_1D = self._beam.output(rows[-1]) if rows else self._state_1D
        self.cache.keep(self._beam.start, rows)
        self._extend(state_1D, [token])
        return self._stage(counts_root=False)

    def end(self) -> None:
        """Keep the rows made of the target's features alone."""
        self.cache.rollback(self._confirmed)

    def _extend(self, states_ND: Tensor, tokens: Sequence[int]) -> None:
        """Append one row a token, causally; the last one's output is what the next beam starts from."""
        past, rows = self.cache.length, len(tokens)
        mask = None
        if rows > 1:
            mask = torch.ones(rows, past + rows, dtype=torch.bool, device=self.device).tril(past)
        positions_N = torch.arange(past, past + rows, device=self.device)
        self._state_1D = self.run(states_ND, torch.tensor(tokens, device=self.device), positions_N, mask)[-1:]

    def run(self, states_ND: Tensor, ids_N: Tensor, positions_N: Tensor, mask: Tensor | None) -> Tensor:
        """Outputs [N, D] of rows that read target `ids_N`; their keys and values go to the end of the cache."""
        self.cache.reserve(self.cache.length + len(ids_N))

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self.cache.write(0, k, v)
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)

        out_1ND = self.network(states_ND[None], self.embed(ids_N)[None], positions_N[None], attend)
        self.cache.advance(len(ids_N))
        return out_1ND[0]

    def _stage(self, counts_root: bool) -> Segment:
        self._beam = Beam(self, self._state_1D)
        expansion = expand(self._beam, self.width, self.depth)
        chain, tokens = expansion.chain(), [self._tokens[draft_id] for draft_id in expansion.ids]
        sums = [0.0, *(expansion.scores[entry] for entry in chain)]
        self._anchor = tokens[chain[-1]], [expansion.row(entry) for entry in chain[1:]]
        return TreeSegment(
            chain=[tokens[entry] for entry in chain],
            log_probs=[after - before for before, after in pairwise(sums)],
            grow=lambda budget: rerank(expansion, tokens, budget),
            counts_root=counts_root,
        )


class Beam:
    """One stage's rows, behind the `start` rows the cache holds already: each sees those, its ancestors and itself."""

    def __init__(self, drafter: Eagle3Drafter, state_1D: Tensor) -> None:
        self.drafter, self.start = drafter, drafter.cache.length
        self._levels = [state_1D]
        self._visible = torch.empty(1, 0, dtype=torch.bool, device=drafter.device)

    def root_logits(self) -> Tensor:
        """Logits [1, V] behind the stage's root."""
        return self.drafter.network.logits(self._levels[0])

    def advance(self, parents_K: Tensor, ids_K: Tensor) -> Tensor:
        """Logits [K, V] behind new tokens, whose parents are rows of the level before."""
        width, device = len(ids_K), self.drafter.device
        itself = torch.eye(width, dtype=torch.bool, device=device)
        self._visible = torch.cat((self._visible[parents_K], itself), dim=1)
        positions_K = torch.full((width,), self.start + len(self._levels) - 1, device=device)
        mask = F.pad(self._visible, (self.start, 0), value=True)
        states_KD = self._levels[-1][parents_K]
        self._levels.append(self.drafter.run(states_KD, self.drafter.target_ids[ids_K], positions_K, mask))
        return self.drafter.network.logits(self._levels[-1])

    def output(self, row: int) -> Tensor:
        """The output [1, D] of the row that was cached at offset `row`."""
        level, place = divmod(row, len(self._levels[-1]))
        return self._levels[level + 1][place : place + 1]
