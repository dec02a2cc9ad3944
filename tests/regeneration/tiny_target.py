"""A complete target folder of random weights, small enough to answer in milliseconds."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.toy_tokenizer import toy_tokenizer


def tiny_model(seed: int = 0, context: int = 512) -> Qwen3ForCausalLM:
    """Two layers, random; its distribution is uneven, so that sampling settings matter."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=context,
        initializer_range=0.4,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def save_target(folder: Path, context: int = 512) -> Path:
    """Model and tokenizer; every tenth token or so ends an answer."""
    model = tiny_model(context=context)
    model.generation_config.eos_token_id = list(range(40, 90))
    model.save_pretrained(folder)
    toy_tokenizer().save_pretrained(folder)
    return folder
