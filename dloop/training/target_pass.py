"""The frozen target's forward pass in training: tapped states, no head, no layer behind the last tap.

Besides outputs of submodules, the keys and values that a Gemma 4 target shares with its assistant can be asked for.
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
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dloop.data.loader import Batch
from dloop.hosts.host import TargetOutputs
from dloop.hosts.target_model import Taps, decoder

_LAYER = re.compile(r"layers\.(\d+)")
_SHARED = re.compile(r"shared_kv\.(\w+)\.(keys|values)")


class FrozenTarget:
    """The target beside a trainer: batches in, tapped states out."""

    def __init__(
        self,
        target: nn.Module,
        taps: Sequence[str],
        *,
        seed: int = 42,
        position_offset_max: int = 0,
        remember: bool = False,
    ) -> None:
        self.decoder = decoder(target)
        self.depth = layers_needed(taps)
        self.names = tuple(taps)
        self.taps = Taps(target, [tap for tap in taps if not _SHARED.fullmatch(tap)])
        self.seed = seed
        self.position_offset_max = position_offset_max
        self._known: dict[bytes, dict[str, Tensor]] | None = {} if remember else None

    def __call__(self, batch: Batch, lengths: Sequence[int]) -> TargetOutputs:
        """States [B, S, D] of `batch`, whose rows have `lengths` tokens before the padding; no gradients."""
        device = batch.input_ids.device
        offsets_B = torch.tensor(self._offsets(batch, lengths), device=device)
        if self._known is not None:
            return TargetOutputs(states=self._remembered(batch, lengths, self._known), position_offset_B=offsets_B)
        # The right padding needs no mask under causal attention, and a constant shift is no jump that the
        # library could take for packed sequences.
        positions_BS = torch.arange(batch.input_ids.shape[1], device=device) + offsets_B[:, None]
        return TargetOutputs(states=self._run(batch.input_ids, positions_BS), position_offset_B=offsets_B)

    def _run(self, ids_BS: Tensor, positions_BS: Tensor) -> dict[str, Tensor]:
        shared = [match for tap in self.names if (match := _SHARED.fullmatch(tap))]
        more = {"return_shared_kv_states": True} if shared else {}
        with torch.no_grad(), early_exit(self.decoder, self.depth):
            output = self.decoder(input_ids=ids_BS, position_ids=positions_BS, use_cache=False, **more)
        return self.taps.take() | {match[0]: _shared_state(output, *match.groups()) for match in shared}

    def _remembered(
        self, batch: Batch, lengths: Sequence[int], known: dict[bytes, dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """States put together from those of each row alone, which do not depend on the rows beside it: so a resumed
        run, which remembers nothing, sees the same numbers."""
        rows = []
        for ids_S, length in zip(batch.input_ids, lengths, strict=True):
            key = ids_S[:length].cpu().numpy().tobytes()
            if key not in known:
                positions_S = torch.arange(length, device=ids_S.device)
                states = self._run(ids_S[None, :length], positions_S[None])
                known[key] = {name: state[0] for name, state in states.items()}
            rows.append(known[key])
        return {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in self.names}

    def _offsets(self, batch: Batch, lengths: Sequence[int]) -> list[int]:
        rows = zip(batch.places, lengths, strict=True)
        return [
            position_offset(self.seed, batch.epoch, place, self.position_offset_max - length) for place, length in rows
        ]


def position_offset(seed: int, epoch: int, place: int, room: int) -> int:
    """A uniform offset in [0, room], 0 when there is no room; the same for the same (seed, epoch, place)."""
    return random.Random(f"position offset {seed} {epoch} {place}").randint(0, room) if room > 0 else 0


def _shared_state(output: Any, kind: str, part: str) -> Tensor:
    """Shared keys or values as a state [B, S, G, E]: a row a position, as all states."""
    return output.shared_kv_states[kind][part == "values"].transpose(1, 2)


def layers_needed(taps: Sequence[str]) -> int | None:
    """How many decoder layers produce all `taps`; None when one of them is known only behind the last layer."""
    if any(tap == "norm" or _SHARED.fullmatch(tap) for tap in taps):
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
