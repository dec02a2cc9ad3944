"""Training many blocks of one sequence at once: anchors, windows behind them, and who may see whom.

Every anchor opens one block; all blocks of a sequence run as one packed forward. Query rows are the blocks, key rows
are `[S context | N x X extra | N x R block]`, where the X extra rows of an anchor are the draft's own states of the
tokens drafted by earlier stages. Shape letters as in `network.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.hosts.block.network import Attend


def seeded(*parts: int) -> torch.Generator:
    """A CPU generator that is a function of `parts` alone, so that ranks and resumed runs agree."""
    digest = hashlib.sha256(",".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def sample_anchors(loss_mask: Tensor, num_anchors: int, generators: list[torch.Generator]) -> tuple[Tensor, Tensor]:
    """Anchor positions [B, N] (ascending) and whether each is real [B, N]; `loss_mask` is [B, S].

    Candidates are supervised tokens whose successor is supervised too, drawn without replacement
    (sgl-project/SpecForge, August 2026 layout). Missing ones are padded with position 0 and keep False.
    """
    drawn = []
    for mask, generator in zip(loss_mask.cpu().bool(), generators, strict=True):
        candidates = (mask[:-1] & mask[1:]).nonzero()[:, 0]
        chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
        drawn.append(candidates[chosen].sort().values)
    width = max(1, *(len(anchors) for anchors in drawn))
    positions = torch.stack([F.pad(anchors, (0, width - len(anchors))) for anchors in drawn])
    keep = torch.stack([torch.arange(width) < len(anchors) for anchors in drawn])
    return positions.to(loss_mask.device), keep.to(loss_mask.device)


@dataclass(frozen=True)
class Window:
    """What one stage trains on: per anchor its token, the T tokens behind it, and which of them count."""

    position_BN: Tensor
    keep_BN: Tensor
    anchor_BN: Tensor
    labels_BNT: Tensor
    mask_BNT: Tensor


def open_windows(input_ids: Tensor, loss_mask: Tensor, position_BN: Tensor, keep_BN: Tensor, length: int) -> Window:
    """Windows of `length` labels behind `position_BN`; labels beyond the sequence or unsupervised do not count."""
    last = input_ids.shape[1] - 1
    places_BNT = position_BN[..., None] + torch.arange(1, length + 1, device=position_BN.device)
    inside = places_BNT <= last
    flat = places_BNT.clamp(max=last).flatten(1)
    labels_BNT = input_ids.gather(1, flat).view_as(places_BNT)
    supervised = loss_mask.gather(1, flat).view_as(places_BNT).bool()
    return Window(
        position_BN=position_BN,
        keep_BN=keep_BN,
        anchor_BN=input_ids.gather(1, position_BN.clamp(max=last)),
        labels_BNT=labels_BNT,
        mask_BNT=keep_BN[..., None] & inside & supervised,
    )


def reaches(loss_mask: Tensor, position_BN: Tensor, keep_BN: Tensor, offset: int) -> Tensor:
    """Which blocks [B, N] can have a stage at `offset`: the path there is supervised and a label lies behind it."""
    last = loss_mask.shape[1] - 1
    path_BNO = position_BN[..., None] + torch.arange(1, offset + 1, device=position_BN.device)
    supervised = loss_mask.gather(1, path_BNO.clamp(max=last).flatten(1)).view_as(path_BNO).bool().all(-1)
    return keep_BN & (position_BN + offset + 1 <= last) & supervised


@dataclass(frozen=True)
class Packing:
    """Who sees whom in one packed stage; `extra` is X, the number of own-state rows an anchor brings."""

    context: int
    extra: int
    rows: int
    anchor_BN: Tensor
    keep_BN: Tensor

    def allowed(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether query row `query` sees key row `key` (indices that broadcast): the one statement of the mask."""
        block = query // self.rows
        own_extra = (key - self.context) // max(self.extra, 1) == block
        own_block = (key - self.context - self.anchors * self.extra) // self.rows == block
        in_context = key < self.context
        in_extra = ~in_context & (key < self.context + self.anchors * self.extra)
        seen = torch.where(
            in_context,
            key < self.anchor_BN[batch, block],
            torch.where(in_extra, own_extra, ~in_context & own_block),
        )
        # A padded block sees itself: a row without any key has no defined softmax on some kernels.
        return seen & (self.keep_BN[batch, block] | ~in_context)

    @property
    def anchors(self) -> int:
        return self.anchor_BN.shape[1]

    @property
    def queries(self) -> int:
        return self.anchors * self.rows

    @property
    def keys(self) -> int:
        return self.context + self.anchors * (self.extra + self.rows)

    def dense_mask(self) -> Tensor:
        """Boolean [B, 1, Q, K]."""
        device = self.anchor_BN.device
        batch = torch.arange(len(self.anchor_BN), device=device)[:, None, None]
        query = torch.arange(self.queries, device=device)[None, :, None]
        key = torch.arange(self.keys, device=device)[None, None, :]
        return self.allowed(batch, query, key)[:, None]


def attend_densely(packing: Packing) -> Attend:
    """Scaled dot-product attention under the dense mask: any device, and the oracle of the other one."""
    mask = packing.dense_mask()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


def attend_flexibly(packing: Packing) -> Attend:
    """flex_attention over a block mask built once a stage. Trains on CUDA; on a CPU it has no backward."""
    from torch.nn.attention.flex_attention import create_block_mask

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return packing.allowed(batch, query, key)

    mask = create_block_mask(
        visible,
        len(packing.anchor_BN),
        None,
        packing.queries,
        packing.keys,
        device=str(packing.anchor_BN.device),
    )
    kernel = _flex_kernel(packing.anchor_BN.is_cuda)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernel(q, k, v, block_mask=mask, enable_gqa=True)

    return attend


def _flex_kernel(compiled: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it materialises all scores: right for a check on a CPU, never for training.
    return torch.compile(flex_attention, dynamic=True) if compiled else flex_attention


ATTENTION_BACKENDS: dict[str, Callable[[Packing], Attend]] = {
    "sdpa": attend_densely,
    "flex_attention": attend_flexibly,
}
