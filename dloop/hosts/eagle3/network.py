"""The network of an EAGLE-3 draft: three fused target states, one decoder layer, a head over its own vocabulary.

Architecture and tensor names: SafeAILab/EAGLE:eagle/model/cnets.py, sgl-project/SpecForge. A row reads a recurrent
state (fused target states, or the draft's own output before the final norm) and the embedding of the next token. How
queries meet keys is the caller's `attend` (a cache when decoding, the unroll's rule when training).

Shape letters: B batch, Q rows, D hidden, F concatenated target states, H heads, G key/value heads, E head dimension,
V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dloop.hosts.eagle3.config import FEATURES, Eagle3Config
from dloop.hosts.layers import GatedMLP, RMSNorm, rotary_tables, rotate

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [B, H, Q, E], this call's keys and values [B, G, Q, E]) -> [B, H, Q, E]."""


class Eagle3Attention(nn.Module):
    """Attention whose inputs are twice as wide as its output: embedding beside recurrent state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        d, self.head_dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * d, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * d, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * d, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, d, bias=False)

    def forward(self, rows: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            project(rows).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BHQE = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.o_proj(out_BHQE.transpose(1, 2).flatten(-2))


class Eagle3Layer(nn.Module):
    """The decoder layer; the residual carries the recurrent state alone."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, states: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        rows = torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), dim=-1)
        states = states + self.self_attn(rows, cos, sin, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3Network(nn.Module):
    """The draft with its vocabulary map; an embedding of its own only where the checkpoint brings one.

    `d2t` [V] holds offsets: draft id i is target id i + d2t[i]. `t2d` marks the target ids that the draft knows.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: Eagle3Config, own_embedding: bool = False) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(FEATURES * config.target_hidden_size, config.hidden_size, bias=False)
        if config.norm_features:
            self.fc_norm = nn.ModuleList(
                RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(FEATURES)
            )
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        if own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size).requires_grad_(False)

    def initialise(self) -> None:
        """Random weights for training from scratch, from the global generator: normal matrices, unit norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=self.config.initializer_range)

    @property
    def target_ids(self) -> Tensor:
        """The target's id of every draft id [V], ascending."""
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def fuse(self, features: Tensor) -> Tensor:
        """First recurrent states [..., D] of tapped target states [..., F]."""
        if self.config.norm_features:
            parts = features.chunk(FEATURES, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(features)

    def forward(self, states_BQD: Tensor, embedded_BQD: Tensor, positions_BQ: Tensor, attend: Attend) -> Tensor:
        """The next recurrent states [B, Q, D], before the final norm."""
        cos, sin = rotary_tables(positions_BQ, self.config.head_dim, self.config.rope_theta, states_BQD.dtype)
        return self.midlayer(states_BQD, embedded_BQD, cos, sin, attend)

    def logits(self, states: Tensor) -> Tensor:
        """Float32 logits [..., V] over the draft's vocabulary of recurrent states [..., D]."""
        return self.lm_head(self.norm(states) if self.config.norm_output else states).float()
