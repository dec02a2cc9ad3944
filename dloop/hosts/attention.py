"""Attention over cached keys and values without copying them for every query head; drafts and target share it.

The library repeats keys and values to all query heads as soon as there is a mask; here the heads of one group are more
query rows of the same keys. Shape letters: H heads, G key/value heads, Q queries, K keys, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [1, H, Q, E], keys [1, G, K, E], values [1, G, K, E]) -> [1, H, Q, E]."""


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention [1, H, Q, E]; every query sees every key unless `bias` [H/G x Q, K] (`group_bias`) says no."""
    packed = queries.reshape(1, keys.shape[1], -1, queries.shape[-1])
    # Some kernels answer in an order of memory that no view can split by heads.
    return F.scaled_dot_product_attention(packed, keys, values, attn_mask=bias).reshape(queries.shape)


def group_bias(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """A boolean mask [Q, K] (True: seen) as what `grouped_attention` adds to the scores of `group` heads."""
    # Additive from the start: from a boolean mask every layer would make its own.
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf")).repeat(group, 1)


def causal_attention(queries: int, keys: int, group: int, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The kernel for `queries` rows that end `keys` rows: each sees what lies before it and itself.

    Made once a forward and called in every layer.
    """
    if queries == 1:
        return grouped_attention
    if queries == keys:
        return partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    if device.type == "cuda":
        # The flash kernel knows this alignment by itself and takes no mask.
        return partial(F.scaled_dot_product_attention, attn_mask=causal_lower_right(queries, keys), enable_gqa=True)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return partial(grouped_attention, bias=group_bias(seen, group, dtype))
