"""DFlash: rows 1.. of a masked block predict the tokens at their own positions, all at once.

Formats: z-lab/dflash and sgl-project/SpecForge. Everything but the block's labels and the loss's normaliser is shared
with the other block drafters (`dloop/hosts/block/`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from dloop.hosts.block.drafter import BlockDrafter, read_chain
from dloop.hosts.block.host import BlockHost
from dloop.hosts.block.objective import BlockObjective, StageLoss
from dloop.hosts.host import Loss, ObjectiveOptions, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIRST_DRAFT_ROW = 1


class DFlashDrafter(BlockDrafter):
    """Greedy chain straight from the target's head."""

    first_draft_row = FIRST_DRAFT_ROW

    def propose(self, rows_TD: Tensor, anchor: int) -> Segment:
        return read_chain(self.head(rows_TD))


class DFlashObjective(BlockObjective):
    """Weighted cross-entropy; host stage and loop stage share one normaliser (paper, loop-aware training)."""

    first_draft_row = FIRST_DRAFT_ROW

    def combine(self, host: StageLoss, loop: StageLoss | None) -> Loss:
        numerator, denominator = host.numerator, host.denominator
        if loop is not None:
            numerator, denominator = numerator + loop.numerator, denominator + loop.denominator
        return Loss(numerator / (denominator + 1e-6))


class DFlashHost(BlockHost):
    """Any DFlash checkpoint: `dflash_config` without a projector, or the architecture's name."""

    name: ClassVar[str] = "dflash"
    drafter_class = DFlashDrafter
    objective_class = DFlashObjective

    @classmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        inner = config.get("dflash_config")
        if (inner or {}).get("projector_type"):
            return False
        return inner is not None or "DFlashDraftModel" in (config.get("architectures") or [])

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> BlockObjective:
        self.refuse(options, dloop_loss_weight=None, because="both cross-entropies share one normaliser")
        return super().objective(target, options)
