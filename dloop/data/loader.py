"""Placeholder contract; replaced by the real loader."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Training rows, padded on the right with 0: `input_ids`, `attention_mask`, `loss_mask` int64 [B, S]; `epoch` and
    `places` (each row's place in that epoch's order over all ranks) seed everything random about a row."""

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    epoch: int
    places: tuple[int, ...]
