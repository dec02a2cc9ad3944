"""What computes the target while decoding: the library's forward, or ours over the same weights.

The library's is the reference and runs every target; the lean one runs plain Qwen3 and is faster. Baseline and method
always use the same one. Shape letters: R rows, F concatenated taps, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dloop.decoding.lean_qwen3 import LeanQwen3
from dloop.decoding.static_target import StaticQwen3
from dloop.decoding.target_runtime import TargetRuntime
from dloop.hosts.library_attention import share_keys
from dloop.hosts.target_cache import PreallocatedCache, TargetCache
from dloop.hosts.target_model import Taps, decoder


def open_runtime(name: str, model: PreTrainedModel, cache: TargetCache, taps: Sequence[str]) -> TargetRuntime:
    """The runtime `name`, `lean`, `library` or `graphs` (the lean one over static shapes); a UserError when it does not
    compute this model."""
    if name == "library":
        return LibraryRuntime(model, cache, taps)
    ours = StaticQwen3 if name == "graphs" else LeanQwen3
    return ours(model, cache.memory if isinstance(cache, PreallocatedCache) else None, taps)


class LibraryRuntime(TargetRuntime):
    """The library's own forward."""

    def __init__(self, model: PreTrainedModel, cache: TargetCache, taps: Sequence[str]) -> None:
        self._model, self._cache, self._taps = model, cache, Taps(model, taps)
        self._cache_name = _cache_name(model)
        # Plain Qwen3 stays the library's in every respect: it is the reference of the lean runtime.
        if model.config.get_text_config().model_type != "qwen3":
            share_keys(model)

    def forward(self, ids_R: Tensor, positions_R: Tensor, mask: Tensor | None, last: bool) -> tuple[Tensor, Tensor]:
        output = self._model(
            input_ids=ids_R[None],
            position_ids=positions_R[None],
            attention_mask=None if mask is None else mask[None, None],
            use_cache=True,
            logits_to_keep=int(last),
            **{self._cache_name: self._cache.library},
        )
        states = self._taps.take()
        features = [states[name][0] for name in self._taps.names]
        return output.logits[0], torch.cat(features, -1) if features else output.logits.new_empty(len(ids_R), 0)

    def close(self) -> None:
        """Take the hooks off the model."""
        self._taps.close()


def _cache_name(model: PreTrainedModel) -> str:
    # transformers 5.24 renamed the argument; the old name only warns there and is the only one before.
    return "cache" if "cache" in inspect.signature(decoder(model).forward).parameters else "past_key_values"
