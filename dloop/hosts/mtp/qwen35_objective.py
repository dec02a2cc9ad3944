"""Training Qwen3.5's head: the common unroll, scored over the target's whole vocabulary.

Row j reads token j + 1 and the target's final-norm state of j; step i reads token j + 1 + i and the row's own output,
and is scored against the target's distribution at j + 1 + i where the text's token j + 2 + i is supervised. A longer
unroll is what a looped round asks of the head. Shape letters as in `unroll/objective.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dloop.data.loader import Batch
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.mtp.qwen35_network import Qwen35Head
from dloop.hosts.unroll.attention import OWN_ROW_ATTENTION
from dloop.hosts.unroll.loss import CHUNK_ROWS, shift_left
from dloop.hosts.unroll.objective import Memory, Start, UnrollObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_LENGTHS = (3, 6, 9)
"""One, two and three stages of three drafts."""


class Qwen35Objective(UnrollObjective):
    """The head beside its target, whose embedding and head it borrows frozen."""

    taps = ("norm",)

    def __init__(self, network: Qwen35Head, target: PreTrainedModel, options: ObjectiveOptions) -> None:
        super().__init__(network, target, options, options.ttt_length_dist or DEFAULT_LENGTHS)
        self._attention = OWN_ROW_ATTENTION[options.attention_backend]

    def start(self, batch: Batch, outputs: TargetOutputs) -> Start:
        states_BSD = outputs.states["norm"]
        teacher_BSD = shift_left(states_BSD, 1)
        supervised_BS = shift_left(batch.loss_mask, 2).bool()
        choice_BS = torch.zeros_like(batch.input_ids)
        choice_BS[supervised_BS] = self._choices(teacher_BSD[supervised_BS])
        return Start(
            hidden_BSD=states_BSD,
            teacher_BSD=teacher_BSD,
            choice_BS=choice_BS,
            supervised_BS=supervised_BS,
            scored_BS=supervised_BS,
        )

    @torch.no_grad()
    def _choices(self, states_MD: Tensor) -> Tensor:
        """The target's greedy ids [M]."""
        return torch.cat([self.teacher_logits(chunk).argmax(-1) for chunk in states_MD.split(CHUNK_ROWS)])

    def advance(
        self, hidden_BSD: Tensor, ids_BS: Tensor, positions_BS: Tensor, memory: Sequence[Memory]
    ) -> tuple[Tensor, Memory]:
        left: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            left.extend((k, v))
            keys, values = zip(*memory, (k, v), strict=True)
            return self._attention(q, keys, values)

        hidden_BSD = self.network(self.embed(ids_BS), hidden_BSD, positions_BS, attend)
        return hidden_BSD, tuple(left)

    def draft_logits(self, hidden_MD: Tensor) -> Tensor:
        return self._borrowed[1](hidden_MD)

    def teacher_logits(self, states_MD: Tensor) -> Tensor:
        return self._borrowed[1](states_MD)
