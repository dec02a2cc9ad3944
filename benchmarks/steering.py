"""Random models that behave: a target that repeats one token, and a draft that is right as often as it is told.

Speed does not depend on what the weights say, only acceptance does. So the target is random except that its embedding
and head make token `TOKEN` win at every place, and what the draft's last norm returns is replaced: rows meant to be
right point at that token, the others away from it. How many rows of a stage are right follows one sequence (geometric
lengths, cut at the block) for every decoder, so that all of them accept the same drafts.
"""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dloop.hosts.host import Host
from dloop.hosts.registry import new_host

TOKEN = 7
STRENGTH = 40.0
"""Logit of the wanted token in a right row; its probability there is 1 within 1e-12."""
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "vocab_size": 160},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16},
    },
    "narrow": {
        **{"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 36, "vocab_size": 4096},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    },
    "qwen3-4b": {
        **{"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "vocab_size": 151936},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128},
    },
}
SHAPES["wide"] = SHAPES["narrow"] | {"vocab_size": 151936}
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dspark": {"projector_type": "dspark", "markov_rank": 64, "enable_confidence_head": True},
    "domino": {"projector_type": "domino", "gru_hidden_dim": 64, "emb_dim": 64, "shift_label": True},
}
"""What turns a DFlash configuration into one of each block drafter."""
DRAFT_LAYERS = 5
BLOCK = 16


def repeating_target(shape: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random Qwen3 of one of `SHAPES` that says `TOKEN` behind everything."""
    config = Qwen3Config(
        **SHAPES[shape], tie_word_embeddings=False, max_position_embeddings=8192, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    with device:
        previous = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            model = Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(previous)
    model.eval().requires_grad_(False)
    direction = _direction(config.hidden_size).to(device, dtype)
    model.model.embed_tokens.weight.add_(direction * config.hidden_size**0.5)
    model.lm_head.weight[TOKEN] = direction
    model.generation_config.pad_token_id = 0
    return model


def dflash_config(target: PreTrainedModel) -> dict[str, Any]:
    """The `config.json` of a DFlash draft as wide as `target`, of up to five layers and blocks of 16."""
    config = target.config
    names = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim vocab_size rms_norm_eps"
    return {name: getattr(config, name) for name in names.split()} | {
        **{"architectures": ["DFlashDraftModel"], "block_size": BLOCK},
        "num_hidden_layers": min(DRAFT_LAYERS, config.num_hidden_layers - 3),
        **{"num_target_layers": config.num_hidden_layers, "rope_theta": config.rope_parameters["rope_theta"]},
        "dflash_config": {"mask_token_id": 1},
    }


def random_draft(target: PreTrainedModel, raw: dict[str, Any] | None = None) -> Host:
    """A frozen draft of `target`, in its precision and on its device; `raw` is its configuration, else a DFlash's."""
    weight = target.get_input_embeddings().weight
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw or dflash_config(target)))
        host = new_host(folder, seed=0, dtype=weight.dtype, device=weight.device)
    host.network.eval().requires_grad_(False)
    return host


def _direction(size: int) -> Tensor:
    return nn.functional.normalize(torch.randn(size, generator=torch.Generator().manual_seed(1)), dim=0)


def right_rows(tau: float, drafts: int, count: int = 4096) -> list[int]:
    """How many leading rows of each stage are right: `count` lengths of mean `tau` - 1, at most `drafts`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        expected = sum(middle**length for length in range(1, drafts + 1))
        low, high = (middle, high) if expected < tau - 1 else (low, middle)
    # Spread evenly instead of drawn at random: every stretch of some twenty stages has nearly the same mean.
    places = [(place + 1) * (math.sqrt(5) - 1) / 2 % 1 for place in range(count)]
    return [min(drafts, int(math.log(place) / math.log(low))) for place in places]


@dataclass
class Steering:
    """Forward hook on a draft's last norm. `restart` before every response, `advance` before every stage."""

    tau: float
    hidden_size: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        drafts = BLOCK - 1
        self._lengths, self._stage = right_rows(self.tau, drafts), 0
        right = _direction(self.hidden_size).to(self.device, self.dtype) * STRENGTH
        # One row more than drafts: the library's norm sees the anchor's row too, ours does not.
        self._rows = [
            torch.stack([right] * (length + 1) + [-right] * (drafts - length)) for length in range(drafts + 1)
        ]
        # A captured graph reads from one address, whatever stands there.
        self._now = torch.empty_like(self._rows[0])

    def restart(self) -> None:
        """Begin again with the first length."""
        self._stage = 0

    def advance(self, *ignored: Any) -> None:
        """Go on to the next length."""
        self._now.copy_(self._rows[self._lengths[self._stage]])
        self._stage += 1

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self._now[-output.shape[-2] :].view(output.shape)
