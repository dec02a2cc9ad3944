"""Block drafters with their stages over static shapes (`static_shapes.py`): context padded, block as it is.

Shape letters: R rows of a block, C context rows with padding, W attended rows of a cache, D hidden, L layers, G
key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from dloop.cli import UserError
from dloop.decoding.static_shapes import ROWS, Replay, StaticShapes, padded, scatter
from dloop.hosts.attention import group_bias, grouped_attention
from dloop.hosts.block.cached import CachedBackbone, Outputs, Read
from dloop.hosts.block.drafter import BlockDrafter
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.host import Drafter
from dloop.hosts.kv_cache import KVCache


class StaticBackbone(CachedBackbone):
    """The block drafters' stages over static shapes: context padded, block as it is; the head, the host's corrections
    and the greedy chain are part of what is captured."""

    def __init__(self, network: BlockBackbone, cache: KVCache, embed: nn.Module) -> None:
        super().__init__(network, cache, embed)
        self._shapes = StaticShapes(cache, self._rotary, ROWS[-1] + network.config.block_size)

    def __call__(
        self, ids_R: Tensor, context_CD: Tensor, context_position: int, block_position: int, read: Read
    ) -> Outputs:
        """As the backbone's, always with the same `read`; the answer holds until the next stage."""
        start, valid = self._cache.length, len(context_CD)
        count = padded(valid)
        self._shapes.settle(start + (count or valid) + len(ids_R))
        if count is None:
            return super().__call__(ids_R, context_CD, context_position, block_position, read)
        stage = self._shapes.at(count, start + count + len(ids_R), _Stage, self, read, len(ids_R), context_CD)
        self._cache.advance(valid)
        return stage(ids_R, context_CD, (start, start + valid, context_position, block_position))

    def stage_static(self, ids_R: Tensor, context_CD: Tensor, numbers_4: Tensor, width: int) -> Tensor:
        """Block rows [R, D]; `numbers_4` are the slots, then the positions, of the first context and block row."""
        rows_RD = self._embed(ids_R)
        context_slot, block_slot, context_position, block_position = numbers_4.split(1)
        context, block = (torch.arange(len(rows), device=rows.device) for rows in (context_CD, rows_RD))
        made = self.context_rows(context_CD, self._rotary[context_position + context])
        # The block's rows are written behind these and so over the padding.
        for store_LGWE, made_LGCE in zip(self._cache.store[:, :, 0, :, :width], made, strict=True):
            store_LGWE.index_copy_(2, context_slot + context, made_LGCE)
        seen_1W = (torch.arange(width, device=rows_RD.device) < block_slot + len(rows_RD))[None]
        group = self._heads // self._cache.store.shape[3]
        bias = group_bias(seen_1W.expand(len(rows_RD), -1), group, rows_RD.dtype)
        put = scatter(self._cache.store, block_slot + block, width)
        rotary = self._rotary[block_position + block]
        return self.block(rows_RD, rotary, put, partial(grouped_attention, bias=bias))


class _Stage:
    """A stage of one shape."""

    def __init__(
        self, backbone: StaticBackbone, read: Read, block: int, like_CD: Tensor, rows: int, width: int
    ) -> None:
        self._backbone, self._read, self._width = backbone, read, width
        self._context = like_CD.new_zeros(rows, like_CD.shape[1])
        self._ids, self._numbers = (torch.zeros(n, dtype=torch.long, device=like_CD.device) for n in (block, 4))
        self._replay = Replay(like_CD.device)

    def _run(self) -> Outputs:
        raw_RD = self._backbone.stage_static(self._ids, self._context, self._numbers, self._width)
        return self._read(raw_RD, self._ids[:1])

    def __call__(self, ids_R: Tensor, context_CD: Tensor, numbers: Sequence[int]) -> Outputs:
        self._ids.copy_(ids_R)
        self._context[: len(context_CD)].copy_(context_CD)
        self._numbers.copy_(torch.tensor(numbers))
        return self._replay(self._run)


def over_static_shapes(drafter: Drafter) -> Drafter:
    """Put `drafter`'s own backbone over static shapes; a UserError when it has none that can be."""
    if not isinstance(drafter, BlockDrafter):
        raise UserError("--runtime graphs serves DFlash, DSpark and Domino drafts; use --runtime eager for this one")
    drafter.backbone = StaticBackbone(drafter.network, drafter.cache, drafter.embed)
    return drafter
