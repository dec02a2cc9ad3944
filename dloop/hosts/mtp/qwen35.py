"""Qwen3.5's head as a host: read out of the target's own checkpoint, or out of a folder with the head alone.

Format: the 15 tensors `mtp.*` as Qwen writes them into the target's shards, and the target's `config.json`. A head that
is saved here lies in a folder of its own; merged back into the target's shards it is read just as well.
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
from dloop.hosts.host import Host, ObjectiveOptions
from dloop.hosts.mtp.qwen35_config import MODEL_TYPES, read_qwen35_config
from dloop.hosts.mtp.qwen35_drafter import Qwen35Drafter
from dloop.hosts.mtp.qwen35_network import Qwen35Head
from dloop.hosts.mtp.qwen35_objective import Qwen35Objective
from dloop.hosts.target_model import embedding
from dloop.hosts.tree_options import LINEAR, TreeOptions
from dloop.hosts.unroll.objective import UNROLL_TRAINING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dloop.hosts.target_cache import TargetCache

PREFIX = "mtp."
ARCHITECTURE = "Qwen3_5MTP"


class Qwen35Host(Host):
    """One head with its checkpoint."""

    name: ClassVar[str] = "mtp"
    tree_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({"mtp_k": 3})
    start_flag: ClassVar[str] = "ckpt_dir"
    training_defaults: ClassVar[Mapping[str, float]] = UNROLL_TRAINING
    tensor_prefix: ClassVar[str] = PREFIX
    network: Qwen35Head
    taps = ("norm",)

    def __init__(self, raw: dict[str, Any], network: Qwen35Head) -> None:
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
    ) -> Qwen35Host:
        network = Qwen35Head(read_qwen35_config(config))
        if tensors is None:
            network.initialise()
        elif not tensors:
            raise UserError(f"the Qwen3.5 checkpoint holds no tensor {PREFIX}*, so it has no head to draft with")
        else:
            named = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
            load_strictly(network, named, "Qwen3.5 head")
        return cls(config, network.to(device, dtype))

    def check_target(self, target: PreTrainedModel) -> None:
        found, config = target.config.get_text_config(), self.network.config
        if found.model_type not in MODEL_TYPES:
            raise UserError(f"a Qwen3.5 head needs a Qwen3.5 target, this one is a {found.model_type}")
        for what, ours, theirs in (
            ("hidden size", config.hidden_size, found.hidden_size),
            ("vocabulary", config.vocab_size, embedding(target).num_embeddings),
        ):
            if ours != theirs:
                raise UserError(
                    f"the head was made for a target with {what} {ours}, this target has {theirs}; "
                    "choose the target that it was trained on"
                )

    def facts(self) -> dict[str, str]:
        config = self.network.config
        return {
            "target": f"hidden size {config.hidden_size}, vocabulary {config.vocab_size}; its final norm, embedding "
            "and head",
            "drafts": f"{self.tree_defaults['mtp_k']} a stage, unless --mtp-k says otherwise",
            "network": f"1 layer, {config.heads} heads, {config.kv_heads} key/value heads of {config.head_dim}, "
            f"{config.rotary_dim} of them rotated, rotary base {config.rope_theta:g}",
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        state = self.network.state_dict()
        tensors = {PREFIX + name: tensor.detach().to("cpu", dtype) for name, tensor in state.items()}
        name = str(dtype).removeprefix("torch.")
        write_checkpoint(folder, {**self.raw, "architectures": [ARCHITECTURE], "dtype": name}, tensors)

    def drafter(
        self, target: PreTrainedModel, tree: TreeOptions = LINEAR, cache: TargetCache | None = None
    ) -> Qwen35Drafter:
        self.check_target(target)
        return Qwen35Drafter(self.network, target, tree.mtp_k or self.tree_defaults["mtp_k"])

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> Qwen35Objective:
        self.check_target(target)
        block = ("num_anchors", "loss_decay_gamma", "dloop_max_stage", "dloop_loss_weight")
        unused: dict[str, Any] = dict.fromkeys((*block, "lambda_base_start", "lambda_base_decay_ratio"))
        self.refuse(options, because="it belongs to block drafters", **unused)
        return Qwen35Objective(self.network, target, options)
