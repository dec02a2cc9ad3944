"""Who sees whom in an unroll: a row sees its true prefix and its own chain, and no other row's chain.

At step i, row j attends to the step-0 keys of rows 0..j, which come from the target's states, and to its own keys of
steps 1..i, which come from the draft's (sgl-project/SpecForge, test-time training). That is what a drafter sees behind
j committed tokens and i drafted ones. The chain's part is one score a step, not a matrix.

Shape letters: B batch, S sequence, H heads, G key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dloop.hosts.flex import flex_kernel

OwnRowAttention = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(queries [B, H, S, E], keys and values [B, G, S, E] of each step so far) -> [B, H, S, E]."""


def attend_densely(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """All scores at once: any device, and the oracle of the other one."""
    heads = q.shape[1] // keys[0].shape[1]
    later = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    prefix_keys = keys[0].repeat_interleave(heads, 1).flatten(0, 1)
    prefix = torch.baddbmm(later, _scaled(q).flatten(0, 1), prefix_keys.transpose(1, 2)).unflatten(0, q.shape[:2])
    scores = torch.cat((prefix, _own_scores(q, keys[1:])), dim=-1)
    weights = scores.float().softmax(-1).to(q.dtype)
    seen, own = weights.split((q.shape[2], len(keys) - 1), dim=-1)
    return seen @ values[0].repeat_interleave(heads, 1) + _own_values(own, values[1:], heads)


def attend_flexibly(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """flex_attention over the prefix, merged with the chain by log-sum-exp. Trains on CUDA, on a CPU only forward."""
    from torch.nn.attention.flex_attention import AuxRequest

    prefix, aux = flex_kernel(q.is_cuda)(
        q,
        keys[0],
        values[0],
        block_mask=_causal(q.shape[2], q.device),
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    if len(keys) == 1:
        return prefix
    scores = torch.cat((aux.lse[..., None], _own_scores(q, keys[1:]).float()), dim=-1)
    share, own = scores.softmax(-1).to(q.dtype).split((1, len(keys) - 1), dim=-1)
    return share * prefix + _own_values(own, values[1:], q.shape[1] // keys[0].shape[1])


def _scaled(q: Tensor) -> Tensor:
    return q * q.shape[-1] ** -0.5


def _own_scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scores [B, H, S, steps] of each row with its own later keys."""
    if not keys:
        return q.new_empty(*q.shape[:-1], 0)
    grouped = _scaled(q).unflatten(1, (keys[0].shape[1], -1))
    return torch.stack([(grouped * key[:, :, None]).sum(-1) for key in keys], dim=-1).flatten(1, 2)


def _own_values(weights: Tensor, values: Sequence[Tensor], heads: int) -> Tensor:
    """[B, H, S, E] from weights [B, H, S, steps]; nothing where there is no later step."""
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for weight, value in zip(weights.unbind(-1), values, strict=True):
        total = total + weight[..., None] * value.repeat_interleave(heads, 1)
    return total


@lru_cache(maxsize=64)
def _causal(rows: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(_visible, None, None, rows, rows, device=str(device))


def _visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    # One function for all lengths: a compiled kernel is made again for each new one.
    return key <= query


OWN_ROW_ATTENTION: dict[str, OwnRowAttention] = {"sdpa": attend_densely, "flex_attention": attend_flexibly}
"""By the name of `--attention-backend`."""
