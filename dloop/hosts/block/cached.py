"""The backbone of the block drafters while decoding: one block behind cached context, batch 1, in few operations.

The same function as `BlockBackbone.forward`, over the same weights. Context rows go through no layer, so that one
product makes the keys and values of all layers. Shape letters: C context rows, R rows of a block, L layers, D hidden,
H heads, G key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop.hosts.attention import Kernel, grouped_attention
from dloop.hosts.block.network import BlockBackbone, rotary_tables
from dloop.hosts.kv_cache import KVCache, Put
from dloop.hosts.lean_layer import LeanLayer, Rotary, RotaryTable, normed, rotate

Outputs = tuple[Tensor, ...]
Read = Callable[[Tensor, Tensor], Outputs]
"""What a drafter makes of a block's rows [R, D] before the final norm, behind its anchor's id [1]."""


class CachedBackbone:
    """Runs blocks of `network` over `cache`; context rows become valid there, block rows do not."""

    def __init__(self, network: BlockBackbone, cache: KVCache, embed: nn.Module) -> None:
        config, weight = network.config, network.fc.weight
        self._cache, self._embed, self._heads, self._eps = cache, embed, config.heads, config.rms_norm_eps
        self._layers = [LeanLayer.of(layer, config.heads, config.kv_heads, self._eps) for layer in network.layers]
        first = config.heads * config.head_dim
        with torch.no_grad():
            self._context_weight = torch.cat([layer.projections[first:] for layer in self._layers])
            biases = [layer.projections_bias[first:] for layer in self._layers if layer.projections_bias is not None]
            self._context_bias = torch.cat(biases) if biases else None
            self._key_norms_LGE = torch.stack([layer.head_norms[config.heads :] for layer in self._layers])
        self._rotary = RotaryTable(
            lambda positions: rotary_tables(positions, config.head_dim, config.rope_theta, weight.dtype), weight.device
        )

    def __call__(
        self, ids_R: Tensor, context_CD: Tensor, context_position: int, block_position: int, read: Read
    ) -> Outputs:
        """What `read` makes of the block `ids_R`. Context rows stand from `context_position` on, the block's rows from
        `block_position` on."""
        return read(self.run(ids_R, context_CD, context_position, block_position), ids_R[:1])

    def run(self, ids_R: Tensor, context_CD: Tensor, context_position: int, block_position: int) -> Tensor:
        """Rows [R, D] of the block before the final norm."""
        start = self._cache.length + len(context_CD)
        end, place = start + len(ids_R), block_position + len(ids_R)
        self._cache.reserve(end)
        self._rotary.reserve(max(self._cache.capacity, place))
        rotary = self._rotary[context_position : context_position + len(context_CD)]
        places = self._cache.store[:, :, 0, :, self._cache.length : start]
        for kept, made_LGCE in zip(places, self.context_rows(context_CD, rotary), strict=True):
            kept.copy_(made_LGCE)
        self._cache.advance(len(context_CD))
        put = self._cache.behind(len(ids_R))
        return self.block(self._embed(ids_R), self._rotary[block_position:place], put, grouped_attention)

    def block(self, rows_RD: Tensor, rotary: Rotary, put: Put, attend: Kernel) -> Tensor:
        """Rows [R, D] behind all layers: `put` keeps their keys and values, `attend` lets their queries meet all."""
        for place, layer in enumerate(self._layers):
            turned, unturned = layer.project(rows_RD, rotary)
            keys, values = put(place, turned[:, self._heads :], unturned)
            queries = turned[:, : self._heads].transpose(0, 1)[None]
            rows_RD = layer.finish(rows_RD, attend(queries, keys, values))
        return rows_RD

    def context_rows(self, context_CD: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Keys and values [L, G, C, E] of context rows."""
        both = F.linear(context_CD, self._context_weight, self._context_bias)
        both_CL2GE = both.view(len(context_CD), len(self._layers), 2, *self._key_norms_LGE.shape[1:])
        cos, sin = rotary
        keys_CLGE = rotate(normed(both_CL2GE[:, :, 0], self._key_norms_LGE, self._eps), (cos[:, None], sin[:, None]))
        return keys_CLGE.permute(1, 2, 0, 3), both_CL2GE[:, :, 1].permute(1, 2, 0, 3)
