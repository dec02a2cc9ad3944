"""The target while decoding, batch 1: prefill, verify, commit. Nothing else touches its cache.

How the cache rolls back is the cache's own business (`dloop/hosts/target_cache.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dloop.cli import UserError
from dloop.hosts.target_cache import open_cache
from dloop.hosts.target_model import Taps, decoder, embedding
from dloop.trees.draft_tree import DraftTree


class Target:
    """One causal language model; `taps` names the submodules whose outputs the drafter wants as features."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[str] = ()) -> None:
        self.model, self.device = model, embedding(model).weight.device
        self.cache = open_cache(model)
        self._taps = Taps(model, taps)
        self._cache_name = _cache_name(model)
        self._mask = torch.ones(1, 1, 0, 0, dtype=torch.bool, device=self.device)
        self._masked, self._capacity = (0, 0), 0
        self._features = torch.empty(0)

    def reset(self, capacity: int) -> None:
        """Forget the last response and make room for `capacity` rows: prompt, new tokens and the longest tree."""
        self._capacity = capacity
        self.cache.reset(capacity)

    def prefill(self, prompt_ids: Sequence[int]) -> tuple[int, Tensor]:
        """Run the prompt; returns the first new token and the features [P, F] of the prompt."""
        ids = torch.tensor([prompt_ids], device=self.device)
        logits = self._forward(ids, torch.arange(len(prompt_ids), device=self.device), None, logits_to_keep=1)
        return int(logits[-1].argmax()), self._features

    def top_margin(self, ids: Sequence[int]) -> float:
        """The gap between the two largest logits behind `ids`: how close the target's choice there is to a tie."""
        logits = self._forward(
            torch.tensor([ids], device=self.device),
            torch.arange(len(ids), device=self.device),
            None,
            logits_to_keep=1,
        )
        first, second = logits[-1].float().topk(2).values.tolist()
        return first - second

    def verify(self, tree: DraftTree) -> list[int]:
        """The greedy token behind every node of `tree`, from one forward over all of them; `commit` must follow."""
        if not (tree.is_chain or self.cache.takes_trees):
            raise UserError(
                "some layers of the target can roll back chains alone, so it verifies no tree; leave out --tree-budget"
            )
        length = self.cache.length
        packed = torch.tensor([tree.tokens, tree.depths], device=self.device)
        with self.cache.verification(len(tree)):
            mask = None if tree.is_chain else self._tree_mask(tree)
            logits = self._forward(packed[:1], packed[1] + length, mask)
        return logits.argmax(-1).tolist()

    def commit(self, path: Sequence[int]) -> Tensor:
        """Keep the rows of the accepted `path` (node ids from the root down); returns their features [len(path), F]."""
        self.cache.keep(path)
        if path[-1] == len(path) - 1:
            return self._features[: len(path)]
        return self._features[torch.tensor(path, device=self.device)]

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None, logits_to_keep: int = 0) -> Tensor:
        """Logits [R, V] of the wanted rows; the features of all rows are kept aside."""
        output = self.model(
            input_ids=ids,
            position_ids=positions[None],
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{self._cache_name: self.cache.library},
        )
        states = self._taps.take()
        if states:
            self._features = torch.cat([states[name][0] for name in self._taps.names], dim=-1)
        return output.logits[0]

    def _tree_mask(self, tree: DraftTree) -> Tensor:
        """Boolean [1, 1, N, length + N]: the whole past, then ancestors alone. Only the changed block is written."""
        start, rows = self.cache.length, len(tree)
        if rows > self._mask.shape[2] or start + rows > self._mask.shape[3]:
            shape = (1, 1, max(rows, self._mask.shape[2]), max(self._capacity, start + rows))
            self._mask = torch.ones(shape, dtype=torch.bool, device=self.device)
        else:
            old_start, old_rows = self._masked
            self._mask[:, :, :, old_start : old_start + old_rows] = True
        self._masked = (start, rows)
        self._mask[:, :, :rows, start : start + rows] = tree.ancestor_mask().to(self.device)
        return self._mask[:, :, :rows, : start + rows]

    def close(self) -> None:
        """Take the hooks off the model."""
        self._taps.close()


def _cache_name(model: PreTrainedModel) -> str:
    # transformers 5.24 renamed the argument; the old name only warns there and is the only one before.
    return "cache" if "cache" in inspect.signature(decoder(model).forward).parameters else "past_key_values"
