"""Loop-aware training of a block drafter (paper, loop-aware training).

A step trains the host's own stage and one loop stage k, drawn uniformly from 1..K. Stages 1..k-1 run without a loss
to make the draft states that stage k conditions on; gradients flow through them. Teacher tokens are the ground truth.
A family says what a row's loss terms are and how the stages' sums combine.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dloop.data.loader import Batch
from dloop.hosts.block.network import KeysValues
from dloop.hosts.block.packing import (
    ATTENTION_BACKENDS,
    Packing,
    Window,
    keep_alone,
    open_windows,
    reaches,
    sample_anchors,
    seeded,
)
from dloop.hosts.host import Loss, Objective, ObjectiveOptions, TargetOutputs
from dloop.hosts.target_model import embedding, head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CHUNK_ROWS = 2048
"""Rows whose logits exist at once: with 152k tokens and float32 these are 1.2 GB."""


@dataclass(frozen=True)
class StageLoss:
    """Weighted sums of each loss term over one stage's draft rows; `correct_BNT` compares greedy drafts with labels."""

    sums: Tensor
    denominator: Tensor
    correct_BNT: Tensor


class BlockObjective(Objective):
    """Windows, packed stages, weights and metrics; a family adds its terms."""

    terms: tuple[str, ...] = ("cross_entropy",)
    """Names of a row's loss terms, in the order of `StageLoss.sums`."""

    def __init__(self, network: Any, target: PreTrainedModel, options: ObjectiveOptions) -> None:
        super().__init__()
        self.network, self.options = network, options
        self.taps = network.config.taps
        self.stage_length = network.config.stage_length
        self.num_anchors = 512 if options.num_anchors is None else options.num_anchors
        self.max_stage = 3 if options.dloop_max_stage is None else options.dloop_max_stage
        # Hidden from nn.Module: the target's weights are neither trained nor part of the draft's state.
        self._borrowed = (embedding(target), head(target))

    def embed(self, ids: Tensor) -> Tensor:
        """The target's frozen embedding."""
        return self._borrowed[0](ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's frozen head, in float32."""
        return self._borrowed[1](hidden).float()

    @abstractmethod
    def row_losses(self, hidden_MD: Tensor, labels_M: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        """Loss terms [M, terms] of draft rows and whether each row's greedy token is its label [M]."""

    def row_inputs(self, window: Window, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        """What `row_losses` wants besides hidden rows and labels, each [B, N, T, ...]."""
        return ()

    @abstractmethod
    def combine(self, host: StageLoss, loop: StageLoss | None, step: int) -> Tensor:
        """One differentiable total from both stages' sums at an optimizer step."""

    def forward(self, batch: Batch, outputs: TargetOutputs, step: int) -> Loss:
        generators = [seeded(self.options.seed, 1, batch.epoch, place) for place in batch.places]
        anchors_BN, keep_BN = sample_anchors(batch.loss_mask, self.num_anchors, generators)
        stages = self.stages(batch, outputs, anchors_BN, keep_BN, self.draw_stage(step))
        host_window, host_hidden = stages[0]
        loop_window, loop_hidden = stages[-1]
        host = self.stage_loss(host_hidden, host_window, outputs)
        loop = self.stage_loss(loop_hidden, loop_window, outputs) if len(stages) > 1 else None
        # Connects every parameter also when no row counts, so that no rank waits for another's gradients.
        nothing = sum(parameter.sum() for parameter in self.network.parameters()) * 0.0
        ratios = self._ratios("host", host, host_window)
        if loop is not None:
            ratios |= self._ratios("loop", loop, loop_window)
        return Loss(self.combine(host, loop, step) + nothing, ratios)

    def draw_stage(self, step: int) -> int:
        """Loop stage k in 1..K of an optimizer step, the same on all ranks; 0 trains the host stage alone."""
        if self.max_stage == 0:
            return 0
        generator = seeded(self.options.seed, 2, step)
        return int(torch.randint(1, self.max_stage + 1, (1,), generator=generator))

    def stages(
        self, batch: Batch, outputs: TargetOutputs, anchors_BN: Tensor, keep_BN: Tensor, last: int
    ) -> list[tuple[Window, Tensor]]:
        """Windows and draft hidden states [B, N, T, D] of stages 0..`last` in the packed layout.

        Loop stages have fewer blocks: those that reach the last one.
        """
        offset_B = outputs.position_offset_B.to(anchors_BN.device)
        context = self._context(outputs, offset_B)
        results: list[tuple[Window, Tensor]] = []
        bank_BNXD = context[0][0].new_empty(*anchors_BN.shape, 0, self.network.config.hidden_size)
        for stage in range(last + 1):
            if stage == 1:
                keep_BN = reaches(batch.loss_mask, anchors_BN, keep_BN, last * self.stage_length)
                at = keep_alone(keep_BN)
                anchors_BN, keep_BN, bank_BNXD = anchors_BN[at], keep_BN[at], bank_BNXD[at]
            position_BN = anchors_BN + stage * self.stage_length
            window = open_windows(batch.input_ids, batch.loss_mask, position_BN, keep_BN, self.stage_length)
            raw_BNTD = self._packed_stage(context, bank_BNXD, anchors_BN, window, offset_B)
            hidden_BNTD = self.network.norm(raw_BNTD)
            bank_BNXD = torch.cat((bank_BNXD, self.network.loop_rows(raw_BNTD, hidden_BNTD)), dim=2)
            results.append((window, hidden_BNTD))
        return results

    def _context(self, outputs: TargetOutputs, offset_B: Tensor) -> list[KeysValues]:
        """Each layer's keys and values of the target's features, the same for all stages."""
        context_BSD = self.network.context(torch.cat([outputs.states[tap] for tap in self.network.config.taps], dim=-1))
        positions_S = torch.arange(context_BSD.shape[1], device=offset_B.device)
        return self.network.keys_values(context_BSD, positions_S + offset_B[:, None])

    def _packed_stage(
        self, context: list[KeysValues], bank_BNXD: Tensor, anchors_BN: Tensor, window: Window, offset_B: Tensor
    ) -> Tensor:
        """Draft rows [B, N, T, D] of one stage before the final norm."""
        # The newest drafted token is the block's own first row, so its state stays out.
        extra_BNXD = self.network.loop_context(bank_BNXD, 0, max(bank_BNXD.shape[2] - 1, 0))
        (_, anchors, extra, _), rows = extra_BNXD.shape, self.network.config.block_size
        own = self.network.keys_values(extra_BNXD.flatten(1, 2), _places(anchors_BN + 1, extra) + offset_B[:, None])
        packing = Packing(context[0][0].shape[2], extra, rows, anchors_BN, window.keep_BN)
        raw_BQD = self.network(
            self._block_rows(window),
            _places(window.position_BN, rows) + offset_B[:, None],
            context,
            [(keys.unflatten(2, (anchors, extra)), values.unflatten(2, (anchors, extra))) for keys, values in own],
            ATTENTION_BACKENDS[self.options.attention_backend](packing),
        )
        return raw_BQD.unflatten(1, (anchors, rows))[:, :, self.network.config.first_draft_row :]

    def _block_rows(self, window: Window) -> Tensor:
        """Embedded blocks [anchor, MASK, ...] as [B, N x R, D]."""
        config = self.network.config
        ids_BNR = window.anchor_BN[..., None].repeat(1, 1, config.block_size)
        ids_BNR[..., 1:] = config.mask_token_id
        return self.embed(ids_BNR.flatten(1))

    def counted(self, window: Window) -> Tensor:
        """Which draft rows [B, N, T] count."""
        return window.mask_BNT

    def row_weights(self, window: Window) -> Tensor:
        """Weight [B, N, T] of each draft row: whether it counts, decayed along the block so that the first counts 1."""
        gamma = self.options.loss_decay_gamma
        if gamma is None or gamma <= 0:
            return self.counted(window).float()
        steps = torch.arange(self.stage_length, device=window.mask_BNT.device)
        return self.counted(window) * torch.exp(-steps / gamma)

    def stage_loss(self, hidden_BNTD: Tensor, window: Window, outputs: TargetOutputs) -> StageLoss:
        """Weighted sums of one stage; logits exist for counted rows alone, a chunk at a time."""
        weight_BNT = self.row_weights(window)
        counted = weight_BNT > 0
        inputs = (hidden_BNTD, window.labels_BNT, *self.row_inputs(window, outputs))
        sums = [weight_BNT.new_zeros(len(self.terms))]
        correct: list[Tensor] = []
        chunks = counted.nonzero().split(_CHUNK_ROWS)
        for chunk in chunks:
            at = chunk.unbind(-1)
            rows = (weight_BNT[at], *(part[at] for part in inputs))
            # One chunk may keep its logits; several are recomputed in the backward, one at a time.
            recompute = len(chunks) > 1
            total, right = (
                checkpoint(self._weighted, *rows, use_reentrant=False) if recompute else self._weighted(*rows)
            )
            sums.append(total)
            correct.append(right)
        correct_BNT = torch.zeros_like(counted)
        if correct:
            correct_BNT[counted] = torch.cat(correct)
        return StageLoss(torch.stack(sums).sum(0), weight_BNT.sum(), correct_BNT)

    def _weighted(self, weight_M: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        losses_ML, correct_M = self.row_losses(*inputs)
        return weight_M @ losses_ML, correct_M

    def _ratios(self, name: str, stage: StageLoss, window: Window) -> dict[str, tuple[Tensor, Tensor]]:
        """Loss terms, accuracy by place in the block and accepted prefix."""
        counted = self.counted(window)
        ratios = {
            f"{name}/{term}": (total.detach(), stage.denominator)
            for term, total in zip(self.terms, stage.sums, strict=True)
        }
        prefix_BN = stage.correct_BNT.long().cumprod(-1).sum(-1)
        whole_BN = counted.all(-1)
        ratios[f"{name}/accepted_prefix"] = ((prefix_BN * whole_BN).sum(), whole_BN.sum())
        right_T, counted_T = stage.correct_BNT.sum((0, 1)), counted.sum((0, 1))
        for place in range(len(right_T)):
            ratios[f"{name}/accuracy/{place + 1}"] = (right_T[place], counted_T[place])
        return ratios


def _places(start_BN: Tensor, count: int) -> Tensor:
    """`count` consecutive positions from each start, [B, N x count]."""
    return (start_BN[..., None] + torch.arange(count, device=start_BN.device)).flatten(1)


def with_loop_weight(host: Tensor, loop: Tensor | None, weight: float | None) -> Tensor:
    """(1 - w) host + w loop, w = 0.25 unless given; the host's loss alone where no loop stage was trained."""
    if loop is None:
        return host
    share = 0.25 if weight is None else weight
    return (1 - share) * host + share * loop
