"""The lean target with its verifications over static shapes (`static_shapes.py`).

A tree is also accepted there: its accepted rows are moved to the front before anything is read, so that the one read of
a verification, its choices, is followed by no copy. What fits no row count, prompts above all, runs as without.

Shape letters: R rows, B rows with padding, W attended rows of a cache, F concatenated taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dloop.decoding.lean_qwen3 import LeanQwen3
from dloop.decoding.static_shapes import ROWS, Replay, StaticShapes, padded, scatter
from dloop.hosts.attention import group_bias, grouped_attention
from dloop.hosts.block.cached import Outputs
from dloop.hosts.greedy import greedy_tokens
from dloop.hosts.kv_cache import KVCache


class StaticQwen3(LeanQwen3):
    """The lean runtime with its verifications over static shapes."""

    def __init__(self, model: PreTrainedModel, cache: KVCache | None, taps: Sequence[str] = ()) -> None:
        super().__init__(model, cache, taps)
        self._shapes = StaticShapes(self.cache, self._rotary, ROWS[-1])

    def verify(self, ids_R: Tensor, positions_R: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """As any runtime's; the outputs hold until the next verification."""
        rows, start = len(ids_R), self.cache.length
        count = padded(rows)
        self.accepted_first = count is not None and mask is not None
        self._shapes.settle(start + (count or rows))
        if count is None:
            return super().verify(ids_R, positions_R, mask)
        kind = _Chain if mask is None else _Tree
        verification = self._shapes.at(count, start + count, kind, self)
        choices_B, features_BF = verification(ids_R, positions_R, start, mask)
        self.cache.advance(rows)
        return choices_B[:rows], features_BF[:rows]

    def forward_static(self, ids_B: Tensor, positions_B: Tensor, slots_B: Tensor, seen_BW: Tensor) -> Outputs:
        """Logits [B, V] and features [B, F] of rows written at `slots_B`; reads nothing on the host."""
        bias = group_bias(seen_BW, self._group, self._embedding.dtype)
        put = scatter(self.cache.store, slots_B, seen_BW.shape[1])
        return self.run(ids_B, positions_B, put, partial(grouped_attention, bias=bias))


class _Chain:
    """A verification of so many rows, each of which sees all before it."""

    def __init__(self, runtime: StaticQwen3, rows: int, width: int) -> None:
        device = runtime.cache.store.device
        self._runtime = runtime
        self._ids, self._positions = torch.zeros(2, rows, dtype=torch.long, device=device)
        self._start = torch.zeros(1, dtype=torch.long, device=device)
        self._offsets, self._columns = torch.arange(rows, device=device), torch.arange(width, device=device)
        self._seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        self._replay = Replay(device)

    def _run(self) -> Outputs:
        """Choices [B] and features [B, F]."""
        slots_B = self._start + self._offsets
        seen_BW = (self._columns < self._start).repeat(len(slots_B), 1).index_copy(1, slots_B, self._seen)
        logits_BV, features_BF = self._runtime.forward_static(self._ids, self._positions, slots_B, seen_BW)
        return greedy_tokens(logits_BV), features_BF

    def __call__(self, ids_R: Tensor, positions_R: Tensor, start: int, mask: Tensor | None) -> Outputs:
        self._ids[: len(ids_R)].copy_(ids_R)
        self._positions[: len(ids_R)].copy_(positions_R)
        self._start.fill_(start)
        return self._replay(self._run)


class _Tree(_Chain):
    """A verification of a tree, which also accepts: the rows of the accepted path move to the front."""

    def __init__(self, runtime: StaticQwen3, rows: int, width: int) -> None:
        super().__init__(runtime, rows, width)
        self._alone = torch.eye(rows, dtype=torch.bool, device=self._ids.device)
        self._valid = torch.zeros(1, dtype=torch.long, device=self._ids.device)

    def _run(self) -> Outputs:
        choices_B, features_BF = super()._run()
        accepted_B = accepted_rows(self._ids, choices_B, self._seen) & (self._offsets < self._valid)
        order_B = accepted_B.logical_not().byte().sort(stable=True).indices
        store, slots_B = self._runtime.cache.store, self._start + self._offsets
        store.index_copy_(-2, slots_B, store.index_select(-2, slots_B[order_B]))
        return choices_B, features_BF[order_B]

    def __call__(self, ids_R: Tensor, positions_R: Tensor, start: int, mask: Tensor | None) -> Outputs:
        assert mask is not None
        rows = len(ids_R)
        # A padded row sees at least itself: a softmax over nothing is no number.
        self._seen.copy_(self._alone)
        self._seen[:rows, :rows].copy_(mask[:, start:])
        self._valid.fill_(rows)
        return super().__call__(ids_R, positions_R, start, mask)


def accepted_rows(ids_B: Tensor, choices_B: Tensor, seen_BB: Tensor) -> Tensor:
    """Which rows of a tree the target accepts [B]: the root, and every row that is the choice behind its parent while
    all rows it sees are accepted too. `seen_BB` is the tree's ancestor mask."""
    numbers = torch.arange(len(ids_B), device=ids_B.device)
    parents_B = (seen_BB.tril(-1) * numbers).amax(-1)
    agrees_B = (choices_B[parents_B] == ids_B) | (numbers == 0)
    return (agrees_B | ~seen_BB).all(-1)
