"""Forwards over static shapes, so that a GPU replays them whole instead of launching hundreds of small kernels.

Rows are padded to the next of a few counts and attend to a power of two of cached rows (or all there is room for),
masked by length; inputs and outputs keep their addresses. On a GPU each such shape is captured once, when first met, as
a CUDA graph; elsewhere the same code runs directly. A padded row writes behind the valid rows and no valid row sees it.

Shape letters: B rows with padding, G key/value heads, E head dimension.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dloop.hosts.block.cached import Outputs
from dloop.hosts.kv_cache import KVCache, Put
from dloop.hosts.lean_layer import RotaryTable

ROWS = (1, 8, 16, 24, 40, 80, 144, 288)
"""Row counts that are captured: a step, a block, loops behind it, trees of 64, 128 and 256 with a root and a chain."""
SMALLEST_SPAN = 512
WARM_UPS = 3


class Replay:
    """One function of static inputs, captured at its first call; its outputs are overwritten by the next one.

    It does not hold the function: a cycle would leave a graph to the garbage collector, which could then run into the
    capture of another one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Outputs = ()

    def __call__(self, function: Callable[[], Outputs]) -> Outputs:
        """What `function` answers, always the same one."""
        if self._device.type != "cuda":
            self._overwrite(function())
        else:
            with torch.cuda.device(self._device):
                if self._graph is None:
                    self._graph = self._capture(function)
                self._graph.replay()
        return self._outputs

    def _overwrite(self, fresh: Outputs) -> None:
        # As a graph does, so that whoever holds an output for too long finds out without a GPU.
        self._outputs = self._outputs or fresh
        for kept, new in zip(self._outputs, fresh, strict=True):
            kept.copy_(new)

    def _capture(self, function: Callable[[], Outputs]) -> torch.cuda.CUDAGraph:
        # Warm-ups write the same rows as the replay will, so the inputs must stand already.
        stream = _side_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Replays come in any order, so each graph has memory of its own.
        with _no_collection(), torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._outputs = function()
        return graph


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: each stream that multiplies matrices keeps a workspace."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A graph that the collector destroys within would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class StaticShapes:
    """What was captured over one cache, by padded rows and attended rows; forgotten when the cache's memory moves."""

    def __init__(self, cache: KVCache, rotary: RotaryTable, spare: int) -> None:
        self._cache, self._rotary, self._spare = cache, rotary, spare
        self._store: Tensor | None = None
        self._made: dict[tuple[Any, int, int], Any] = {}

    def settle(self, end: int) -> None:
        """Make room for `end` rows and `spare` ones behind what the cache was asked for; precedes every verification
        and every stage. A prefill runs in the room the cache was asked for."""
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


def scatter(store: Tensor, slots_B: Tensor, width: int) -> Put:
    """Writes rows at device-side slots; each layer then attends to the first `width` rows."""
    keys, values = (part.unbind(0) for part in store[..., :width, :])

    def put(layer: int, keys_BGE: Tensor, values_BGE: Tensor) -> tuple[Tensor, Tensor]:
        keys[layer][0].index_copy_(1, slots_B, keys_BGE.transpose(0, 1))
        values[layer][0].index_copy_(1, slots_B, values_BGE.transpose(0, 1))
        return keys[layer], values[layer]

    return put
