"""Training a draft head on its own states (test-time training, arXiv 2503.01840; loop-aware by longer unrolls).

Row j starts from the target's state at j and the token behind it; step i feeds it its own output of step i - 1 and the
text's next token, and scores it against the target's distribution there, with weight 0.8^i. One length is drawn for
each optimizer step. Each step is recomputed in the backward pass: besides one state and one pair of keys and values a
step, memory does not grow with the unroll.

Shape letters: B batch, S sequence, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dloop.data.loader import Batch
from dloop.hosts.host import Loss, Objective, ObjectiveOptions, TargetOutputs
from dloop.hosts.target_model import embedding, head
from dloop.hosts.unroll.loss import shift_left, soft_cross_entropy
from dloop.hosts.unroll.schedule import unroll_length

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEP_DECAY = 0.8

UNROLL_TRAINING: Mapping[str, float] = MappingProxyType(
    {"learning_rate": 1e-4, "warmup_ratio": 0.015, "max_grad_norm": 0.5}
)
"""What the trainer does with an unrolled head where the command line leaves it open (sgl-project/SpecForge)."""

BLOCK_OPTIONS = (
    *("num_anchors", "loss_decay_gamma", "dloop_max_stage", "dloop_loss_weight"),
    *("lambda_base_start", "lambda_base_decay_ratio"),
)
"""Training options of the block drafters, for which an unroll has no use."""

Memory = tuple[Tensor, ...]
"""What one step leaves for later ones (its keys and values); empty for a head without memory."""


@dataclass(frozen=True)
class Start:
    """Row j at step 0; at step i it is scored with entry j + i of the last four.

    `hidden_BSD` is the first recurrent input. `teacher_BSD` are the states whose logits are the target's distribution
    of the token the row predicts, `choice_BS` that distribution's greedy id. `supervised_BS` are the rows the metrics
    count, `scored_BS` those the loss counts. `memory` is what every step finds there already.
    """

    hidden_BSD: Tensor
    teacher_BSD: Tensor
    choice_BS: Tensor
    supervised_BS: Tensor
    scored_BS: Tensor
    memory: tuple[Memory, ...] = ()


class UnrollObjective(Objective):
    """The unroll, its weights and its metrics; a family adds its start, its step and its two heads."""

    def __init__(
        self, network: Any, target: PreTrainedModel, options: ObjectiveOptions, lengths: Sequence[int]
    ) -> None:
        super().__init__()
        self.network, self.options, self.lengths = network, options, tuple(lengths)
        # Hidden from nn.Module: the target's weights are neither trained nor part of the draft's state.
        self._borrowed = (embedding(target), head(target))

    @abstractmethod
    def start(self, batch: Batch, outputs: TargetOutputs) -> Start:
        """What the rows begin with and what they are scored against."""

    @abstractmethod
    def advance(
        self, hidden_BSD: Tensor, ids_BS: Tensor, positions_BS: Tensor, memory: Sequence[Memory]
    ) -> tuple[Tensor, Memory]:
        """One step of all rows: recurrent input, the token each row reads, its rotary position (row + step + offset)
        and what earlier steps left -> the next recurrent state [B, S, D] and what this step leaves. Must be pure."""

    @abstractmethod
    def draft_logits(self, hidden_MD: Tensor) -> Tensor:
        """The draft's logits of recurrent states."""

    @abstractmethod
    def teacher_logits(self, states_MD: Tensor) -> Tensor:
        """The target's logits over the same vocabulary of its own states."""

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the draft's vocabulary as the target's."""
        return draft_ids

    def embed(self, ids: Tensor) -> Tensor:
        """The target's frozen embedding."""
        return self._borrowed[0](ids)

    def forward(self, batch: Batch, outputs: TargetOutputs, step: int) -> Loss:
        length = unroll_length(self.lengths, self.options.seed, step)
        rows = self.start(batch, outputs)
        hidden_BSD, memory = rows.hidden_BSD, list(rows.memory)
        totals, right, counted = list[Tensor](), list[Tensor](), list[Tensor]()
        for place in range(length):
            hidden_BSD, left = checkpoint(
                self.advance,
                hidden_BSD,
                shift_left(batch.input_ids, place + 1),
                self._positions(batch, outputs, place),
                tuple(memory),
                use_reentrant=False,
            )
            memory.append(left)
            total, right_BS = self._score(hidden_BSD, rows, place)
            totals.append(total)
            right.append(right_BS)
            counted.append(shift_left(rows.supervised_BS, place))
        # Connects every parameter also when no row counts, so that no rank waits for another's gradients.
        trained = [parameter for parameter in self.network.parameters() if parameter.requires_grad]
        nothing = sum(parameter.sum() for parameter in trained) * 0.0
        loss = torch.stack([total * STEP_DECAY**place for place, total in enumerate(totals)]).sum()
        return Loss(loss + nothing, self._ratios(totals, right, counted))

    @staticmethod
    def _positions(batch: Batch, outputs: TargetOutputs, place: int) -> Tensor:
        rows = torch.arange(place, place + batch.input_ids.shape[1], device=batch.input_ids.device)
        return rows + outputs.position_offset_B.to(rows.device)[:, None]

    def _score(self, hidden_BSD: Tensor, rows: Start, place: int) -> tuple[Tensor, Tensor]:
        """One step's loss, a mean over all rows, padding and unscored ones included, and where its greedy token is
        the target's [B, S]."""
        scored_BS = shift_left(rows.scored_BS, place)
        scored_M = scored_BS.flatten().nonzero()[:, 0]
        total, greedy = soft_cross_entropy(
            hidden_BSD.flatten(0, 1),
            rows.teacher_BSD.flatten(0, 1),
            scored_M,
            scored_M + place,
            self.draft_logits,
            self.teacher_logits,
        )
        right_BS = torch.zeros_like(scored_BS)
        right_BS[scored_BS] = self.target_ids(greedy) == shift_left(rows.choice_BS, place)[scored_BS]
        return total / scored_BS.numel(), right_BS

    def _ratios(
        self, totals: list[Tensor], right: list[Tensor], counted: list[Tensor]
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Cross-entropy and accuracy by step, and how many leading drafts of the shortest unroll equal the target's."""
        ratios: dict[str, tuple[Tensor, Tensor]] = {}
        one = torch.ones_like(totals[0].detach())
        for place, total in enumerate(totals):
            ratios[f"unroll/cross_entropy/{place + 1}"] = (total.detach(), one)
            ratios[f"unroll/accuracy/{place + 1}"] = (right[place].sum(), counted[place].sum())
        shortest = min(self.lengths)
        whole_BS = torch.stack(counted[:shortest]).all(0)
        prefix_BS = torch.stack(right[:shortest]).long().cumprod(0).sum(0)
        ratios["host/accepted_prefix"] = ((prefix_BS * whole_BS).sum(), whole_BS.sum())
        return ratios
