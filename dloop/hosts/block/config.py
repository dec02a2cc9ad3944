"""The configuration of a block drafter, read from every place the public formats put its fields.

Fields may stand at the top level, inside `dflash_config`, or both (z-lab/dflash, sgl-project/SpecForge,
deepseek-ai/DeepSpec); the nested one counts and a contradiction is refused. The rotary base is read in both spellings
of the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dloop.cli import UserError


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of the shared backbone; `target_layers` are 0-based indices of the tapped target layers."""

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    attention_bias: bool
    initializer_range: float
    block_size: int
    mask_token_id: int
    target_layers: tuple[int, ...]
    num_target_layers: int
    vocab_size: int | None
    first_draft_row: int
    """Block row whose output predicts the first token behind the anchor: 0, or 1 where a row predicts its own place."""

    @property
    def stage_length(self) -> int:
        """Tokens a stage drafts (T)."""
        return self.block_size - self.first_draft_row

    @property
    def taps(self) -> tuple[str, ...]:
        """Target submodules this draft listens to; -1 stands for the embedding (deepseek-ai/DeepSpec)."""
        return tuple("embed_tokens" if layer < 0 else f"layers.{layer}" for layer in self.target_layers)


def read_block_config(raw: dict[str, Any], *, first_draft_row: int) -> BlockConfig:
    """Check `raw` (a parsed `config.json`) and return what the network is built from."""
    _refuse_unsupported(raw)
    heads = int(need(raw, "num_attention_heads"))
    layers = int(need(raw, "num_hidden_layers"))
    target_layers_total = int(need(raw, "num_target_layers"))
    config = BlockConfig(
        hidden_size=int(need(raw, "hidden_size")),
        intermediate_size=int(need(raw, "intermediate_size")),
        layers=layers,
        heads=heads,
        kv_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or raw["hidden_size"] // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        rope_theta=rope_theta(raw, default=1e6),
        attention_bias=bool(raw.get("attention_bias", False)),
        initializer_range=float(raw.get("initializer_range", 0.02)),
        block_size=int(need(raw, "block_size")),
        mask_token_id=int(need(raw, "mask_token_id")),
        target_layers=tuple(
            nested(raw, "target_layer_ids", None) or default_target_layers(layers, target_layers_total)
        ),
        num_target_layers=target_layers_total,
        vocab_size=raw.get("vocab_size"),
        first_draft_row=first_draft_row,
    )
    _check_target_layers(config)
    return config


def nested(raw: Mapping[str, Any], name: str, default: Any) -> Any:
    """Field `name` from `dflash_config` or the top level, null as if absent; refused when both exist and differ."""
    inner, outer = (raw.get("dflash_config") or {}).get(name), raw.get(name)
    if inner is not None and outer is not None and inner != outer:
        raise UserError(
            f"config.json says {name} = {outer!r} at the top level and {inner!r} in dflash_config; "
            "make them equal or remove one"
        )
    found = outer if inner is None else inner
    return default if found is None else found


def default_target_layers(layers: int, target_layers: int) -> list[int]:
    """Tapped layers when the checkpoint names none: evenly spread, rounded half to even (z-lab/dflash)."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def need(raw: Mapping[str, Any], name: str) -> Any:
    """Field `name` from either place; a UserError when neither has it."""
    value = nested(raw, name, None)
    if value is None:
        raise UserError(f"config.json lacks {name}, without which the draft cannot be built")
    return value


def rope_theta(raw: Mapping[str, Any], default: float) -> float:
    """The rotary base in either spelling of the library; scaled rotary positions are refused."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    kind = parameters.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise UserError(f"config.json asks for rotary positions of type {kind!r}; only 'default' is supported")
    inner, outer = parameters.get("rope_theta"), raw.get("rope_theta")
    if inner is not None and outer is not None and float(inner) != float(outer):
        raise UserError(
            f"config.json says rope_theta = {outer} at the top level and {inner} in rope_parameters; make them equal"
        )
    found = outer if inner is None else inner
    return float(default if found is None else found)


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    kinds = set(raw.get("layer_types") or []) - {"full_attention"}
    if kinds or raw.get("use_sliding_window"):
        raise UserError(
            f"the draft uses {', '.join(sorted(kinds)) or 'a sliding window'}; only full attention is supported"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise UserError(f"the draft's activation is {raw['hidden_act']!r}; only 'silu' is supported")


def _check_target_layers(config: BlockConfig) -> None:
    # The last layer's raw output is not what hidden-state lists report there (they hold the normed value), so a draft
    # that taps it was trained on something the decoder cannot know.
    bad = [layer for layer in config.target_layers if not -1 <= layer < config.num_target_layers - 1]
    if bad:
        raise UserError(
            f"target_layer_ids {list(config.target_layers)} holds {bad}: layers must lie in "
            f"-1..{config.num_target_layers - 2} (the last one is never a feature)"
        )
