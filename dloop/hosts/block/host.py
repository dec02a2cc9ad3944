"""The part of the host contract that is the same for every block drafter."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dloop.cli import UserError
from dloop.hosts.block.config import BlockConfig
from dloop.hosts.block.drafter import BlockDrafter
from dloop.hosts.block.network import BlockBackbone
from dloop.hosts.block.objective import BlockObjective
from dloop.hosts.checkpoint_files import load_strictly, write_checkpoint
from dloop.hosts.host import Host, ObjectiveOptions
from dloop.hosts.target_model import embedding
from dloop.hosts.tree_options import LINEAR, TreeOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dloop.hosts.target_cache import TargetCache


class BlockHost(Host):
    """One block drafter with its checkpoint; a family names its classes and its recognition rule."""

    drafter_class: ClassVar[type[BlockDrafter]]
    objective_class: ClassVar[type[BlockObjective]]
    network: BlockBackbone

    def __init__(self, raw: dict[str, Any], network: BlockBackbone) -> None:
        self.raw, self.network = raw, network
        self.taps = network.config.taps

    @classmethod
    def load(
        cls,
        config: dict[str, Any],
        tensors: dict[str, Tensor] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> BlockHost:
        config, tensors = cls.translate(config, tensors)
        network = cls.build(config)
        if tensors is None:
            network.initialise()
        else:
            load_strictly(network, tensors, f"{cls.name} draft")
        return cls(config, network.to(device, dtype))

    @classmethod
    @abstractmethod
    def build(cls, raw: dict[str, Any]) -> BlockBackbone:
        """The network that a translated configuration describes, its weights still arbitrary."""

    @classmethod
    def translate(
        cls, raw: dict[str, Any], tensors: dict[str, Tensor] | None
    ) -> tuple[dict[str, Any], dict[str, Tensor] | None]:
        """Configuration and tensors in the flavour that is saved; most families have only one."""
        return raw, tensors

    def check_target(self, target: PreTrainedModel) -> None:
        config: BlockConfig = self.network.config
        rows, hidden = embedding(target).weight.shape
        layers = target.config.get_text_config().num_hidden_layers
        for what, ours, theirs in (
            ("hidden size", config.hidden_size, hidden),
            ("number of target layers", config.num_target_layers, layers),
            ("vocabulary", rows if config.vocab_size is None else config.vocab_size, rows),
        ):
            if ours != theirs:
                raise UserError(
                    f"the draft was made for a target with {what} {ours}, this target has {theirs}; "
                    "choose the target that the draft was trained on"
                )
        if not 0 <= config.mask_token_id < rows:
            raise UserError(
                f"the draft's mask token {config.mask_token_id} lies outside the target's {rows} embedding rows"
            )

    def facts(self) -> dict[str, str]:
        config: BlockConfig = self.network.config
        own = {name.split(".")[0] for name in self.network.state_dict()} - {"fc", "hidden_norm", "layers", "norm"}
        return {
            "fields": "in dflash_config" if self.raw.get("dflash_config") else "at the top level",
            "target": f"hidden size {config.hidden_size}, {config.num_target_layers} layers, vocabulary "
            f"{config.vocab_size or 'not stated'}; features of layers {', '.join(map(str, config.target_layers))}",
            "block": f"{config.block_size} rows, {config.stage_length} drafts a stage, "
            f"mask token {config.mask_token_id}",
            "network": f"{config.layers} layers, {config.heads} heads, {config.kv_heads} key/value heads of "
            f"{config.head_dim}, rotary base {config.rope_theta:g}",
            "heads": ", ".join(sorted(own)) or "none of its own",
        }

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        tensors = {key: value.detach().to("cpu", dtype) for key, value in self.network.state_dict().items()}
        write_checkpoint(folder, {**self.raw, "dtype": name}, tensors)

    def drafter(
        self, target: PreTrainedModel, tree: TreeOptions = LINEAR, cache: TargetCache | None = None
    ) -> BlockDrafter:
        self.check_target(target)
        return self.drafter_class(self.network, target, tree)

    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> BlockObjective:
        self.check_target(target)
        self.refuse(options, because="it drafts blocks and unrolls nothing", ttt_length_dist=None)
        return self.objective_class(self.network, target, options)
