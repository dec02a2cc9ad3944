"""The Gemma 4 assistant as a host: recognition, strict loading, saving, and what it demands of its target.

Format: google/gemma-4-*-assistant (`gemma4_unified_assistant` beside the 12B target, `gemma4_assistant` beside the
others). All layers reuse the target's keys and values, so the checkpoint holds no key or value projection; the head is
the assistant's own embedding table.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dloop.cli import UserError
from dloop.hosts.checkpoint_files import load_strictly, write_checkpoint
from dloop.hosts.host import Drafter, Host, Objective, ObjectiveOptions
from dloop.hosts.mtp.gemma4_drafter import Gemma4Drafter
from dloop.hosts.mtp.gemma4_network import LAYER_TYPES, build
from dloop.hosts.mtp.gemma4_objective import Gemma4Objective
from dloop.hosts.target_model import decoder, embedding
from dloop.hosts.tree_options import LINEAR, TreeOptions
from dloop.hosts.unroll.objective import BLOCK_OPTIONS, UNROLL_TRAINING
from dloop.results.atomic import write_json

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dloop.hosts.target_cache import TargetCache

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
DRAFTS_A_STAGE = 6
"""What the released assistants' generation_config.json asks for."""
_STACK = ("layers.", "norm.", "embed_tokens.")
"""Tensors below the assistant's decoder, whose prefix reading a checkpoint strips."""


class Gemma4Host(Host):
    """One assistant with its checkpoint."""

    name: ClassVar[str] = "mtp"
    tree_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"mtp_k": DRAFTS_A_STAGE})
    start_flag: ClassVar[str] = "ckpt_dir"
    training_defaults: ClassVar[Mapping[str, float]] = UNROLL_TRAINING
    network: Any
    taps = ("norm",)

    def __init__(self, raw: dict[str, Any], network: Any) -> None:
        self.raw, self.network = raw, network

    @classmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        return config.get("model_type") in MODEL_TYPES

    @classmethod
    def load(
        cls,
        config: dict[str, Any],
        tensors: dict[str, Tensor] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Gemma4Host:
        network = build(config, dtype)
        if tensors is None:
            _refuse_ordered(config)
        else:
            named = {f"model.{name}" if name.startswith(_STACK) else name: value for name, value in tensors.items()}
            if "model.embed_tokens.weight" in named:
                # Tied, so it is in the network's state twice and in the file once.
                named.setdefault("lm_head.weight", named["model.embed_tokens.weight"])
            load_strictly(network, named, "Gemma 4 assistant")
        return cls(config, network.to(device))

    def check_target(self, target: PreTrainedModel) -> None:
        config, rows = self.network.config, embedding(target).num_embeddings
        found = target.config.get_text_config()
        if not str(found.model_type).startswith("gemma4"):
            raise UserError(f"a Gemma 4 assistant needs a Gemma 4 target, this one is a {found.model_type}")
        pairs = [
            ("hidden size", config.backbone_hidden_size, found.hidden_size),
            ("vocabulary", config.get_text_config().vocab_size, rows),
        ]
        for kind in LAYER_TYPES:
            ours, theirs = _attention(self.network.model, kind), _attention(decoder(target), kind)
            pairs.append((f"key/value heads and their size ({kind})", ours or theirs, theirs))
        for what, asked, has in pairs:
            if asked != has:
                raise UserError(
                    f"the assistant was made for a target with {what} {asked}, this target has {has}; "
                    "choose the target that it was trained on"
                )

    def facts(self) -> dict[str, str]:
        config, text = self.network.config, self.network.config.get_text_config()
        attention = [
            f"{layers} {kind.split('_')[0]} of {heads} key/value heads of {size}"
            for kind in LAYER_TYPES
            if (layers := text.layer_types.count(kind))
            for heads, size in [_attention(self.network.model, kind) or (0, 0)]
        ]
        order = self.network.masked_embedding
        return {
            "target": f"a Gemma 4, hidden size {config.backbone_hidden_size}, vocabulary {text.vocab_size}; its final "
            "norm, scaled embedding, and the keys and values of its last layers",
            "drafts": f"{DRAFTS_A_STAGE} a stage, unless --mtp-k says otherwise",
            "network": f"{text.num_hidden_layers} layers of {text.hidden_size}, {text.num_attention_heads} heads; "
            + ", ".join(attention),
            "head": "its own table"
            if order is None
            else f"its own table below the best {order.centroid_intermediate_top_k} of {order.num_centroids} centroids",
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        state = self.network.state_dict()
        tensors = {name: _stored(tensor, dtype) for name, tensor in state.items() if name != "lm_head.weight"}
        # Verbatim but for the type: newer libraries write fields that older ones do not read.
        write_checkpoint(folder, {**self.raw, "dtype": str(dtype).removeprefix("torch.")}, tensors)
        write_json(folder / "generation_config.json", self._generation())

    def _generation(self) -> dict[str, Any]:
        """How transformers' own assisted generation is to drive the assistant."""
        text = self.raw["text_config"]
        ids = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in text}
        return {
            **ids,
            "is_assistant": True,
            "num_assistant_tokens": DRAFTS_A_STAGE,
            "num_assistant_tokens_schedule": "constant",
        }

    def drafter(self, target: PreTrainedModel, tree: TreeOptions = LINEAR, cache: TargetCache | None = None) -> Drafter:
        self.check_target(target)
        assert cache is not None, "the assistant attends the target's own keys and values"
        return Gemma4Drafter(self.network, target, cache, tree.mtp_k or DRAFTS_A_STAGE)

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> Objective:
        self.check_target(target)
        because = "its training unrolls (--ttt-length-dist) and has no blocks"
        self.refuse(options, because=because, **dict.fromkeys(BLOCK_OPTIONS))
        return Gemma4Objective(self.network, target, options)


def _stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    kept = tensor.detach().cpu()
    return kept.to(dtype) if kept.is_floating_point() else kept


def _attention(stack: Any, kind: str) -> tuple[int, int] | None:
    """Key/value heads and head size of the layers of one type; None without such a layer."""
    config = stack.config
    for layer, found in zip(stack.layers, config.layer_types, strict=True):
        if found == kind:
            attention = layer.self_attn
            return config.num_attention_heads // attention.num_key_value_groups, attention.head_dim
    return None


def _refuse_ordered(config: Mapping[str, Any]) -> None:
    if config.get("use_ordered_embeddings"):
        raise UserError(
            "an assistant with ordered embeddings cannot start from scratch: its order of tokens belongs to a "
            "trained table; set use_ordered_embeddings to false, or start from a released assistant"
        )
