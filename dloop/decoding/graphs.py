"""Decoding over static shapes, so that a GPU replays whole forwards instead of launching hundreds of small kernels.

A verification and a draft's block are padded to the next of a few row counts and attend to a power of two of cached
rows, masked by length; inputs and outputs keep their addresses. On a GPU each such shape is captured once, when first
met, as a CUDA graph; elsewhere the same code runs directly. What fits no row count, prompts above all, runs as without
graphs. A padded row writes behind the valid rows and no valid row sees it. A tree is also accepted there: its accepted
rows are moved to the front before anything is read, so that the one read of a verification, its choices, is followed by
no copy.

Shape letters: R rows, B rows with padding, C context rows with padding, W attended rows of a cache, D hidden, F
concatenated taps, V vocabulary, L layers, G key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dloop.cli import UserError
from dloop.decoding.lean_qwen3 import LeanQwen3
from dloop.hosts.attention import group_bias, grouped_attention
from dloop.hosts.block.cached import CachedBackbone, Outputs, Read
from dloop.hosts.block.drafter import BlockDrafter
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.greedy import greedy_tokens
from dloop.hosts.host import Drafter
from dloop.hosts.kv_cache import KVCache, Put
from dloop.hosts.lean_layer import RotaryTable

ROWS = (1, 8, 16, 32, 64, 128, 288)
"""Row counts that are captured: a step, a block, loops behind it, trees up to 256 with a block's chain."""
SMALLEST_SPAN = 512
WARM_UPS = 3


class Replay:
    """One function of static inputs, captured at its first call; its outputs are overwritten by the next one."""

    def __init__(self, function: Callable[[], Outputs], device: torch.device) -> None:
        self._function, self._cuda = function, device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs | None = None

    def __call__(self) -> Outputs:
        if self._cuda:
            return self._replayed()
        fresh = self._function()
        if self._outputs is None:
            self._outputs = fresh
        # As a graph does, so that whoever holds an output for too long finds out without a GPU.
        for kept, new in zip(self._outputs, fresh, strict=True):
            kept.copy_(new)
        return self._outputs

    def _replayed(self) -> Outputs:
        if self._graph is None or self._outputs is None:
            # Warm-ups write the same rows as the replay will, so the inputs must stand already.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self._function()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            # Replays come in any order, so each graph has memory of its own.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._outputs = self._function()
        self._graph.replay()
        return self._outputs


class StaticShapes:
    """What was captured over one cache, by padded rows and attended rows; forgotten when the cache's memory moves."""

    def __init__(self, cache: KVCache, rotary: RotaryTable, spare: int) -> None:
        self._cache, self._rotary, self._spare = cache, rotary, spare
        self._store: Tensor | None = None
        self._made: dict[tuple[Any, int, int], Any] = {}

    def settle(self, end: int) -> None:
        """Make room for `end` rows and `spare` ones behind what the cache was asked for; precedes every forward."""
        if self._cache.store is self._store and end <= self._cache.capacity:
            return
        self._cache.reserve(_span(max(self._cache.capacity, end) + self._spare))
        # Masked rows still enter the products: what the memory held before may be no number.
        self._cache.store[..., self._cache.length :, :].zero_()
        # A loop stage's positions run one ahead of the rows.
        self._rotary.reserve(self._cache.capacity + 1)
        self._store = self._cache.store
        self._made.clear()

    def at(self, rows: int, end: int, kind: Callable[..., Any], *made_of: Any) -> Any:
        """The `kind` made of `made_of` for `rows` and the span that covers `end` cached rows."""
        shape = kind, rows, min(_span(end), self._cache.capacity)
        if shape not in self._made:
            self._made[shape] = kind(*made_of, *shape[1:])
        return self._made[shape]


def padded(rows: int) -> int | None:
    """The row count that `rows` are padded to; None when they are more than any."""
    return next((count for count in ROWS if count >= rows), None)


def _span(rows: int) -> int:
    return max(SMALLEST_SPAN, 1 << (rows - 1).bit_length())


def _scatter(store: Tensor, slots_B: Tensor, width: int) -> Put:
    """Writes rows at device-side slots; each layer then attends to the first `width` rows."""
    keys, values = (part.unbind(0) for part in store[..., :width, :])

    def put(layer: int, keys_BGE: Tensor, values_BGE: Tensor) -> tuple[Tensor, Tensor]:
        keys[layer][0].index_copy_(1, slots_B, keys_BGE.transpose(0, 1))
        values[layer][0].index_copy_(1, slots_B, values_BGE.transpose(0, 1))
        return keys[layer], values[layer]

    return put


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
        put = _scatter(self.cache.store, slots_B, seen_BW.shape[1])
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
        self._replay = Replay(self._run, device)

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
        return self._replay()


class _Tree(_Chain):
    """A verification of a tree, which also accepts: the rows of the accepted path move to the front."""

    def __init__(self, runtime: StaticQwen3, rows: int, width: int) -> None:
        super().__init__(runtime, rows, width)
        self._alone = torch.eye(rows, dtype=torch.bool, device=self._ids.device)
        self._valid = torch.zeros(1, dtype=torch.long, device=self._ids.device)

    def _run(self) -> Outputs:
        choices_B, features_BF = super()._run()
        accepted_B = accepted_rows(self._ids, choices_B, self._seen) & (self._offsets < self._valid)
        order_B = accepted_B.logical_not().sort(stable=True).indices
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
        stage = self._shapes.at(
            count, start + count + len(ids_R), _Stage, self, self._cache, read, len(ids_R), context_CD
        )
        self._cache.advance(valid)
        return stage(ids_R, context_CD, (start, start + valid, context_position, block_position))

    def stage_static(self, ids_R: Tensor, context_CD: Tensor, numbers_4: Tensor, width: int, cache: KVCache) -> Tensor:
        """Block rows [R, D]; `numbers_4` are the slots, then the positions, of the first context and block row."""
        rows_RD = self._embed(ids_R)
        context_slot, block_slot, context_position, block_position = numbers_4.split(1)
        context, block = (torch.arange(len(rows), device=rows.device) for rows in (context_CD, rows_RD))
        made = self.context_rows(context_CD, self._rotary[context_position + context])
        # The block's rows are written behind these and so over the padding.
        for store_LGWE, made_LGCE in zip(cache.store[:, :, 0, :, :width], made, strict=True):
            store_LGWE.index_copy_(2, context_slot + context, made_LGCE)
        seen_1W = (torch.arange(width, device=rows_RD.device) < block_slot + len(rows_RD))[None]
        group = self._heads // cache.store.shape[3]
        bias = group_bias(seen_1W.expand(len(rows_RD), -1), group, rows_RD.dtype)
        put = _scatter(cache.store, block_slot + block, width)
        rotary = self._rotary[block_position + block]
        return self.block(rows_RD, rotary, put, partial(grouped_attention, bias=bias))


class _Stage:
    """A stage of one shape."""

    def __init__(
        self, backbone: StaticBackbone, cache: KVCache, read: Read, block: int, like_CD: Tensor, rows: int, width: int
    ) -> None:
        self._context = like_CD.new_zeros(rows, like_CD.shape[1])
        self._ids, self._numbers = (torch.zeros(n, dtype=torch.long, device=like_CD.device) for n in (block, 4))

        def run() -> Outputs:
            raw_RD = backbone.stage_static(self._ids, self._context, self._numbers, width, cache)
            return read(raw_RD, self._ids[:1])

        self._replay = Replay(run, like_CD.device)

    def __call__(self, ids_R: Tensor, context_CD: Tensor, numbers: Sequence[int]) -> Outputs:
        self._ids.copy_(ids_R)
        self._context[: len(context_CD)].copy_(context_CD)
        self._numbers.copy_(torch.tensor(numbers))
        return self._replay()


def over_static_shapes(drafter: Drafter) -> Drafter:
    """`drafter` with its backbone over static shapes; a UserError when it has none that can be."""
    if not isinstance(drafter, BlockDrafter):
        raise UserError("--runtime graphs serves DFlash, DSpark and Domino drafts; use --runtime eager for this one")
    drafter.backbone = StaticBackbone(drafter.network, drafter.cache, drafter.embed)
    return drafter
