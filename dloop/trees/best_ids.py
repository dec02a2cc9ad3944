"""The ids of the largest values of each row, equal values by ascending id.

`torch.topk` leaves the order of equal values open, and equal logits are common in half precision; with this one a tree
is the same on every device. Long rows are cut into chunks first, which costs less than `torch.topk` on the whole row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 32
"""Ids a chunk holds: small enough to leave few candidates, large enough that reading all maxima stays cheap."""


def best_ids(values_LV: Tensor, count: int) -> Tensor:
    """Ids [L, count] of the `count` <= V largest values of each row, in descending order, equal values by ascending id.

    Values are compared in float32. Stays on the device and never waits for it.
    """
    length = values_LV.shape[-1]
    # Below this the chunks that may hold a winner are most of the row.
    if length <= 2 * count * CHUNK:
        return _select(values_LV, count)
    if length % CHUNK:
        values_LV = F.pad(values_LV, (0, -length % CHUNK), value=float("-inf"))
    ids_LJ = _promising_ids(values_LV, count)
    return ids_LJ.gather(-1, _select(values_LV.gather(-1, ids_LJ), count))


def _promising_ids(values_LV: Tensor, count: int) -> Tensor:
    """Ascending ids [L, count * CHUNK] that contain the winners: those of the `count` best chunks of each row.

    A chunk that is not among them has `count` chunks before it, by maximum and then by place, and each of these holds a
    value that beats all of its own.
    """
    chunks_LC = _select(values_LV.unflatten(-1, (-1, CHUNK)).amax(-1), count).sort(-1).values
    within = torch.arange(CHUNK, device=values_LV.device)
    return (chunks_LC[..., None] * CHUNK + within).flatten(-2)


def _select(values_LV: Tensor, count: int) -> Tensor:
    # A float's bits, the lower ones flipped when negative, are ordered as the floats are. Adding zero unites -0.0, 0.0.
    bits_LV = (values_LV.float() + 0.0).view(torch.int32)
    keys_LV = bits_LV ^ ((bits_LV >> 31) & 0x7FFFFFFF)
    length = values_LV.shape[-1]
    lower_id_first = torch.arange(length - 1, -1, -1, device=values_LV.device)
    return (keys_LV.long() * length + lower_id_first).topk(count, dim=-1).indices
