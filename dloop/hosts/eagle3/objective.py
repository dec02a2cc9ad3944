"""Training EAGLE-3: the shared unroll, scored over the draft's own vocabulary (sgl-project/SpecForge).

Row j is the pair (features of token j, token j + 1) and is scored against the target's distribution of token j + 2,
renormalised over the tokens the draft knows; where the target's greedy token is not among them the row does not count.
The loss mask is the one of token j. Shape letters as in `unroll/objective.py`; V the draft's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.data.loader import Batch
from dloop.hosts.eagle3.network import Eagle3Network
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.unroll.attention import OWN_ROW_ATTENTION
from dloop.hosts.unroll.loss import CHUNK_ROWS, shift_left
from dloop.hosts.unroll.objective import Memory, Start, UnrollObjective

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_LENGTHS = (7,)
"""The host's own objective: chains of 7 behind the first token."""


class Eagle3Objective(UnrollObjective):
    """One EAGLE-3 draft beside its target."""

    network: Eagle3Network

    def __init__(
        self, network: Eagle3Network, target: PreTrainedModel, options: ObjectiveOptions, features: Sequence[str]
    ) -> None:
        super().__init__(network, target, options, options.ttt_length_dist or DEFAULT_LENGTHS)
        self.features, self.taps = tuple(features), (*features, "norm")
        self._attention = OWN_ROW_ATTENTION[options.attention_backend]
        head, ids = self._borrowed[1], network.target_ids
        self._known_head = head.weight[ids], None if head.bias is None else head.bias[ids]

    def embed(self, ids: Tensor) -> Tensor:
        """The draft's frozen embedding where it has one, else the target's."""
        own = getattr(self.network, "embed_tokens", None)
        return super().embed(ids) if own is None else own(ids)

    def start(self, batch: Batch, outputs: TargetOutputs) -> Start:
        features = torch.cat([outputs.states[tap] for tap in self.features], dim=-1)
        teacher_BSD = shift_left(outputs.states["norm"], 1)
        # The last token of a row has no successor whose distribution could be drafted.
        supervised_BS = batch.loss_mask.bool() & shift_left(batch.attention_mask, 1).bool()
        choice_BS = torch.zeros_like(batch.input_ids)
        choice_BS[supervised_BS] = self._choices(teacher_BSD[supervised_BS])
        return Start(
            hidden_BSD=self.network.fuse(features),
            teacher_BSD=teacher_BSD,
            choice_BS=choice_BS,
            supervised_BS=supervised_BS,
            scored_BS=supervised_BS & self.network.t2d[choice_BS],
        )

    @torch.no_grad()
    def _choices(self, states_MD: Tensor) -> Tensor:
        """The target's greedy ids [M]."""
        return torch.cat([self._borrowed[1](chunk).argmax(-1) for chunk in states_MD.split(CHUNK_ROWS)])

    def advance(
        self, hidden_BSD: Tensor, ids_BS: Tensor, positions_BS: Tensor, memory: Sequence[Memory]
    ) -> tuple[Tensor, Memory]:
        left: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            left.extend((k, v))
            keys, values = zip(*memory, (k, v), strict=True)
            return self._attention(q, keys, values)

        hidden_BSD = self.network(hidden_BSD, self.embed(ids_BS), positions_BS, attend)
        return hidden_BSD, tuple(left)

    def draft_logits(self, hidden_MD: Tensor) -> Tensor:
        return self.network.logits(hidden_MD)

    def teacher_logits(self, states_MD: Tensor) -> Tensor:
        return F.linear(states_MD, *self._known_head)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + self.network.d2t[draft_ids]
