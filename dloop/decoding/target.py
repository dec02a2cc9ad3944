"""The target while decoding, batch 1: prefill, verify, commit. Nothing else touches its cache.

Full-attention models of the library run over our preallocated memory, so that rolling back is a change of length.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from dloop.cli import UserError
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.target_model import Taps, decoder, embedding
from dloop.trees.draft_tree import DraftTree


class Target:
    """One causal language model; `taps` names the submodules whose outputs the drafter wants as features."""

    def __init__(self, model: PreTrainedModel, taps: Sequence[str] = ()) -> None:
        config = model.config.get_text_config()
        _refuse_partial_attention(config)
        self.model, self.device = model, embedding(model).weight.device
        self.cache = KVCache(
            config.num_hidden_layers,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            embedding(model).weight.dtype,
            self.device,
        )
        self._taps = Taps(model, taps)
        self._cache_argument = {_cache_name(model): _LibraryCache(self.cache)}
        self._mask = torch.ones(1, 1, 0, 0, dtype=torch.bool, device=self.device)
        self._masked = (0, 0)
        self._features = torch.empty(0)

    def reset(self, capacity: int) -> None:
        """Forget the last response and make room for `capacity` rows: prompt, new tokens and the longest tree."""
        self.cache.rollback(0)
        self.cache.reserve(capacity)

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
        """The greedy token behind every node of `tree`, from one forward over all of them."""
        length, rows = self.cache.length, len(tree)
        self.cache.reserve(length + rows)
        packed = torch.tensor([tree.tokens, tree.depths], device=self.device)
        mask = None if tree.is_chain else self._tree_mask(tree)
        logits = self._forward(packed[:1], packed[1] + length, mask)
        self.cache.rollback(length)
        return logits.argmax(-1).tolist()

    def commit(self, path: Sequence[int]) -> Tensor:
        """Keep the rows of the accepted `path` (node ids from the root down); returns their features [len(path), F]."""
        self.cache.keep(self.cache.length, list(path))
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
            **self._cache_argument,
        )
        states = self._taps.take()
        if states:
            self._features = torch.cat([states[name][0] for name in self._taps.names], dim=-1)
        return output.logits[0]

    def _tree_mask(self, tree: DraftTree) -> Tensor:
        """Boolean [1, 1, N, length + N]: the whole past, then ancestors alone. Only the changed block is written."""
        start, rows = self.cache.length, len(tree)
        if rows > self._mask.shape[2] or start + rows > self._mask.shape[3]:
            shape = (1, 1, max(rows, self._mask.shape[2]), max(self.cache.capacity, start + rows))
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


def _refuse_partial_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    if kinds:
        raise UserError(
            f"the target has layers of type {', '.join(sorted(kinds))}, whose cache cannot be rolled back by length; "
            "only full-attention targets are supported"
        )


def _cache_name(model: PreTrainedModel) -> str:
    # transformers 5.24 renamed the argument; the old name only warns there and is the only one before.
    return "cache" if "cache" in inspect.signature(decoder(model).forward).parameters else "past_key_values"


class _LibraryLayer(CacheLayerMixin):
    """What the library asks of one layer's cache, answered from our memory."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, rows: KVCache, layer: int, last: bool) -> None:
        super().__init__()
        self._rows, self._layer, self._last = rows, layer, last
        self.is_initialized = True

    def lazy_initialization(self, *tensors: Tensor) -> None:
        """The memory exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        views = self._rows.write(self._layer, key_states, value_states)
        if self._last:
            # Masks and positions of a forward are made before its first layer, so one shared length is enough.
            self._rows.advance(key_states.shape[-2])
        return views

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._rows.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class _LibraryCache(Cache):
    """Our memory in the library's clothes; rolling back stays with `Target`."""

    def __init__(self, rows: KVCache) -> None:
        layers = rows.store.shape[1]
        super().__init__(layers=[_LibraryLayer(rows, layer, layer == layers - 1) for layer in range(layers)])
