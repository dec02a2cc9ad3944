"""Soft cross-entropy of draft rows against the target's distribution, a chunk of rows at a time.

Logits of a chunk live only while the chunk does and are computed again in the backward pass, so the memory depends
neither on the sequence nor on the unroll. Knows the models as two functions from rows to logits; both must speak of
the same vocabulary, the target's or the draft's own.

Shape letters: R all rows, M scored rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Logits = Callable[[Tensor], Tensor]
"""Rows [M, D] -> logits [M, V]."""

CHUNK_ROWS = 1024
"""Rows whose logits exist at once: with 152k tokens and float32 these are 0.6 GB for each of the two models."""


def soft_cross_entropy(
    hidden_RD: Tensor,
    teacher_RD: Tensor,
    rows_M: Tensor,
    teacher_rows_M: Tensor,
    draft_logits: Logits,
    teacher_logits: Logits,
) -> tuple[Tensor, Tensor]:
    """Sum over the scored rows of -sum_v P log Q in float32, and the draft's greedy ids [M].

    Row `rows_M[m]` of the draft is scored against row `teacher_rows_M[m]` of the teacher, which gets no gradient.
    """

    def of_chunk(rows: Tensor, teacher_rows: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = teacher_logits(teacher_RD[teacher_rows]).float().softmax(-1)
        logits = draft_logits(hidden_RD[rows]).float()
        return -(wanted * logits.log_softmax(-1)).sum(), logits.detach().argmax(-1)

    sums = [hidden_RD.new_zeros((), dtype=torch.float32)]
    greedy: list[Tensor] = []
    for rows, teacher_rows in zip(rows_M.split(CHUNK_ROWS), teacher_rows_M.split(CHUNK_ROWS), strict=True):
        total, ids = checkpoint(of_chunk, rows, teacher_rows, use_reentrant=False)
        sums.append(total)
        greedy.append(ids)
    return torch.stack(sums).sum(), torch.cat(greedy)


def shift_left(x: Tensor, places: int) -> Tensor:
    """`x` [B, S, ...] with row j + `places` at row j, zeros behind the end."""
    places = min(places, x.shape[1])
    return F.pad(x[:, places:], (0, 0) * (x.ndim - 2) + (0, places))
