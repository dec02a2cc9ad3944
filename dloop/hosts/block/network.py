"""The backbone of the block drafters: a Qwen3-style decoder that also reads keys and values from context features.

Architecture and tensor names: z-lab/dflash:dflash/model.py. It owns neither embedding nor head and builds no mask;
how queries meet keys is the caller's `attend` (a cache when decoding, a packed mask when training).

Shape letters: B batch, Q = N x R query rows, K any rows, D hidden, F concatenated taps, H heads, G key/value heads,
E head dimension, N anchors, R rows of a block, X own-state rows of an anchor, T drafts a stage, S sequence, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from dloop.hosts.block.config import BlockConfig
from dloop.hosts.layers import GatedMLP, RMSNorm, rotary_tables, rotate

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine [B, 1, K, E]."""

KeysValues = tuple[Tensor, Tensor]
"""Keys, their positions already in them, and values."""

Attend = Callable[[Tensor, KeysValues, KeysValues], Tensor]
"""(queries [B, H, Q, E], context's keys and values [B, G, S, E], each anchor's own [B, G, N, X + R, E]) ->
[B, H, Q, E]."""


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
    """Attention of block rows over the context, own states and the block; the same projections serve all."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        d, e, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim = e
        self.q_proj = nn.Linear(d, config.heads * e, bias=bias)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.o_proj = nn.Linear(config.heads * e, d, bias=bias)
        self.q_norm = RMSNorm(e, config.rms_norm_eps)
        self.k_norm = RMSNorm(e, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def keys_values(self, rows_BKD: Tensor, rotary: Rotary) -> KeysValues:
        """Keys and values [B, G, K, E] of rows at the positions of `rotary`."""
        k = self.k_norm(self._heads(self.k_proj(rows_BKD))).transpose(1, 2)
        return rotate(k, *rotary), self._heads(self.v_proj(rows_BKD)).transpose(1, 2)

    def forward(self, rows_BQD: Tensor, rotary: Rotary, context: KeysValues, own: KeysValues, attend: Attend) -> Tensor:
        anchors = own[0].shape[2]
        block = [part.unflatten(2, (anchors, -1)) for part in self.keys_values(rows_BQD, rotary)]
        keys, values = (torch.cat(parts, dim=3) for parts in zip(own, block, strict=True))
        q = rotate(self.q_norm(self._heads(self.q_proj(rows_BQD))).transpose(1, 2), *rotary)
        return self.o_proj(attend(q, context, (keys, values)).transpose(1, 2).flatten(-2))


class BlockLayer(nn.Module):
    """Pre-norm layer. What is no block row is keys and values only: no input norm, no residual, never updated."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, rows_BQD: Tensor, rotary: Rotary, context: KeysValues, own: KeysValues, attend: Attend) -> Tensor:
        rows_BQD = rows_BQD + self.self_attn(self.input_layernorm(rows_BQD), rotary, context, own, attend)
        return rows_BQD + self.mlp(self.post_attention_layernorm(rows_BQD))


class BlockBackbone(nn.Module):
    """Fuses tapped target states into context rows and turns block rows into draft hidden states."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.loop_state = LoopState.N1P1
        self.fc = nn.Linear(len(config.target_layers) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.layers))
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

    def keys_values(self, rows_BKD: Tensor, positions_BK: Tensor) -> list[KeysValues]:
        """What each layer sees of rows that run through none: the context, the draft's own states."""
        rotary = self._rotary(positions_BK, rows_BKD.dtype)
        layers: Iterable[Any] = self.layers
        return [layer.self_attn.keys_values(rows_BKD, rotary) for layer in layers]

    def forward(
        self,
        rows_BQD: Tensor,
        positions_BQ: Tensor,
        context: Sequence[KeysValues],
        own: Sequence[KeysValues],
        attend: Attend,
    ) -> Tensor:
        """Rows [B, Q, D] before the final norm; by layer, `context` [B, G, S, E] and `own` [B, G, N, X, E]."""
        rotary = self._rotary(positions_BQ, rows_BQD.dtype)
        for layer, its_context, its_own in zip(self.layers, context, own, strict=True):
            rows_BQD = layer(rows_BQD, rotary, its_context, its_own, attend)
        return rows_BQD

    def _rotary(self, positions_BK: Tensor, dtype: torch.dtype) -> Rotary:
        return rotary_tables(positions_BK, self.config.head_dim, self.config.rope_theta, dtype)
