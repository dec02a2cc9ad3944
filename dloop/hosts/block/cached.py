"""The backbone of the block drafters while decoding: one block behind cached context, batch 1, in few operations.

The same function as `BlockBackbone.forward`, over the same weights. Context rows go through no layer, so that one
product makes the keys and values of all layers. Shape letters: C context rows, R rows of a block, L layers, D hidden,
H heads, G key/value heads, E head dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.hosts.attention import grouped_attention
from dloop.hosts.block.network import BlockBackbone, rotary_tables
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.lean_layer import LeanLayer, RotaryTable, normed, rotate


class CachedBackbone:
    """Runs blocks of `network` over `cache`; context rows become valid there, block rows do not."""

    def __init__(self, network: BlockBackbone, cache: KVCache) -> None:
        config, weight = network.config, network.fc.weight
        self._cache, self._heads, self._eps = cache, config.heads, config.rms_norm_eps
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

    def __call__(self, rows_RD: Tensor, context_CD: Tensor, context_position: int, block_position: int) -> Tensor:
        """Rows [R, D] before the final norm. Context rows stand from `context_position` on, the block's rows from
        `block_position` on."""
        start = self._cache.length + len(context_CD)
        end, place = start + len(rows_RD), block_position + len(rows_RD)
        self._cache.reserve(end)
        self._rotary.reserve(max(self._cache.capacity, place))
        self._write_context(context_CD, context_position)
        rotary = self._rotary[block_position:place]
        new_keys, new_values = (part.unbind(0) for part in self._cache.store[:, :, 0, :, start:end].transpose(2, 3))
        keys, values = (part.unbind(0) for part in self._cache.store[..., :end, :])
        for place, layer in enumerate(self._layers):
            turned, unturned = layer.project(rows_RD, rotary)
            new_keys[place].copy_(turned[:, self._heads :])
            new_values[place].copy_(unturned)
            queries = turned[:, : self._heads].transpose(0, 1)[None]
            rows_RD = layer.finish(rows_RD, grouped_attention(queries, keys[place], values[place]))
        return rows_RD

    def _write_context(self, context_CD: Tensor, position: int) -> None:
        rows, start = len(context_CD), self._cache.length
        both = F.linear(context_CD, self._context_weight, self._context_bias)
        both_CL2GE = both.view(rows, len(self._layers), 2, *self._key_norms_LGE.shape[1:])
        cos, sin = self._rotary[position : position + rows]
        keys_CLGE = rotate(normed(both_CL2GE[:, :, 0], self._key_norms_LGE, self._eps), (cos[:, None], sin[:, None]))
        places = self._cache.store[:, :, 0, :, start : start + rows]
        places[0].copy_(keys_CLGE.permute(1, 2, 0, 3))
        places[1].copy_(both_CL2GE[:, :, 1].permute(1, 2, 0, 3))
        self._cache.advance(rows)
