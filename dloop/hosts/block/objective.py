"""Loop-aware training of a block drafter (paper, loop-aware training).

A step trains the host's own stage and one loop stage k, drawn uniformly from 1..K. Stages 1..k-1 run without a loss
to make the draft states that stage k conditions on; gradients flow through them. Teacher tokens are the ground truth.
A family adds its loss per stage and says how host and loop stage combine.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dloop.data.loader import Batch
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.block.packing import (
    ATTENTION_BACKENDS,
    Packing,
    Window,
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
    """Sums over one stage's draft rows; `correct_BNT` compares the greedy drafts with the labels."""

    numerator: Tensor
    denominator: Tensor
    correct_BNT: Tensor


class BlockObjective(Objective):
    """`first_draft_row` is the block row whose output predicts the first token behind the anchor."""

    first_draft_row: int

    def __init__(self, network: BlockBackbone, target: PreTrainedModel, options: ObjectiveOptions) -> None:
        super().__init__()
        self.network, self.options = network, options
        self.taps = network.config.taps
        self.stage_length = network.config.block_size - self.first_draft_row
        # Hidden from nn.Module: the target's weights are neither trained nor part of the draft's state.
        self._borrowed = (embedding(target), head(target))

    @abstractmethod
    def combine(self, host: StageLoss, loop: StageLoss | None) -> Loss:
        """One differentiable total from both stages' sums."""

    def forward(self, batch: Batch, outputs: TargetOutputs, step: int) -> Loss:
        generators = [seeded(self.options.seed, 1, batch.epoch, place) for place in batch.places]
        anchors_BN, keep_BN = sample_anchors(batch.loss_mask, self.options.num_anchors, generators)
        stages = self.stages(batch, outputs, anchors_BN, keep_BN, self.draw_stage(step))
        windows, hiddens = [stages[0][0], stages[-1][0]], [stages[0][1], stages[-1][1]]
        host = self.stage_loss(hiddens[0], windows[0])
        loop = self.stage_loss(hiddens[1], windows[1]) if len(stages) > 1 else None
        loss = self.combine(host, loop)
        # Connects every parameter also when no row counts, so that no rank waits for another's gradients.
        anchor = sum(parameter.sum() for parameter in self.network.parameters()) * 0.0
        return replace(loss, total=loss.total + anchor, ratios=_ratios(host, windows[0], loop, windows[1]))

    def draw_stage(self, step: int) -> int:
        """Loop stage k in 1..K of an optimizer step, the same on all ranks; 0 trains the host stage alone."""
        if self.options.dloop_max_stage == 0:
            return 0
        generator = seeded(self.options.seed, 2, step)
        return int(torch.randint(1, self.options.dloop_max_stage + 1, (1,), generator=generator))

    def stages(
        self, batch: Batch, outputs: TargetOutputs, anchors_BN: Tensor, keep_BN: Tensor, last: int
    ) -> list[tuple[Window, Tensor]]:
        """Windows and draft hidden states [B, N, T, D] of stages 0..`last` in the packed layout."""
        features = torch.cat([outputs.states[tap] for tap in self.taps], dim=-1)
        context_BSD = self.network.context(features)
        offset_B = outputs.position_offset_B.to(anchors_BN.device)
        reaching_BN = reaches(batch.loss_mask, anchors_BN, keep_BN, last * self.stage_length) if last else keep_BN
        results: list[tuple[Window, Tensor]] = []
        bank_BNXD = context_BSD.new_empty(*anchors_BN.shape, 0, context_BSD.shape[-1])
        for stage in range(last + 1):
            start = stage * self.stage_length
            window = open_windows(
                batch.input_ids,
                batch.loss_mask,
                anchors_BN + start,
                reaching_BN if stage else keep_BN,
                self.stage_length,
            )
            hidden_BNTD = self._packed_stage(context_BSD, bank_BNXD, anchors_BN, window, offset_B)
            bank_BNXD = torch.cat((bank_BNXD, hidden_BNTD), dim=2)
            results.append((window, hidden_BNTD))
        return results

    def _packed_stage(
        self, context_BSD: Tensor, bank_BNXD: Tensor, anchors_BN: Tensor, window: Window, offset_B: Tensor
    ) -> Tensor:
        """Draft rows [B, N, T, D] of one stage; the newest banked row is the block's own first row and stays out."""
        extra_BNXD = self.network.loop_context(bank_BNXD[:, :, :-1])
        rows = self.network.config.block_size
        packing = Packing(context_BSD.shape[1], extra_BNXD.shape[2], rows, anchors_BN, window.keep_BN)
        positions_BK = self._positions(packing, window.position_BN) + offset_B[:, None]
        hidden_BQD = self.network(
            self._block_rows(window),
            torch.cat((context_BSD, extra_BNXD.flatten(1, 2)), dim=1),
            positions_BK,
            ATTENTION_BACKENDS[self.options.attention_backend](packing),
        )
        return hidden_BQD.unflatten(1, (packing.anchors, rows))[:, :, self.first_draft_row :]

    def _block_rows(self, window: Window) -> Tensor:
        """Embedded blocks [anchor, MASK, ...] as [B, N x R, D]."""
        config = self.network.config
        ids_BNR = window.anchor_BN[..., None].repeat(1, 1, config.block_size)
        ids_BNR[..., 1:] = config.mask_token_id
        return self._borrowed[0](ids_BNR.flatten(1))

    @staticmethod
    def _positions(packing: Packing, start_BN: Tensor) -> Tensor:
        device = start_BN.device
        context = torch.arange(packing.context, device=device).expand(len(start_BN), -1)
        extra = packing.anchor_BN[..., None] + torch.arange(1, packing.extra + 1, device=device)
        block = start_BN[..., None] + torch.arange(packing.rows, device=device)
        return torch.cat((context, extra.flatten(1), block.flatten(1)), dim=1)

    def row_weights(self, window: Window) -> Tensor:
        """Weight [B, N, T] of each draft row: its mask, decayed along the block so that the first counts 1."""
        gamma = self.options.loss_decay_gamma
        if gamma is None or gamma <= 0:
            return window.mask_BNT.float()
        steps = torch.arange(self.stage_length, device=window.mask_BNT.device)
        return window.mask_BNT * torch.exp(-steps / gamma)

    def stage_loss(self, hidden_BNTD: Tensor, window: Window) -> StageLoss:
        """Weighted cross-entropy of one stage; logits exist for counted rows alone, a chunk at a time."""
        weight_BNT = self.row_weights(window)
        counted = weight_BNT > 0
        sums, correct = [], []
        chunks = counted.nonzero().split(_CHUNK_ROWS)
        for chunk in chunks:
            at = chunk.unbind(-1)
            rows = (hidden_BNTD[at], window.labels_BNT[at], weight_BNT[at])
            # One chunk may keep its logits; several are recomputed in the backward, one at a time.
            recompute = len(chunks) > 1
            total, right = (
                checkpoint(self._cross_entropy, *rows, use_reentrant=False) if recompute else self._cross_entropy(*rows)
            )
            sums.append(total)
            correct.append(right)
        correct_BNT = torch.zeros_like(counted)
        if correct:
            correct_BNT[counted] = torch.cat(correct)
        numerator = torch.stack(sums).sum() if sums else weight_BNT.new_zeros(())
        return StageLoss(numerator, weight_BNT.sum(), correct_BNT)

    def _cross_entropy(self, hidden_MD: Tensor, labels_M: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = self._borrowed[1](hidden_MD).float()
        losses_M = F.cross_entropy(logits_MV, labels_M, reduction="none")
        return (losses_M * weight_M).sum(), logits_MV.detach().argmax(-1) == labels_M


def _ratios(
    host: StageLoss, host_window: Window, loop: StageLoss | None, loop_window: Window
) -> dict[str, tuple[Tensor, Tensor]]:
    """Loss, accuracy by place in the block and accepted prefix, for the host stage and the loop stage."""
    ratios: dict[str, tuple[Tensor, Tensor]] = {}
    for name, stage, window in (("host", host, host_window), ("loop", loop, loop_window)):
        if stage is None:
            continue
        ratios[f"{name}/loss"] = (stage.numerator.detach(), stage.denominator.detach())
        prefix_BN = stage.correct_BNT.long().cumprod(-1).sum(-1)
        whole_BN = window.mask_BNT.all(-1)
        ratios[f"{name}/accepted_prefix"] = ((prefix_BN * whole_BN).sum(), whole_BN.sum())
        right_T, counted_T = stage.correct_BNT.sum((0, 1)), window.mask_BNT.sum((0, 1))
        for place in range(len(right_T)):
            ratios[f"{name}/accuracy/{place + 1}"] = (right_T[place], counted_T[place])
    return ratios
