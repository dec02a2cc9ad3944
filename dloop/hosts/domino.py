"""Domino: DFlash's block with a recurrent head that corrects each row by the tokens drafted before it.

A GRU reads the target's embeddings of the root and the drafts so far; its state and the row give a low-rank correction
of the logits. The first `pure_draft_prefix_len` drafts stay uncorrected. Format and loop: jianuo-huang/Domino
(code/dflash.py); training: sgl-project/SpecForge.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dloop.hosts.block.config import BlockConfig, need, nested, read_block_config
from dloop.hosts.block.drafter import BlockDrafter, pack_chain
from dloop.hosts.block.host import BlockHost
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.block.objective import BlockObjective, StageLoss, with_loop_weight
from dloop.hosts.block.packing import Window
from dloop.hosts.block.scorer import BlockScorer
from dloop.hosts.greedy import greedy_tokens
from dloop.hosts.host import TargetOutputs
from dloop.hosts.tree_options import DARTREE_DEFAULTS
from dloop.trees.dartree import build_dartree
from dloop.trees.nodes import Nodes

PROJECTORS = ("domino", "causal_v5")
"""Values of `projector_type` that mean this family; the second is an old name."""


class DominoNetwork(BlockBackbone):
    """The shared backbone, a GRU over token embeddings and a projector from [row, state] to logits."""

    def __init__(self, config: BlockConfig, raw: Mapping[str, Any]) -> None:
        super().__init__(config)
        state, middle = int(need(raw, "gru_hidden_dim")), int(need(raw, "emb_dim"))
        self.prefix_length = int(nested(raw, "pure_draft_prefix_len", 0))
        self.prefix_gru = nn.GRU(config.hidden_size, state, bias=False, batch_first=True)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + state, middle, bias=False),
            nn.SiLU(),
            nn.Linear(middle, int(need(raw, "vocab_size")), bias=False),
        )

    def correct(self, base: Tensor, hidden: Tensor, state: Tensor) -> Tensor:
        """Float32 logits [..., V] of rows [..., D] after states [..., G]."""
        return base.float() + self.embed_proj(torch.cat((hidden, state), dim=-1)).float()

    @property
    def projector_weights(self) -> tuple[Tensor, Tensor]:
        """The projector's matrices: [middle, D + G] (row first, then state) and [V, middle]."""
        return self.embed_proj.get_parameter("0.weight"), self.embed_proj.get_parameter("2.weight")

    def step(self, embedded_WD: Tensor, states_WG: Tensor) -> Tensor:
        """States [W, G] after one more token each."""
        # One cell: torch's GRU over sequences of one token prepares its weights anew each time.
        return torch.gru_cell(embedded_WD, states_WG, *self.prefix_gru.all_weights[0])

    def start(self, embedded_WD: Tensor) -> Tensor:
        """States [W, G] after a first token."""
        return self.step(embedded_WD, embedded_WD.new_zeros(len(embedded_WD), self.prefix_gru.hidden_size))


class DominoDrafter(BlockDrafter):
    """Corrects the block's rows one after the other, the GRU one token behind."""

    network: DominoNetwork

    def read(self, rows_TD: Tensor, anchor_1: Tensor) -> tuple[Tensor, ...]:
        base_TV = self.head(rows_TD)
        state_1G = self.network.start(self.embed(anchor_1))
        logits: list[Tensor] = []
        for place, (hidden_D, base_V) in enumerate(zip(rows_TD, base_TV, strict=True)):
            if place:
                state_1G = self.network.step(self.embed(greedy_tokens(logits[-1])[None]), state_1G)
            corrected = place >= self.network.prefix_length
            logits.append(self.network.correct(base_V, hidden_D, state_1G[0]) if corrected else base_V.float())
        return pack_chain(torch.stack(logits))[0], base_TV

    def grow(self, budget: int, anchor: int, rows_TD: Tensor, *kept: Tensor) -> Nodes:
        (base_TV,) = kept
        scorer = GRUScorer(self.network, self.embed, rows_TD, base_TV, anchor)
        return build_dartree(scorer, width=self.tree.tree_width, beta=self.tree.tree_beta, budget=budget)


class GRUScorer(BlockScorer):
    """The GRU's correction of a tree's candidates: it depends on the whole path to the parent."""

    def __init__(self, network: DominoNetwork, embed: nn.Module, rows_TD: Tensor, base_TV: Tensor, anchor: int) -> None:
        super().__init__(rows_TD, base_TV, anchor)
        self.network, self.embed = network, embed
        into, out = network.projector_weights
        row_size = rows_TD.shape[-1]
        # The projector's first matrix splits into a part for the row, the same for all parents, and one for the state.
        self._row_part_TM = rows_TD @ into[:, :row_size].T
        self._state_weight, self._output_weight = into[:, row_size:], out

    def root_state(self) -> Tensor:
        return self.network.start(self.embed(torch.tensor([self.root_token], device=self.rows_TD.device)))

    def scores(self, depth: int, parent_tokens_P: Tensor, states_PG: Tensor) -> Tensor:
        if depth < self.network.prefix_length:
            return self.base_LC[depth].expand(len(states_PG), -1)
        latent_PM = F.silu(self._row_part_TM[depth] + states_PG @ self._state_weight.T)
        return self.corrected(depth, latent_PM, self._output_weight)

    def advance(self, depth: int, states_WG: Tensor, tokens_W: Tensor) -> Tensor:
        return self.network.step(self.embed(tokens_W), states_WG)


class DominoObjective(BlockObjective):
    """Cross-entropy after and before the correction, shifted from the latter to the former over the run."""

    network: DominoNetwork
    terms = ("cross_entropy", "base_cross_entropy")

    def row_inputs(self, window: Window, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        read_BNT = torch.cat((window.anchor_BN[..., None], window.labels_BNT[..., :-1]), dim=-1)
        states, _ = self.network.prefix_gru(self.embed(read_BNT.flatten(0, 1)))
        place_BNT = torch.arange(self.stage_length, device=read_BNT.device).expand_as(read_BNT)
        return states.unflatten(0, read_BNT.shape[:2]), place_BNT >= self.network.prefix_length

    def row_losses(self, hidden_MD: Tensor, labels_M: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        state_MG, corrected_M = extra
        base_MV = self.logits(hidden_MD)
        final_MV = torch.where(corrected_M[:, None], self.network.correct(base_MV, hidden_MD, state_MG), base_MV)
        losses = [F.cross_entropy(logits, labels_M, reduction="none") for logits in (final_MV, base_MV)]
        return torch.stack(losses, dim=-1), final_MV.detach().argmax(-1) == labels_M

    def base_share(self, step: int) -> float:
        """Weight of the uncorrected loss: from its start value linearly to 0 (sgl-project/SpecForge's curriculum)."""
        start = 1.0 if self.options.lambda_base_start is None else self.options.lambda_base_start
        ratio = 0.5 if self.options.lambda_base_decay_ratio is None else self.options.lambda_base_decay_ratio
        if not self.options.total_steps:
            return 0.0
        horizon = max(1, int(self.options.total_steps * ratio))
        return min(max(start * (1 - min(step / horizon, 1.0)), 0.0), 1.0)

    def combine(self, host: StageLoss, loop: StageLoss | None, step: int) -> Tensor:
        share = self.base_share(step)
        return with_loop_weight(
            self.mixed(host, share),
            None if loop is None else self.mixed(loop, share),
            self.options.dloop_loss_weight,
        )

    @staticmethod
    def mixed(stage: StageLoss, share: float) -> Tensor:
        """One stage's loss with the uncorrected one at `share`."""
        final, base = stage.sums
        return ((1 - share) * final + share * base) / (stage.denominator + 1e-6)


class DominoHost(BlockHost):
    """Public and SpecForge checkpoints, old names included."""

    name: ClassVar[str] = "domino"
    tree_defaults: ClassVar[Mapping[str, Any]] = DARTREE_DEFAULTS
    drafter_class = DominoDrafter
    objective_class = DominoObjective

    @classmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        projector = (config.get("dflash_config") or {}).get("projector_type")
        return projector in PROJECTORS or "DominoDraftModel" in (config.get("architectures") or [])

    @classmethod
    def build(cls, raw: dict[str, Any]) -> BlockBackbone:
        shifted = bool(nested(raw, "shift_label", False))
        return DominoNetwork(read_block_config(raw, first_draft_row=0 if shifted else 1), raw)
