"""What a Qwen3.5 configuration says about the head: the text model's sizes, from a composite or a text-only one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dloop.cli import UserError

COMPOSITE, TEXT = "qwen3_5", "qwen3_5_text"
MODEL_TYPES = (COMPOSITE, TEXT, "qwen3_5_mtp")


@dataclass(frozen=True)
class Qwen35Config:
    """Sizes of the head, which are those of the target's full-attention layers."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool
    initializer_range: float


def read_qwen35_config(raw: Mapping[str, Any]) -> Qwen35Config:
    """The head that `raw` (a parsed `config.json`) describes; a UserError names what is missing or unknown."""
    text = raw.get("text_config") or raw
    rope = text.get("rope_parameters") or {}
    _refuse_unsupported(text, rope)

    def need(name: str) -> Any:
        if text.get(name) is None:
            raise UserError(f"config.json lacks {name}, without which the head cannot be built")
        return text[name]

    heads, hidden_size = int(need("num_attention_heads")), int(need("hidden_size"))
    head_dim = int(text.get("head_dim") or hidden_size // heads)
    return Qwen35Config(
        vocab_size=int(need("vocab_size")),
        hidden_size=hidden_size,
        intermediate_size=int(need("intermediate_size")),
        heads=heads,
        kv_heads=int(need("num_key_value_heads")),
        head_dim=head_dim,
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25)))),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        attention_bias=bool(text.get("attention_bias", False)),
        initializer_range=float(text.get("initializer_range", 0.02)),
    )


def _refuse_unsupported(text: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    for what, found, wanted in (
        ("mtp_num_hidden_layers", text.get("mtp_num_hidden_layers", 1), 1),
        ("mtp_use_dedicated_embeddings", text.get("mtp_use_dedicated_embeddings", False), False),
        ("attn_output_gate", text.get("attn_output_gate", True), True),
        ("hidden_act", text.get("hidden_act", "silu"), "silu"),
        ("rope_type", rope.get("rope_type", "default"), "default"),
    ):
        if found != wanted:
            raise UserError(f"config.json says {what} = {found!r}; for a Qwen3.5 head only {wanted!r} is supported")
