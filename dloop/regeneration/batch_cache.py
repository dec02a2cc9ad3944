"""A cache for batches that grow token by token and lose rows on the way.

The library's dynamic cache copies all keys and values for every new token, which is most of the time of a batch on
a CPU; here they stand in memory with room to spare. Sliding layers stay the library's own, linear ones learn to lose
rows. Knows nothing of sampling.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

LEAST_ROOM = 64


class RoomyLayer(DynamicLayer):
    """Keys and values [B, heads, capacity, head_dim] of a full-attention layer; `keys`, `values` are the used part."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append the states of new tokens; returns all keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._stores = (key_states[..., :0, :], value_states[..., :0, :])
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if end > self._stores[0].shape[-2]:
            self._stores = (_grown(self._stores[0], start, end), _grown(self._stores[1], start, end))
        for store, states in zip(self._stores, (key_states, value_states), strict=True):
            store[..., start:end, :] = states
        self._show(end)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` of the batch."""
        length = self.get_seq_length()
        self._stores = (self._stores[0][indices], self._stores[1][indices])
        self._show(length)

    def _show(self, length: int) -> None:
        self.keys, self.values = (store[..., :length, :] for store in self._stores)


class SelectableLinearLayer(LinearAttentionLayer):
    """States of a linear-attention layer, one a row of the batch."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` of the batch."""
        for states in (self.conv_states, self.recurrent_states):
            for place, state in states.items():
                states[place] = None if state is None else state[indices]


def _grown(store: Tensor, used: int, needed: int) -> Tensor:
    shape = list(store.shape)
    shape[-2] = max(needed + LEAST_ROOM, used + used // 2)
    grown = store.new_empty(shape)
    grown[..., :used, :] = store[..., :used, :]
    return grown


class BatchCache(DynamicCache):
    """The cache of one batch for any model of the library."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = RoomyLayer()
            elif type(layer) is LinearAttentionLayer:
                self.layers[index] = SelectableLinearLayer()

    @property
    def can_select(self) -> bool:
        """Whether rows can be taken out; not every kind of layer the library has can do that."""
        return all(hasattr(layer, "batch_select_indices") for layer in self.layers)


def cache_argument(model: torch.nn.Module) -> str:
    """The name of the cache among the arguments of `model`; it depends on the version of the library."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
