"""A short forward of full-attention Qwen3 over the library's own weights, batch 1.

The library's forward makes a rotary table and a mask anew each time, copies keys and values to all query heads when
there is a mask, and wraps all of it in module calls. Here are the layers alone (`dloop/hosts/lean_layer.py`), over our
preallocated cache. Shape letters: R rows, F concatenated taps, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from dloop.cli import UserError
from dloop.decoding.target_runtime import TargetRuntime
from dloop.hosts.attention import Kernel, causal_attention, group_bias, grouped_attention
from dloop.hosts.kv_cache import KVCache, Put
from dloop.hosts.lean_layer import LeanLayer, RotaryTable, normed
from dloop.hosts.target_model import decoder, embedding, head


class LeanQwen3(TargetRuntime):
    """Logits and features of new rows behind those in `cache`, which this forward fills."""

    def __init__(self, model: PreTrainedModel, cache: KVCache | None, taps: Sequence[str] = ()) -> None:
        refuse_other_than_plain_qwen3(model)
        assert cache is not None
        config = model.config.get_text_config()
        stack: Any = decoder(model)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.cache, self.taps = cache, tuple(taps)
        self._embedding, self._head = embedding(model).weight, head(model).weight
        self._layers = [LeanLayer.of(layer, heads, kv_heads, config.rms_norm_eps) for layer in stack.layers]
        self._norm, self._eps, self._heads, self._group = (
            stack.norm.weight,
            config.rms_norm_eps,
            heads,
            heads // kv_heads,
        )
        self._rotary = RotaryTable(
            lambda positions: stack.rotary_emb(self._embedding, positions), self._embedding.device
        )

    def forward(self, ids_R: Tensor, positions_R: Tensor, mask: Tensor | None, last: bool) -> tuple[Tensor, Tensor]:
        rows = len(ids_R)
        self._rotary.reserve(self.cache.capacity)
        attend = self._kernel(rows, self.cache.length + rows, mask)
        answer = self.run(ids_R, positions_R, self.cache.behind(rows), attend, last)
        self.cache.advance(rows)
        return answer

    def run(
        self, ids_R: Tensor, positions_R: Tensor, put: Put, attend: Kernel, last: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The forward itself: `put` keeps each layer's keys and values, `attend` lets the queries meet them."""
        rotary = self._rotary[positions_R]
        states: dict[str, Tensor] = {}
        x = states["embed_tokens"] = F.embedding(ids_R, self._embedding)
        for place, layer in enumerate(self._layers):
            turned, unturned = layer.project(x, rotary)
            keys, values = put(place, turned[:, self._heads :], unturned)
            queries = turned[:, : self._heads].transpose(0, 1)[None]
            x = states[f"layers.{place}"] = layer.finish(x, attend(queries, keys, values))
        states["norm"] = final = normed(x, self._norm, self._eps)
        features = torch.cat([states[tap] for tap in self.taps], -1) if self.taps else final.new_empty(len(x), 0)
        return F.linear(final[-1:] if last else final, self._head), features

    def _kernel(self, rows: int, end: int, mask: Tensor | None) -> Kernel:
        if mask is None:
            return causal_attention(rows, end, self._group, self._embedding.dtype, self._embedding.device)
        return partial(grouped_attention, bias=group_bias(mask, self._group, self._embedding.dtype))


def refuse_other_than_plain_qwen3(model: PreTrainedModel) -> None:
    """Raise a UserError when `model` is anything this forward does not compute."""
    config = model.config.get_text_config()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    kinds = set(getattr(config, "layer_types", None) or []) - {"full_attention"}
    activation = getattr(config, "hidden_act", "silu")
    for found, what in (
        (config.model_type != "qwen3", f"is of type {config.model_type!r}"),
        (bool(kinds), f"has layers of type {', '.join(sorted(kinds))}"),
        (rope != "default", f"has rotary positions of type {rope!r}"),
        (activation != "silu", f"has the activation {activation!r}"),
        (getattr(model, "quantization_method", None) is not None, "is quantised"),
        (len({weight.device for weight in model.parameters()}) > 1, "lies on several devices"),
    ):
        if found:
            raise UserError(
                f"the lean runtime computes plain Qwen3 models, this target {what}; use --target-runtime library"
            )
