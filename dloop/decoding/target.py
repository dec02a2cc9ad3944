"""The target while decoding, batch 1: prefill, verify, commit. Nothing else touches its cache.

How the cache rolls back is the cache's own business (`dloop/hosts/target_cache.py`), what computes a forward the
runtime's (`dloop/decoding/runtimes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dloop.cli import UserError
from dloop.decoding.runtimes import open_runtime
from dloop.hosts.greedy import greedy_tokens
from dloop.hosts.target_cache import open_cache
from dloop.hosts.target_model import embedding
from dloop.trees.draft_tree import DraftTree


class Target:
    """One causal language model; `taps` names the submodules whose outputs the drafter wants as features, `runtime`
    what computes it."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[str] = (), runtime: str = "library") -> None:
        self.model, self.device = model, embedding(model).weight.device
        self.cache = open_cache(model)
        self._runtime = open_runtime(runtime, model, self.cache, taps)
        self._mask = torch.ones(0, 0, dtype=torch.bool, device=self.device)
        self._masked, self._capacity = (0, 0), 0
        self._features = torch.empty(0)

    def reset(self, capacity: int) -> None:
        """Forget the last response and make room for `capacity` rows: prompt, new tokens and the longest tree."""
        self._capacity = capacity
        self.cache.reset(capacity)

    def prefill(self, prompt_ids: Sequence[int]) -> tuple[int, Tensor]:
        """Run the prompt; returns the first new token and the features [P, F] of the prompt."""
        return int(greedy_tokens(self._read(prompt_ids))), self._features

    def top_margin(self, ids: Sequence[int]) -> float:
        """The gap between the two largest logits behind `ids`: how close the target's choice there is to a tie."""
        first, second = self._read(ids).float().topk(2).values.tolist()
        return first - second

    def verify(self, tree: DraftTree) -> list[int]:
        """The greedy token behind every node of `tree`, from one forward over all of them; `commit` must follow."""
        if not (tree.is_chain or self.cache.takes_trees):
            raise UserError(
                "some layers of the target can roll back chains alone, so it verifies no tree; leave out --tree-budget"
            )
        length = self.cache.length
        places = [length + depth for depth in tree.depths]
        packed = torch.tensor([tree.tokens, places], device=self.device)
        with self.cache.verification(len(tree)):
            mask = None if tree.is_chain else self._tree_mask(tree)
            choices, self._features = self._runtime.verify(packed[0], packed[1], mask)
        return choices.tolist()

    def commit(self, path: Sequence[int]) -> Tensor:
        """Keep the rows of the accepted `path` (node ids from the root down); returns their features [len(path), F]."""
        rows = range(len(path)) if self._runtime.accepted_first else path
        self.cache.keep(rows)
        if rows[-1] == len(rows) - 1:
            return self._features[: len(rows)]
        return self._features[torch.tensor(rows, device=self.device)]

    def _read(self, ids: Sequence[int]) -> Tensor:
        """Logits [V] behind `ids`, run from an empty cache."""
        positions = torch.arange(len(ids), device=self.device)
        logits, self._features = self._runtime.forward(
            torch.tensor(ids, device=self.device), positions, None, last=True
        )
        return logits[-1]

    def _tree_mask(self, tree: DraftTree) -> Tensor:
        """Boolean [N, length + N]: the whole past, then ancestors alone. Only the changed block is written."""
        start, rows = self.cache.length, len(tree)
        if rows > self._mask.shape[0] or start + rows > self._mask.shape[1]:
            shape = (max(rows, self._mask.shape[0]), max(self._capacity, start + rows))
            self._mask = torch.ones(shape, dtype=torch.bool, device=self.device)
        else:
            old_start, old_rows = self._masked
            self._mask[:, old_start : old_start + old_rows] = True
        self._masked = (start, rows)
        self._mask[:rows, start : start + rows] = tree.ancestor_mask().to(self.device)
        return self._mask[:rows, : start + rows]

    def close(self) -> None:
        """Take the hooks off the model."""
        self._runtime.close()
