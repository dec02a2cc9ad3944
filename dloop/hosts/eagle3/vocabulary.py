"""The draft's own vocabulary: the target's most frequent tokens, and the two maps that checkpoints store."""

from __future__ import annotations

import torch
from torch import Tensor

from dloop.cli import UserError

DEFAULT_SIZE = 32_000
"""Tokens of a draft from scratch whose configuration names no number."""


def frequent_tokens(counts_V: Tensor, size: int) -> Tensor:
    """The `size` ids of the largest counts, ascending; equal counts (0 included) by ascending id."""
    return counts_V.sort(stable=True, descending=True).indices[:size].sort().values


def vocabulary_maps(ids: Tensor, target_size: int) -> tuple[Tensor, Tensor]:
    """`d2t` (offsets) and `t2d` (flags [target_size]) of a draft that knows the ascending target `ids`."""
    t2d = torch.zeros(target_size, dtype=torch.bool, device=ids.device)
    t2d[ids] = True
    return ids - torch.arange(len(ids), device=ids.device), t2d


def check_maps(d2t: Tensor, t2d: Tensor) -> None:
    """Raise a UserError unless the two maps of a checkpoint say the same."""
    ids = torch.arange(len(d2t)) + d2t
    if not torch.equal(t2d.nonzero()[:, 0], ids):
        raise UserError(
            "the draft's vocabulary maps contradict each other: d2t and t2d must name the same target ids in ascending "
            "order; the checkpoint is damaged"
        )
