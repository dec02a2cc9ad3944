"""Training many blocks of one sequence at once: anchors, windows behind them, and who may see whom.

Every anchor opens one block; all blocks of a sequence run as one packed forward. Query rows are the blocks [N x R],
key rows are `[S context | N x (X + R) own]`: an anchor's own rows are X states of the draft, of the tokens drafted by
earlier stages, and its block. Shape letters as in `network.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.hosts.block.network import Attend, KeysValues
from dloop.hosts.flex import flex_kernel


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


def keep_alone(keep_BN: Tensor) -> tuple[Tensor, Tensor]:
    """An index of [B, N] tensors that leaves the kept blocks [B, M] in their order; rows with fewer are padded."""
    most = max(1, int(keep_BN.sum(-1).max()))
    kept_first_BN = (~keep_BN).byte().sort(dim=-1, stable=True).indices
    return torch.arange(len(keep_BN), device=keep_BN.device)[:, None], kept_first_BN[:, :most]


@dataclass(frozen=True)
class Packing:
    """Who sees whom in one packed stage; `extra` is X, the number of own-state rows an anchor brings."""

    context: int
    extra: int
    rows: int
    anchor_BN: Tensor
    keep_BN: Tensor

    @property
    def anchors(self) -> int:
        return self.anchor_BN.shape[1]

    @property
    def queries(self) -> int:
        return self.anchors * self.rows

    @property
    def keys(self) -> int:
        return self.context + self.anchors * (self.extra + self.rows)

    def context_mask(self) -> Tensor:
        """Which context rows a block sees [B, N, S]: those before its first anchor, none if it is padding."""
        places_S = torch.arange(self.context, device=self.anchor_BN.device)
        return (places_S < self.anchor_BN[..., None]) & self.keep_BN[..., None]

    def allowed(self) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Whether a query row sees a key row, as a function of (batch, query, key) indices that broadcast.

        It reads tables alone: numbers in it would be constants of a compiled kernel, made again for each new one.
        """
        blocks_N = torch.arange(self.anchors, device=self.anchor_BN.device)
        block_Q = blocks_N.repeat_interleave(self.rows)
        owner_K = F.pad(blocks_N.repeat_interleave(self.extra + self.rows), (self.context, 0), value=-1)
        anchor_BN, keep_BN = self.anchor_BN, self.keep_BN

        def allowed(batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block, owner = block_Q[query], owner_K[key]
            before = (owner < 0) & (key < anchor_BN[batch, block]) & keep_BN[batch, block]
            # A padded block sees itself: a row without any key has no defined softmax on some kernels.
            return before | (owner == block)

        return allowed


def attend_densely(packing: Packing) -> Attend:
    """All scores of a block with the context and with its own rows, none with another's: any device."""
    hidden_BNS = ~packing.context_mask()

    def attend(q: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        groups, (batch, heads, _, size) = own[0].shape[1], q.shape
        bias_BN1S = torch.zeros_like(hidden_BNS, dtype=q.dtype).masked_fill_(hidden_BNS, float("-inf"))[
            :, None, :, None
        ]
        # The heads of a group are more rows of the same keys: [B, G, N, H/G x R, E].
        q = (q * size**-0.5).view(batch, groups, -1, packing.anchors, packing.rows, size).transpose(2, 3).flatten(3, 4)
        to_context = (q.flatten(2, 3) @ context[0].mT).view(*q.shape[:-1], -1)
        scores = torch.cat((to_context + bias_BN1S, q @ own[0].mT), dim=-1)
        seen, mine = scores.float().softmax(-1).to(q.dtype).split((packing.context, own[0].shape[3]), dim=-1)
        out = (seen.flatten(2, 3) @ context[1]).view(q.shape) + mine @ own[1]
        return out.unflatten(3, (-1, packing.rows)).transpose(2, 3).reshape(batch, heads, -1, size)

    return attend


def attend_flexibly(packing: Packing) -> Attend:
    """flex_attention over a block mask built once a stage. Trains on CUDA; on a CPU it has no backward."""
    mask, kernel = block_mask(packing), flex_kernel(packing.anchor_BN.is_cuda)

    def attend(q: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        k, v = (torch.cat((first, second.flatten(2, 3)), dim=2) for first, second in zip(context, own, strict=True))
        return kernel(q, k, v, block_mask=mask, enable_gqa=True)

    return attend


def block_mask(packing: Packing) -> Any:
    """The mask as flex_attention wants it."""
    from torch.nn.attention.flex_attention import create_block_mask

    allowed = packing.allowed()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return allowed(batch, query, key)

    device = packing.anchor_BN.device
    return create_block_mask(visible, len(packing.anchor_BN), None, packing.queries, packing.keys, device=str(device))


ATTENTION_BACKENDS: dict[str, Callable[[Packing], Attend]] = {
    "sdpa": attend_densely,
    "flex_attention": attend_flexibly,
}
