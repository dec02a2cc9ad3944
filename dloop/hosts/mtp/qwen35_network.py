"""The multi-token-prediction head of Qwen3.5: one full-attention layer of the target's kind over a fused pair.

Row j is the pair (token j + 1, the target's final-norm state of j) and predicts token j + 2 through the target's head;
the next step of the recurrence takes its output after the norm in place of a target state. Names and order of the fused
pair: vllm-project/vllm:vllm/model_executor/models/qwen3_5_mtp.py. How queries meet keys is the caller's `attend`.

Shape letters: B batch, S rows, D hidden, H heads, G key/value heads, E head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dloop.hosts.layers import GatedMLP, rotary_tables, rotate
from dloop.hosts.mtp.qwen35_config import Qwen35Config

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries [B, H, S, E], keys and values [B, G, S, E]) -> [B, H, S, E]."""


class ZeroCentredNorm(nn.Module):
    """Root-mean-square norm in float32 whose weight is what is added to one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x.float(), (x.shape[-1],), 1 + self.weight.float(), self.eps).to(x.dtype)


class GatedAttention(nn.Module):
    """Attention whose output each head gates; the first part of a head's dimensions is rotated."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        d, e, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.head_dim, self.rotary_dim = e, config.rotary_dim
        self.q_proj = nn.Linear(d, 2 * config.heads * e, bias=bias)
        self.k_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.v_proj = nn.Linear(d, config.kv_heads * e, bias=bias)
        self.o_proj = nn.Linear(config.heads * e, d, bias=bias)
        self.q_norm = ZeroCentredNorm(e, config.rms_norm_eps)
        self.k_norm = ZeroCentredNorm(e, config.rms_norm_eps)

    def _split(self, x: Tensor, size: int) -> Tensor:
        return x.unflatten(-1, (-1, size))

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, rest = x.split((self.rotary_dim, self.head_dim - self.rotary_dim), dim=-1)
        return torch.cat((rotate(turned, cos, sin), rest), dim=-1)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        e = self.head_dim
        q, gate = self._split(self.q_proj(x_BSD), 2 * e).chunk(2, dim=-1)
        q = self._rotate(self.q_norm(q).transpose(1, 2), cos, sin)
        k = self._rotate(self.k_norm(self._split(self.k_proj(x_BSD), e)).transpose(1, 2), cos, sin)
        v = self._split(self.v_proj(x_BSD), e).transpose(1, 2)
        out = attend(q, k, v).transpose(1, 2).flatten(-2)
        return self.o_proj(out * gate.flatten(-2).sigmoid())


class HeadLayer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        self.self_attn = GatedAttention(config)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos, sin, attend)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Qwen35Head(nn.Module):
    """The tensors of `mtp.*`, under the same names without that prefix."""

    def __init__(self, config: Qwen35Config) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.pre_fc_norm_embedding = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([HeadLayer(config)])
        self.norm = ZeroCentredNorm(config.hidden_size, config.rms_norm_eps)

    def initialise(self) -> None:
        """Weights from scratch: normal matrices, neutral norms."""
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=self.config.initializer_range)
            else:
                nn.init.zeros_(parameter)

    def forward(self, embeds_BSD: Tensor, hidden_BSD: Tensor, positions_BS: Tensor, attend: Attend) -> Tensor:
        """Outputs [B, S, D] after the final norm: what the target's head and the next step read."""
        pair = (self.pre_fc_norm_embedding(embeds_BSD), self.pre_fc_norm_hidden(hidden_BSD))
        fused_BSD = self.fc(torch.cat(pair, dim=-1))
        cos, sin = rotary_tables(positions_BS, self.config.rotary_dim, self.config.rope_theta, fused_BSD.dtype)
        return self.norm(self.layers[0](fused_BSD, cos, sin, attend))
