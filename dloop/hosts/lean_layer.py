"""A Qwen3-style decoder layer over the weights of a module, batch 1, in few operations.

Modules spend more time between their matrix products than in them at batch 1: norms in several operations, a product
for each projection, module calls around it all. This is the same arithmetic in the same precision. The target's lean
runtime and the block drafts share it. Shape letters: R rows, D hidden, H heads, G key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosine and signed sine [R, 1, E] of each row's position."""


class LeanLayer(NamedTuple):
    """One decoder layer's weights; query, key and value projections are one matrix, gate and up another."""

    input_norm: Tensor
    projections: Tensor
    projections_bias: Tensor | None
    head_norms: Tensor
    """The norms of queries and keys, one row a head [H + G, E]."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor
    eps: float

    @classmethod
    def of(cls, layer: Any, heads: int, kv_heads: int, eps: float) -> LeanLayer:
        """The weights of a module named as Qwen3's; they stay the module's own."""
        attention, mlp = layer.self_attn, layer.mlp
        three = (attention.q_proj, attention.k_proj, attention.v_proj)
        norms = (attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(kv_heads, -1))
        return cls(
            layer.input_layernorm.weight,
            fuse(*three),
            None if three[0].bias is None else torch.cat([projection.bias for projection in three]),
            torch.cat(norms),
            attention.o_proj.weight,
            attention.o_proj.bias,
            layer.post_attention_layernorm.weight,
            fuse(mlp.gate_proj, mlp.up_proj),
            mlp.down_proj.weight,
            eps,
        )

    def project(self, x: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Rotated queries and keys [R, H + G, E] and values [R, G, E] of rows [R, D]."""
        turned, size = self.head_norms.shape
        rows = F.linear(normed(x, self.input_norm, self.eps), self.projections, self.projections_bias)
        rows = rows.view(len(x), -1, size)
        return rotate(normed(rows[:, :turned], self.head_norms, self.eps), rotary), rows[:, turned:]

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Rows behind the layer, of the rows before it and what attention [1, H, R, E] made of them."""
        x = x + F.linear(mixed[0].transpose(0, 1).reshape(len(x), -1), self.output, self.output_bias)
        gate, up = F.linear(normed(x, self.mlp_norm, self.eps), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, weighted behind the rounding to the model's precision, as in Qwen3."""
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """The half-split rotary embedding of [R, heads, E]."""
    return x * rotary[0] + x.roll(x.shape[-1] // 2, -1) * rotary[1]


class RotaryTable:
    """Cosine and signed sine of every position below a capacity; `make` gives both, P x E, for positions [1, P]."""

    def __init__(self, make: Callable[[Tensor], tuple[Tensor, Tensor]], device: torch.device) -> None:
        self._make, self._device = make, device
        self._length = 0

    def reserve(self, positions: int) -> None:
        """Cover the positions below `positions`."""
        if positions > self._length:
            self._length = positions
            cos, sin = self._make(torch.arange(positions, device=self._device)[None])
            half = sin.shape[-1] // 2
            signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
            self._cos, self._sin = (part.view(positions, 1, -1) for part in (cos, signed))

    def __getitem__(self, positions: Tensor | slice) -> Rotary:
        return self._cos[positions], self._sin[positions]


# Whoever decodes first must leave weights that can still be trained.
@torch.inference_mode(False)
@torch.no_grad()
def fuse(*modules: nn.Linear) -> Tensor:
    """The modules' weights stacked; from here on theirs are slices of this tensor, so that nothing is stored twice."""
    weights = [module.weight for module in modules]
    rows, columns = sum(map(len, weights)), weights[0].shape[1]
    if len({weight.untyped_storage().data_ptr() for weight in weights}) == 1:
        # Fused before: the first slice begins the whole.
        return weights[0].data.as_strided((rows, columns), (columns, 1))
    stacked = torch.cat(weights)
    for module, part in zip(modules, stacked.split([len(weight) for weight in weights]), strict=True):
        module.weight.data = part
    return stacked
