"""EAGLE-3 checkpoints: recognised, loaded, saved in SpecForge's format, handed out as drafter and objective.

SpecForge leaves the embedding out, because it is the target's; EAGLE's own releases are `pytorch_model.bin` files with
the same names, in which a draft over the whole vocabulary has no maps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dloop.cli import UserError
from dloop.hosts.checkpoint_files import load_strictly, write_checkpoint
from dloop.hosts.eagle3.config import read_eagle3_config
from dloop.hosts.eagle3.drafter import Eagle3Drafter
from dloop.hosts.eagle3.network import Eagle3Network
from dloop.hosts.eagle3.objective import Eagle3Objective
from dloop.hosts.eagle3.vocabulary import DEFAULT_SIZE, check_maps, frequent_tokens, vocabulary_maps
from dloop.hosts.host import Host, ObjectiveOptions
from dloop.hosts.target_model import embedding
from dloop.hosts.tree_options import LINEAR, TreeOptions
from dloop.hosts.unroll.objective import BLOCK_OPTIONS, UNROLL_TRAINING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dloop.hosts.target_cache import TargetCache

EMBEDDING = "embed_tokens.weight"
LAYER = "midlayer."
ARCHITECTURE = "LlamaForCausalLMEagle3"


class Eagle3Host(Host):
    """One EAGLE-3 draft."""

    name: ClassVar[str] = "eagle3"
    tree_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType(
        {"tree_budget": 60, "stage_tree_budget": 48, "topk_k": 10, "tree_depth": 7}
    )
    start_flag: ClassVar[str] = "ckpt_dir"
    training_defaults: ClassVar[Mapping[str, float]] = UNROLL_TRAINING
    network: Eagle3Network

    def __init__(self, raw: dict[str, Any], network: Eagle3Network) -> None:
        self.raw, self.network = raw, network

    @classmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        if ARCHITECTURE in (config.get("architectures") or []) or "draft_vocab_size" in config:
            return True
        return not {f"{LAYER}hidden_norm.weight", "layers.0.hidden_norm.weight"}.isdisjoint(keys)

    @classmethod
    def load(
        cls,
        config: dict[str, Any],
        tensors: dict[str, Tensor] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Eagle3Host:
        if tensors is None:
            config = {"draft_vocab_size": min(DEFAULT_SIZE, int(config.get("vocab_size", 0))), **config}
        network = Eagle3Network(read_eagle3_config(config), own_embedding=tensors is not None and EMBEDDING in tensors)
        if tensors is None:
            network.initialise()
        else:
            load_strictly(network, _translated(tensors, network), "eagle3 draft")
            check_maps(network.d2t, network.t2d)
        return cls(config, network.to(device, dtype))

    def check_target(self, target: PreTrainedModel) -> None:
        config = self.network.config
        rows, hidden = embedding(target).weight.shape
        wanted = [("hidden size", config.target_hidden_size, hidden), ("vocabulary", config.vocab_size, rows)]
        if not hasattr(self.network, "embed_tokens"):
            wanted.append(("embedding", config.hidden_size, hidden))
        for what, ours, theirs in wanted:
            if ours != theirs:
                raise UserError(
                    f"the draft was made for a target with {what} {ours}, this target has {theirs}; "
                    "choose the target that the draft was trained on"
                )
        self.taps = config.taps(target.config.get_text_config().num_hidden_layers)

    def adopt_vocabulary(self, counts: Callable[[int], Tensor]) -> None:
        """The most frequent supervised tokens become the draft's vocabulary."""
        config, device = self.network.config, self.network.d2t.device
        if config.draft_vocab_size < config.vocab_size:
            ids = frequent_tokens(counts(config.vocab_size), config.draft_vocab_size).to(device)
            self.network.d2t, self.network.t2d = vocabulary_maps(ids, config.vocab_size)

    def facts(self) -> dict[str, str]:
        config = self.network.config
        layers = config.target_layers
        return {
            "target": f"hidden size {config.target_hidden_size}, vocabulary {config.vocab_size}; features of "
            + (f"layers {', '.join(map(str, layers))}" if layers else "three layers, by the target's depth"),
            "vocabulary": f"{config.draft_vocab_size} tokens of its own",
            "embedding": "its own" if hasattr(self.network, "embed_tokens") else "the target's",
            "network": f"1 layer of {config.hidden_size}, {config.heads} heads, {config.kv_heads} key/value heads of "
            f"{config.head_dim}, rotary base {config.rope_theta:g}",
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        tensors = {
            name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.network.state_dict().items()
        }
        raw = {**self.raw, "architectures": [ARCHITECTURE], "torch_dtype": str(dtype).removeprefix("torch.")}
        write_checkpoint(folder, raw, tensors)

    def drafter(
        self, target: PreTrainedModel, tree: TreeOptions = LINEAR, cache: TargetCache | None = None
    ) -> Eagle3Drafter:
        self.check_target(target)
        return Eagle3Drafter(self.network, target, tree)

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> Eagle3Objective:
        self.check_target(target)
        because = "its training unrolls (--ttt-length-dist) and has no blocks"
        self.refuse(options, because=because, **dict.fromkeys(BLOCK_OPTIONS))
        return Eagle3Objective(self.network, target, options, self.taps)


def _translated(tensors: dict[str, Tensor], network: Eagle3Network) -> dict[str, Tensor]:
    """Tensors under SpecForge's names, the maps of a whole vocabulary filled in."""
    config = network.config
    known = {
        LAYER + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name: tensor
        for name, tensor in tensors.items()
        if not name.endswith("rotary_emb.inv_freq")
    }
    if config.draft_vocab_size == config.vocab_size:
        known = {"d2t": network.d2t, "t2d": network.t2d} | known
    return known
