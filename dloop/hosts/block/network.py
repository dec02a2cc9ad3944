"""The backbone of the block drafters: a Qwen3-style decoder that also reads keys and values from context features.

Architecture and tensor names: z-lab/dflash:dflash/model.py. It owns neither embedding nor head and builds no mask;
how queries meet keys is the caller's `attend` (a cache when decoding, a packed mask when training).

Shape letters: B batch, Q query rows, C context rows, K = C + Q, D hidden, F concatenated taps, H heads, G key/value
heads, E head dimension, N anchors, R rows of a block, T drafts a stage, S sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor, nn

from dloop.hosts.block.config import BlockConfig
from dloop.hosts.layers import GatedMLP, RMSNorm, rotary_tables, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [B, H, Q, E], keys [B, G, K, E], values [B, G, K, E]) -> [B, H, Q, E]."""


class LoopState(Enum):
    """Which of the draft's own states stands in for a missing target state, in a loop stage.

    N1 is the output after the final norm, through `hidden_norm`; N2 the same as it is; N3 the output before the final
    norm, through `hidden_norm`. P1 takes the row that predicted the token, P2 the row at the token's position (the same
    where rows predict their own place). The paper leaves it open; N1P1 is what this project trains.
    """

    N1P1 = (True, True, False)
    N1P2 = (True, True, True)
    N2P1 = (True, False, False)
    N2P2 = (True, False, True)
    N3P1 = (False, True, False)
    N3P2 = (False, True, True)

    def __init__(self, after_norm: bool, through_hidden_norm: bool, at_position: bool) -> None:
        self.after_norm, self.through_hidden_norm, self.at_position = after_norm, through_hidden_norm, at_position


class BlockAttention(nn.Module):
    """Attention of block rows over context rows and block rows; the same projections serve both."""

    def __init__(self, config: BlockConfig, layer: int) -> None:
        super().__init__()
        d, e, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.layer, self.head_dim = layer, e
        self.q_proj = nn.Linear(d, config.heads * e, bias=bias)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.o_proj = nn.Linear(config.heads * e, d, bias=bias)
        self.q_norm = RMSNorm(e, config.rms_norm_eps)
        self.k_norm = RMSNorm(e, config.rms_norm_eps)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def forward(self, rows_BQD: Tensor, context_BCD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        source_BKD = torch.cat((context_BCD, rows_BQD), dim=1)
        queries = rows_BQD.shape[1]
        q = self.q_norm(self._split(self.q_proj(rows_BQD))).transpose(1, 2)
        k = self.k_norm(self._split(self.k_proj(source_BKD))).transpose(1, 2)
        v = self._split(self.v_proj(source_BKD)).transpose(1, 2)
        q = rotate(q, cos[:, :, -queries:], sin[:, :, -queries:])
        out_BHQE = attend(self.layer, q, rotate(k, cos, sin), v)
        return self.o_proj(out_BHQE.transpose(1, 2).flatten(-2))


class BlockLayer(nn.Module):
    """Pre-norm layer. Context rows are keys and values only: no input norm, no residual, never updated."""

    def __init__(self, config: BlockConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config, layer)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, rows_BQD: Tensor, context_BCD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        rows_BQD = rows_BQD + self.self_attn(self.input_layernorm(rows_BQD), context_BCD, cos, sin, attend)
        return rows_BQD + self.mlp(self.post_attention_layernorm(rows_BQD))


class BlockBackbone(nn.Module):
    """Fuses tapped target states into context rows and turns block rows into draft hidden states."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.loop_state = LoopState.N1P1
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def initialise(self) -> None:
        """Random weights for training from scratch, from the global generator: normal matrices, unit norms."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def context(self, features: Tensor) -> Tensor:
        """Context rows [..., D] of tapped target states [..., F]."""
        return self.hidden_norm(self.fc(features))

    def loop_rows(self, raw: Tensor, hidden: Tensor) -> Tensor:
        """What a stage leaves for later ones, of its rows before (`raw`) and after (`hidden`) the final norm."""
        return hidden if self.loop_state.after_norm else raw

    def loop_context(self, bank: Tensor, first: int, last: int) -> Tensor:
        """Context rows that stand in for the target's states of the drafted tokens `first`..`last` - 1 (from 0).

        `bank` [..., X, D] holds the draft rows left so far, oldest first. The post-norm output lives in the target's
        space already, so it enters behind `fc`, at the scale that `hidden_norm` gives to target features.
        """
        shift = int(self.loop_state.at_position and self.config.first_draft_row == 0)
        rows = bank[..., first + shift : last + shift, :]
        return self.hidden_norm(rows) if self.loop_state.through_hidden_norm else rows

    def forward(self, rows_BQD: Tensor, context_BCD: Tensor, positions_BK: Tensor, attend: Attend) -> Tensor:
        """Rows [B, Q, D] before the final norm; positions are those of context rows, then block rows."""
        cos, sin = rotary_tables(positions_BK, self.config.head_dim, self.config.rope_theta, rows_BQD.dtype)
        for layer in self.layers:
            rows_BQD = layer(rows_BQD, context_BCD, cos, sin, attend)
        return rows_BQD
