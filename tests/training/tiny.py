"""A tiny target with a toy tokenizer, a draft configuration for it, and conversations: real files, random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.toy_tokenizer import toy_tokenizer

VOCAB, HIDDEN, LAYERS, BLOCK = 448, 32, 4, 4
WORDS = ["apples", "pears", "plums", "figs", "limes", "dates", "melons", "grapes", "cherries", "lemons"]


def write_target(folder: Path, vocab_size: int = VOCAB) -> Path:
    """A Qwen3 folder with tokenizer: random weights, 4 layers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder


def draft_config() -> dict:
    """A one-layer DFlash draft for that target."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "num_target_layers": LAYERS,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 2]},
    }


HEADS = {
    "dspark": {"projector_type": "dspark", "markov_rank": 6, "enable_confidence_head": True},
    "domino": {"projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 8, "shift_label": True},
}
"""What turns that configuration into one of another family."""


def write_config_of(host: str, path: Path) -> Path:
    """`draft_config` with the head of another block drafter."""
    config = draft_config()
    config["dflash_config"] |= HEADS[host]
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def write_eagle3_config(path: Path) -> Path:
    """An EAGLE-3 draft for that target that knows a quarter of its tokens."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB // 4,
        "initializer_range": 0.1,
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def write_draft_config(path: Path) -> Path:
    """`draft_config` as a file."""
    path.write_text(json.dumps(draft_config()), encoding="utf-8")
    return path


def conversation(number: int, question: str | None = None) -> dict:
    """Row `number`: a question (or another one) and an answer, different for every number."""
    thing = WORDS[number % len(WORDS)]
    answer = f"{thing} " * (3 + number % 4) + f"and that was {number}."
    turns = [
        {"role": "user", "content": question or f"Say {thing} {number} times."},
        {"role": "assistant", "content": answer},
    ]
    return {"id": str(number), "conversations": turns}


def write_conversations(path: Path, rows: int) -> Path:
    """`rows` short conversations."""
    path.write_text("".join(json.dumps(conversation(number)) + "\n" for number in range(rows)), encoding="utf-8")
    return path
