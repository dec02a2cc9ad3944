"""The configuration of an EAGLE-3 draft, in SpecForge's flavour and in EAGLE's own.

They differ in what they leave out: EAGLE knows no `head_dim`, a draft over the whole vocabulary names no
`draft_vocab_size`, newer libraries write the rotary base into `rope_parameters`. The tapped target layers usually
follow from the target's depth alone (sgl-project/SpecForge, SafeAILab/EAGLE).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dloop.cli import UserError
from dloop.hosts.block.config import need, rope_theta

FEATURES = 3
"""Target layers a draft listens to: a low, a middle and a high one."""


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes of the draft; `target_layers` are 0-based, None where the checkpoint leaves them to the target's depth."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    initializer_range: float
    vocab_size: int
    draft_vocab_size: int
    target_layers: tuple[int, ...] | None
    norm_features: bool
    """Whether each tapped state has a norm before they are fused."""
    norm_output: bool
    """Whether the head reads the state behind the final norm."""

    def taps(self, target_depth: int) -> tuple[str, ...]:
        """Submodules of a target of `target_depth` layers, in the order of the features."""
        layers = self.target_layers or (1, target_depth // 2 - 1, target_depth - 4)
        if not all(0 <= layer < target_depth for layer in layers):
            raise UserError(
                f"the draft listens to target layers {list(layers)}, a target of {target_depth} layers has usable ones "
                f"in 0..{target_depth - 1}; choose the target that the draft was trained on"
            )
        return tuple(f"layers.{layer}" for layer in layers)


def read_eagle3_config(raw: Mapping[str, Any]) -> Eagle3Config:
    """Check `raw` (a parsed `config.json`) and return what the network is built from."""
    _refuse_unsupported(raw)
    hidden, heads, vocabulary = (int(need(raw, name)) for name in ("hidden_size", "num_attention_heads", "vocab_size"))
    layers = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if layers is not None and len(layers) != FEATURES:
        raise UserError(f"config.json names {len(layers)} target layers ({layers}); an EAGLE-3 draft fuses {FEATURES}")
    draft_vocabulary = int(raw.get("draft_vocab_size") or vocabulary)
    if draft_vocabulary > vocabulary:
        raise UserError(
            f"config.json says draft_vocab_size {draft_vocabulary}, more than the target's vocabulary of {vocabulary}"
        )
    return Eagle3Config(
        hidden_size=hidden,
        target_hidden_size=int(raw.get("target_hidden_size") or hidden),
        intermediate_size=int(need(raw, "intermediate_size")),
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or hidden // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta(raw, default=1e4),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocabulary,
        target_layers=None if layers is None else tuple(map(int, layers)),
        norm_features=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", True)),
    )


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("num_hidden_layers", 1) != 1:
        raise UserError(f"the draft has {raw['num_hidden_layers']} layers; an EAGLE-3 draft has one")
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"the draft's activation is {raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("attention_bias"):
        raise UserError("the draft's attention has biases; EAGLE-3 drafts have none")
