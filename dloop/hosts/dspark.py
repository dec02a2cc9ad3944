"""DSpark: row i of a masked block predicts the token behind its place, corrected by the token before it.

A Markov head adds a low-rank bias that depends on the previous token; a confidence head, trained beside it, says how
likely each draft is to be accepted (loaded, trained and saved; the released setting verifies every draft). Flavours:
deepseek-ai/DeepSpec (fields at the top level, copies of embedding and head) and sgl-project/SpecForge (fields in
`dflash_config`); saved is the latter with top-level copies, which both loaders read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dloop.cli import UserError
from dloop.hosts.block.config import BlockConfig, need, nested, read_block_config
from dloop.hosts.block.drafter import BlockDrafter, pack_chain
from dloop.hosts.block.host import BlockHost
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.block.objective import BlockObjective, StageLoss, with_loop_weight
from dloop.hosts.block.packing import Window
from dloop.hosts.block.scorer import BlockScorer
from dloop.hosts.greedy import greedy_tokens
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.tree_options import DARTREE_DEFAULTS
from dloop.trees.dartree import build_dartree
from dloop.trees.nodes import Nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COPIES = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of the target that DeepSpec's flavour carries along."""
HEAD_FIELDS = (
    *("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
"""Fields that the flavours keep in different places."""
LOSS_SHARES = (0.1, 0.9)
"""Cross-entropy and L1 distance in the loss (deepseek-ai/DeepSpec:deepspec/trainer)."""


class MarkovHead(nn.Module):
    """A bias on the logits from the previous token, through r dimensions; `gated` lets the row decide how much."""

    def __init__(self, vocabulary: int, rank: int, hidden_size: int, kind: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, vocabulary, bias=False)
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None

    def latent(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """What `markov_w2` turns into the bias: [..., r] of previous tokens [...] and rows [..., D]."""
        embedded = self.markov_w1(previous)
        if self.gate_proj is None:
            return embedded
        return torch.sigmoid(self.gate_proj(torch.cat((hidden, embedded), dim=-1))) * embedded

    def forward(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Bias [..., V]."""
        return self.markov_w2(self.latent(previous, hidden))


class ConfidenceHead(nn.Module):
    """One logit a row: will this draft be accepted?"""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.proj(inputs)[..., 0]


class DSparkNetwork(BlockBackbone):
    """The shared backbone with its two heads, either of which a checkpoint may lack."""

    def __init__(self, config: BlockConfig, raw: Mapping[str, Any]) -> None:
        super().__init__(config)
        rank, kind = int(nested(raw, "markov_rank", 0)), nested(raw, "markov_head_type", "vanilla")
        if rank and kind not in ("vanilla", "gated"):
            raise UserError(f"the draft's Markov head is of type {kind!r}; supported are 'vanilla' and 'gated'")
        self.with_markov = bool(nested(raw, "confidence_head_with_markov", False)) and rank > 0
        self.alpha = float(nested(raw, "confidence_head_alpha", 1.0))
        confident = nested(raw, "enable_confidence_head", nested(raw, "confidence_head_alpha", 0) > 0)
        d = config.hidden_size
        self.markov_head = MarkovHead(int(need(raw, "vocab_size")), rank, d, kind) if rank else None
        self.confidence_head = ConfidenceHead(d + rank * self.with_markov) if confident else None

    def correct(self, base: Tensor, previous: Tensor, hidden: Tensor) -> Tensor:
        """Float32 logits [..., V] after the Markov bias."""
        if self.markov_head is None:
            return base.float()
        return base.float() + self.markov_head(previous, hidden).float()

    def confidence(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Confidence logits [...] of rows [..., D] behind tokens [...]."""
        assert self.confidence_head is not None
        if self.with_markov and self.markov_head is not None:
            hidden = torch.cat((hidden, self.markov_head.markov_w1(previous)), dim=-1)
        return self.confidence_head(hidden)


class DSparkDrafter(BlockDrafter):
    """Corrects the block's rows one after the other: each needs the token drafted before it."""

    network: DSparkNetwork

    def read(self, rows_TD: Tensor, anchor_1: Tensor) -> tuple[Tensor, ...]:
        base_TV = self.head(rows_TD)
        previous = anchor_1[0]
        corrected = []
        for hidden_D, base_V in zip(rows_TD, base_TV, strict=True):
            corrected.append(self.network.correct(base_V, previous, hidden_D))
            previous = greedy_tokens(corrected[-1])
        return pack_chain(torch.stack(corrected))[0], base_TV

    def grow(self, budget: int, anchor: int, rows_TD: Tensor, *kept: Tensor) -> Nodes:
        (base_TV,) = kept
        scorer = MarkovScorer(self.network.markov_head, rows_TD, base_TV, anchor)
        return build_dartree(scorer, width=self.tree.tree_width, beta=self.tree.tree_beta, budget=budget)


class MarkovScorer(BlockScorer):
    """The Markov bias of a tree's candidates: it depends on the parent's token (and, gated, on the row)."""

    def __init__(self, markov_head: MarkovHead | None, rows_TD: Tensor, base_TV: Tensor, anchor: int) -> None:
        super().__init__(rows_TD, base_TV, anchor)
        self.markov_head = markov_head

    def scores(self, depth: int, parent_tokens_P: Tensor, states_PG: Tensor) -> Tensor:
        if self.markov_head is None:
            return self.base_LC[depth].expand(len(parent_tokens_P), -1)
        rows_PD = self.rows_TD[depth].expand(len(parent_tokens_P), -1)
        latent_PM = self.markov_head.latent(parent_tokens_P, rows_PD)
        return self.corrected(depth, latent_PM, self.markov_head.markov_w2.weight)


class DSparkObjective(BlockObjective):
    """Cross-entropy and L1 distance to the target's distribution, and the confidence head's own loss.

    A masked label drops the rest of its block. The normaliser is the sum of weights over all ranks, times their
    number, which cancels the mean that gradients are reduced by (deepseek-ai/DeepSpec:deepspec/trainer).
    """

    network: DSparkNetwork
    terms = ("cross_entropy", "l1", "confidence")

    def __init__(self, network: DSparkNetwork, target: PreTrainedModel, options: ObjectiveOptions) -> None:
        super().__init__(network, target, options)
        self.taps = (*network.config.taps, "norm")

    def counted(self, window: Window) -> Tensor:
        return window.mask_BNT.long().cumprod(-1).bool()

    def row_inputs(self, window: Window, outputs: TargetOutputs) -> tuple[Tensor, ...]:
        previous_BNT = torch.cat((window.anchor_BN[..., None], window.labels_BNT[..., :-1]), dim=-1)
        last_BSD = outputs.states["norm"]
        places_BNT = window.position_BN[..., None] + torch.arange(self.stage_length, device=previous_BNT.device)
        flat = places_BNT.clamp(max=last_BSD.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, last_BSD.shape[-1])
        return previous_BNT, last_BSD.gather(1, flat).unflatten(1, places_BNT.shape[1:])

    def row_losses(self, hidden_MD: Tensor, labels_M: Tensor, *extra: Tensor) -> tuple[Tensor, Tensor]:
        previous_M, teacher_MD = extra
        logits_MV = self.network.correct(self.logits(hidden_MD), previous_M, hidden_MD)
        with torch.no_grad():
            teacher_MV = self.logits(teacher_MD).softmax(-1)
        distance_M = (logits_MV.softmax(-1) - teacher_MV).abs().sum(-1)
        losses = [F.cross_entropy(logits_MV, labels_M, reduction="none"), distance_M, torch.zeros_like(distance_M)]
        if self.network.confidence_head is not None:
            accepted_M = (1 - distance_M.detach() / 2).clamp(0, 1)
            confidence_M = self.network.confidence(previous_M, hidden_MD).float()
            losses[2] = F.binary_cross_entropy_with_logits(confidence_M, accepted_M, reduction="none")
        return torch.stack(losses, dim=-1), logits_MV.detach().argmax(-1) == labels_M

    def combine(self, host: StageLoss, loop: StageLoss | None, step: int) -> Tensor:
        stages = [self._stage_total(stage) if stage else None for stage in (host, loop)]
        assert stages[0] is not None
        return with_loop_weight(stages[0], stages[1], self.options.dloop_loss_weight)

    def _stage_total(self, stage: StageLoss) -> Tensor:
        shares = stage.sums.new_tensor([*LOSS_SHARES, self.network.alpha])
        return (shares * stage.sums).sum() * _ranks() / (_sum_over_ranks(stage.denominator) + 1e-6)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _sum_over_ranks(value: Tensor) -> Tensor:
    if _ranks() == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


class DSparkHost(BlockHost):
    """Both flavours, and DeepSpec's ablation without heads."""

    name: ClassVar[str] = "dspark"
    tree_defaults: ClassVar[Mapping[str, Any]] = DARTREE_DEFAULTS
    drafter_class = DSparkDrafter
    objective_class = DSparkObjective

    @classmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        named = {"DSparkDraftModel", "Qwen3DSparkModel"} & set(config.get("architectures") or [])
        tagged = (config.get("dflash_config") or {}).get("projector_type") == "dspark"
        return bool(named) or tagged or any(key.startswith("markov_head.") for key in keys)

    @classmethod
    def build(cls, raw: dict[str, Any]) -> BlockBackbone:
        return DSparkNetwork(read_block_config(raw, first_draft_row=0), raw)

    @classmethod
    def translate(
        cls, raw: dict[str, Any], tensors: dict[str, Tensor] | None
    ) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        if tensors is not None:
            shape = [raw.get("vocab_size"), raw.get("hidden_size")]
            for name in COPIES:
                if name in tensors and list(tensors[name].shape) != shape:
                    raise UserError(f"dspark draft: {name} is {list(tensors[name].shape)}, expected {shape}")
            tensors = {name: tensor for name, tensor in tensors.items() if name not in COPIES}
        return specforge_config(raw), tensors

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> BlockObjective:
        self.refuse(options, lambda_base_start=None, lambda_base_decay_ratio=None, because="it has no curriculum")
        return super().objective(target, options)


def specforge_config(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` of either flavour in SpecForge's, with the head fields at the top level too."""
    fields = {name: value for name in HEAD_FIELDS if (value := nested(raw, name, None)) is not None}
    if "enable_confidence_head" not in fields:
        fields["enable_confidence_head"] = nested(raw, "confidence_head_alpha", 0) > 0
    mode = "mha" if raw.get("num_key_value_heads") == raw.get("num_attention_heads") else "gqa"
    inner = {"confidence_head_alpha": 1.0, "attention_mode": mode} | (raw.get("dflash_config") or {})
    return (
        raw
        | fields
        | {
            "architectures": ["DSparkDraftModel"],
            "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
            "dflash_config": inner | fields | {"projector_type": "dspark"},
        }
    )


def deepspec_config(raw: dict[str, Any]) -> dict[str, Any]:
    """`raw` of either flavour in DeepSpec's: the head fields at the top level alone."""
    flat = specforge_config(raw)
    return {name: value for name, value in flat.items() if name not in ("dflash_config", "auto_map")} | {
        "architectures": ["Qwen3DSparkModel"]
    }
