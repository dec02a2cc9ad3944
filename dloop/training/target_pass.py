"""The frozen target's forward pass in training: tapped states, no head, no layer behind the last tap.

Draws each row's position offset, a function of (seed, epoch, place), so that ranks and resumes agree. Knows
nothing about the loss made of these states.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dloop.data.loader import Batch
from dloop.hosts.host import TargetOutputs
from dloop.hosts.target_model import Taps, decoder

_LAYER = re.compile(r"layers\.(\d+)")


class FrozenTarget:
    """The target beside a trainer: batches in, tapped states out."""

    def __init__(self, target: nn.Module, taps: Sequence[str], *, seed: int = 42, position_offset_max: int = 0) -> None:
        self.decoder = decoder(target)
        self.depth = layers_needed(taps)
        self.taps = Taps(target, taps)
        self.seed = seed
        self.position_offset_max = position_offset_max

    def __call__(self, batch: Batch, lengths: Sequence[int]) -> TargetOutputs:
        """States [B, S, D] of `batch`, whose rows have `lengths` tokens before the padding; no gradients."""
        device = batch.input_ids.device
        offsets_B = torch.tensor(self._offsets(batch, lengths), device=device)
        # The right padding needs no mask under causal attention, and a constant shift is no jump that the
        # library could take for packed sequences.
        positions_BS = torch.arange(batch.input_ids.shape[1], device=device) + offsets_B[:, None]
        with torch.no_grad(), early_exit(self.decoder, self.depth):
            self.decoder(input_ids=batch.input_ids, position_ids=positions_BS, use_cache=False)
        return TargetOutputs(states=self.taps.take(), position_offset_B=offsets_B)

    def _offsets(self, batch: Batch, lengths: Sequence[int]) -> list[int]:
        rows = zip(batch.places, lengths, strict=True)
        return [
            position_offset(self.seed, batch.epoch, place, self.position_offset_max - length) for place, length in rows
        ]


def position_offset(seed: int, epoch: int, place: int, room: int) -> int:
    """A uniform offset in [0, room], 0 when there is no room; the same for the same (seed, epoch, place)."""
    return random.Random(f"position offset {seed} {epoch} {place}").randint(0, room) if room > 0 else 0


def layers_needed(taps: Sequence[str]) -> int | None:
    """How many decoder layers produce all `taps`; None when one of them is the final norm."""
    if "norm" in taps:
        return None
    return max((1 + int(match[1]) for tap in taps if (match := _LAYER.fullmatch(tap))), default=0)


@contextmanager
def early_exit(stack: nn.Module, depth: int | None) -> Iterator[None]:
    """Let the decoder `stack` run its first `depth` layers only (None: all).

    The library slices its layers by the configured number at each forward.
    """
    config: Any = stack.config
    full = config.num_hidden_layers
    config.num_hidden_layers = full if depth is None else min(depth, full)
    try:
        yield
    finally:
        config.num_hidden_layers = full
