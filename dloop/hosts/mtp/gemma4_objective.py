"""Training the Gemma 4 assistant: the common unroll, over keys and values that never change.

Row j reads the text's token j + 1 and the target's state at j; step i reads token j + 1 + i and the row's own last
state, and is scored against the target's distribution at j + 1 + i. As when drafting, every step stands at position
j + 1 and attends the target's keys up to j (in sliding layers the last window - 1 of them), so a step leaves nothing
for later ones. Shape letters: B batch, S sequence, M scored rows, D the target's hidden size, H the assistant's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dloop.data.loader import Batch
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.mtp.gemma4_network import LAYER_TYPES, advance, logits
from dloop.hosts.target_model import soft_capped
from dloop.hosts.unroll.loss import CHUNK_ROWS, shift_left
from dloop.hosts.unroll.objective import Memory, Start, UnrollObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_LENGTHS = (6, 12, 18)
"""One, two and three stages of six drafts."""


class Gemma4Objective(UnrollObjective):
    """Trains all of the assistant but the table of a released one, its order of tokens and its layer scales.

    The recurrent state of a row is [what the next step takes (D), what the head reads (H)].
    """

    def __init__(self, network: Any, target: PreTrainedModel, options: ObjectiveOptions) -> None:
        super().__init__(network, target, options, options.ttt_length_dist or DEFAULT_LENGTHS)
        self.taps = ("norm", *(f"shared_kv.{kind}.{part}" for kind in LAYER_TYPES for part in ("keys", "values")))
        config = target.config.get_text_config()
        self.window, self.soft_cap = config.sliding_window, config.final_logit_softcapping
        network.requires_grad_(True)
        network.lm_head.requires_grad_(options.from_scratch)
        if network.masked_embedding is not None:
            network.masked_embedding.requires_grad_(False)

    def start(self, batch: Batch, outputs: TargetOutputs) -> Start:
        states_BSD = outputs.states["norm"]
        unread = states_BSD.new_zeros(*states_BSD.shape[:2], self.network.lm_head.in_features)
        teacher_BSD = shift_left(states_BSD, 1)
        supervised_BS = shift_left(batch.loss_mask.bool(), 2)
        return Start(
            hidden_BSD=torch.cat((states_BSD, unread), dim=-1),
            teacher_BSD=teacher_BSD,
            choice_BS=self._choices(teacher_BSD, supervised_BS),
            supervised_BS=supervised_BS,
            scored_BS=supervised_BS,
            memory=(tuple(outputs.states[tap].transpose(1, 2) for tap in self.taps[1:]),),
        )

    @torch.no_grad()
    def _choices(self, states_BSD: Tensor, wanted_BS: Tensor) -> Tensor:
        """The target's greedy ids [B, S] at the wanted rows; 0 elsewhere."""
        choice_BS = torch.zeros_like(wanted_BS, dtype=torch.int64)
        chunks = states_BSD[wanted_BS].split(CHUNK_ROWS)
        choice_BS[wanted_BS] = torch.cat([self._borrowed[1](chunk).argmax(-1) for chunk in chunks])
        return choice_BS

    def advance(
        self, hidden_BSD: Tensor, ids_BS: Tensor, positions_BS: Tensor, memory: Sequence[Memory]
    ) -> tuple[Tensor, Memory]:
        taken_BSD = hidden_BSD[..., : self.network.config.backbone_hidden_size]
        keys_values = iter(memory[0])
        kv = {kind: (next(keys_values), next(keys_values)) for kind in LAYER_TYPES}
        # The memory's first entry is the target's, then one a step: every step stands where the first one did.
        standing_BS = positions_BS + 2 - len(memory)
        states_BSH, next_BSD = advance(
            self.network, self.embed(ids_BS), taken_BSD, standing_BS, kv, self.masks(ids_BS.shape[1], ids_BS.device)
        )
        return torch.cat((next_BSD, states_BSH), dim=-1), ()

    def masks(self, rows: int, device: torch.device) -> dict[str, Tensor]:
        """Which positions of the target each row sees [1, 1, S, S]."""
        place = torch.arange(rows, device=device)
        past = place <= place[:, None]
        near = place > place[:, None] + 1 - self.window
        return {"full_attention": past[None, None], "sliding_attention": (past & near)[None, None]}

    def draft_logits(self, hidden_MD: Tensor) -> Tensor:
        return logits(self.network, hidden_MD[:, self.network.config.backbone_hidden_size :])

    def teacher_logits(self, states_MD: Tensor) -> Tensor:
        return soft_capped(self._borrowed[1](states_MD).float(), self.soft_cap)
