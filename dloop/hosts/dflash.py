"""DFlash: rows 1.. of a masked block predict the tokens at their own positions, all at once.

Formats: z-lab/dflash and sgl-project/SpecForge. Everything but the loss's normaliser and the tree is shared with the
other block drafters (`dloop/hosts/block/`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dloop.hosts.block.config import read_block_config
from dloop.hosts.block.drafter import BlockDrafter, pack_chain
from dloop.hosts.block.host import BlockHost
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.block.objective import BlockObjective, StageLoss
from dloop.hosts.host import ObjectiveOptions
from dloop.trees.ddtree import build_ddtree
from dloop.trees.nodes import Nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DFlashDrafter(BlockDrafter):
    """Greedy chain and tree straight from the target's head."""

    def read(self, rows_TD: Tensor, anchor_1: Tensor) -> tuple[Tensor, ...]:
        logits_TV = self.head(rows_TD).float()
        chain_2T, normaliser_T1 = pack_chain(logits_TV)
        return chain_2T, logits_TV, normaliser_T1

    def grow(self, budget: int, anchor: int, rows_TD: Tensor, *kept: Tensor) -> Nodes:
        logits_TV, normaliser_T1 = kept
        return build_ddtree(logits_TV, budget, self.tree.topk_k, normaliser_T1)


class DFlashObjective(BlockObjective):
    """Weighted cross-entropy; host stage and loop stage share one normaliser (paper, loop-aware training)."""

    def row_losses(self, hidden_MD: Tensor, labels_M: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        logits_MV = self.logits(hidden_MD)
        losses_M = F.cross_entropy(logits_MV, labels_M, reduction="none")
        return losses_M[:, None], logits_MV.detach().argmax(-1) == labels_M

    def combine(self, host: StageLoss, loop: StageLoss | None, step: int) -> Tensor:
        stages = [host] if loop is None else [host, loop]
        numerator = torch.stack([stage.sums.sum() for stage in stages]).sum()
        return numerator / (torch.stack([stage.denominator for stage in stages]).sum() + 1e-6)


class DFlashHost(BlockHost):
    """Any DFlash checkpoint: `dflash_config` without a projector, or the architecture's name."""

    name: ClassVar[str] = "dflash"
    tree_defaults: ClassVar[Mapping[str, Any]] = {"tree_budget": 0, "stage_tree_budget": 64, "topk_k": None}
    drafter_class = DFlashDrafter
    objective_class = DFlashObjective

    @classmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        inner = config.get("dflash_config")
        if (inner or {}).get("projector_type"):
            return False
        return inner is not None or "DFlashDraftModel" in (config.get("architectures") or [])

    @classmethod
    def build(cls, raw: dict[str, Any]) -> BlockBackbone:
        return BlockBackbone(read_block_config(raw, first_draft_row=1))

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> BlockObjective:
        no_curriculum: dict[str, Any] = {"lambda_base_start": None, "lambda_base_decay_ratio": None}
        self.refuse(options, because="both cross-entropies share one normaliser", dloop_loss_weight=None)
        self.refuse(options, because="it has no curriculum", **no_curriculum)
        return super().objective(target, options)
