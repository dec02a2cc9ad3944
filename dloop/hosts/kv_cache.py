"""Preallocated keys and values with a length: rolling back is a change of the length, a tree commit is one gather.

The draft side and the target side use the same class; nothing else in the project crops a cache.
Shape letters: G key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Put = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys [R, G, E], new values [R, G, E]) writes them and gives what the rows may attend to: keys and values
[1, G, K, E]."""


class KVCache:
    """Keys and values of all layers in one tensor [2, layers, 1, G, capacity, E]; rows below `length` are valid."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (2, layers, 1, kv_heads, 0, head_dim)
        self.store = torch.empty(self._shape, dtype=dtype, device=device)
        self.length = 0

    @property
    def capacity(self) -> int:
        """Rows that fit without moving the memory."""
        return self.store.shape[-2]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` in total. Grows by at least a quarter, keeping the valid rows; never shrinks."""
        if rows <= self.capacity:
            return
        shape = list(self._shape)
        shape[-2] = max(rows, self.capacity * 5 // 4)
        grown = torch.empty(shape, dtype=self.store.dtype, device=self.store.device)
        grown[..., : self.length, :] = self.store[..., : self.length, :]
        self.store = grown

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put rows [1, G, R, E] behind the valid ones of one layer and return all rows up to them.

        The length does not change: `advance` makes rows valid once all layers have written theirs.
        """
        end = self.length + keys.shape[-2]
        self.store[0, layer, :, :, self.length : end] = keys
        self.store[1, layer, :, :, self.length : end] = values
        return self.store[0, layer, :, :, :end], self.store[1, layer, :, :, :end]

    def behind(self, rows: int) -> Put:
        """A place for `rows` rows of every layer behind the valid ones; each layer then attends to all up to them."""
        start, end = self.length, self.length + rows
        # All layers' places at once: a slice a layer would cost as much as a small matrix product.
        new_keys, new_values = (part.unbind(0) for part in self.store[:, :, 0, :, start:end].transpose(2, 3))
        keys, values = (part.unbind(0) for part in self.store[..., :end, :])

        def put(layer: int, keys_RGE: Tensor, values_RGE: Tensor) -> tuple[Tensor, Tensor]:
            new_keys[layer].copy_(keys_RGE)
            new_values[layer].copy_(values_RGE)
            return keys[layer], values[layer]

        return put

    def advance(self, rows: int) -> None:
        """Declare the next `rows` written rows valid."""
        self.length += rows

    def rollback(self, length: int) -> None:
        """Forget everything behind the first `length` rows."""
        self.length = length

    def keep(self, start: int, rows: list[int]) -> None:
        """Of the rows written from `start` on keep those at offsets `rows` (ascending), packed at `start`."""
        count = len(rows)
        if rows != list(range(count)):
            index = torch.tensor(rows, device=self.store.device) + start
            # index_select copies before the write, so overlapping source and destination rows are safe.
            self.store[..., start : start + count, :] = self.store.index_select(-2, index)
        self.length = start + count
