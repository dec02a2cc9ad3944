"""The demo's targets by architecture: untrained models of a few layers, and how each is written.

Adding one means two functions and a row in `ARCHITECTURES`. Knows no corpus and no training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Architecture:
    """`build(vocabulary, tokens)` makes the model in float32, `tokens` being its special ids by the name of their
    field; `save(model, folder)` writes weights, configuration and generation settings."""

    build: Callable[[int, Mapping[str, Any]], PreTrainedModel]
    save: Callable[[PreTrainedModel, Path], None]


def new_target(architecture: str, vocabulary: int, *, eos: int, pad: int, seed: int) -> PreTrainedModel:
    """The untrained target of this name; its weights follow from `seed`."""
    torch.manual_seed(seed)
    tokens = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": pad}
    return ARCHITECTURES[architecture].build(vocabulary, tokens).float()


def _qwen3(vocabulary: int, tokens: Mapping[str, Any]) -> PreTrainedModel:
    """8 layers of 128, 1.5 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        # Wide heads and a narrow MLP: copying words of the question is the skill that takes longest.
        intermediate_size=192,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.04,
        tie_word_embeddings=True,
        **tokens,
    )
    return Qwen3ForCausalLM(config)


def _qwen35(vocabulary: int, tokens: Mapping[str, Any]) -> PreTrainedModel:
    """4 layers of 128, three linear ones and a full one as in each group of the real model."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
        initializer_range=0.04,
        tie_word_embeddings=True,
        **tokens,
    )
    return Qwen3_5ForCausalLM(config)


def _gemma4(vocabulary: int, tokens: Mapping[str, Any]) -> PreTrainedModel:
    """6 layers of 128, every third one full, in the composite model with its (untrained) image and audio embedders."""
    from transformers import Gemma4UnifiedConfig, Gemma4UnifiedForConditionalGeneration

    text = {
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 6,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        # Shorter than a conversation, so that the window slides.
        "sliding_window": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 32,
        "global_head_dim": 64,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 4096,
        "initializer_range": 0.04,
        "tie_word_embeddings": True,
    }
    config = Gemma4UnifiedConfig(
        text_config=text | dict(tokens),
        vision_config={"mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 128, "patch_size": 2},
        audio_config={"audio_embed_dim": 8},
        tie_word_embeddings=True,
    )
    model = Gemma4UnifiedForConditionalGeneration(config)
    for layer in model.get_decoder().layers:
        # Attention scores are not divided by the head's size: the query norm carries that factor in trained models.
        layer.self_attn.q_norm.weight.data.fill_(layer.self_attn.head_dim**-0.5)
    return model


def _save_plainly(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


def _save_qwen35(model: PreTrainedModel, folder: Path) -> None:
    """The composite layout of the real checkpoints, without their image tower and their head."""
    from dloop.hosts.checkpoint_files import write_checkpoint

    tied = model.config.tie_word_embeddings
    text = model.config.to_dict() | {"mtp_num_hidden_layers": 1}
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {name: value for name, value in text.items() if name != "transformers_version"},
        "tie_word_embeddings": tied,
        "dtype": "float32",
    }
    named = {name.replace("model.", "model.language_model.", 1): value for name, value in model.state_dict().items()}
    # A tied head is the embedding once more, which safetensors would refuse to store twice.
    write_checkpoint(folder, config, {name: value for name, value in named.items() if not (tied and "lm_head" in name)})
    model.generation_config.save_pretrained(folder)


ARCHITECTURES: Mapping[str, Architecture] = {
    "qwen3": Architecture(_qwen3, _save_plainly),
    "qwen3.5": Architecture(_qwen35, _save_qwen35),
    "gemma4": Architecture(_gemma4, _save_plainly),
}
