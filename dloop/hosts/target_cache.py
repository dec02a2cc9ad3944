"""The target's cache while decoding, batch 1: of what a verification wrote, the accepted rows are kept.

Two kinds behind one interface. Full-attention targets run over our preallocated memory, where rolling back is a change
of length. Targets with sliding or linear layers run over the library's cache with its past recording; its linear
states are put right by `dloop/hosts/delta_rule.py`. Shape letters: G key/value heads, S cached rows, E head dimension.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from dloop.cli import UserError
from dloop.hosts.delta_rule import DeltaRule
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.target_model import embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


class TargetCache(ABC):
    """What a response has written so far. Every verification is followed by one `keep`."""

    takes_trees: bool
    """Whether rows other than a prefix of the verified ones can be kept."""
    library: Cache
    """What the library's forward is given."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Committed rows."""

    @abstractmethod
    def reset(self, capacity: int) -> None:
        """Forget the last response and make room for `capacity` rows."""

    @abstractmethod
    def verification(self, rows: int) -> AbstractContextManager[None]:
        """Within, one forward over `rows` rows behind the committed ones, of which `keep` will choose."""

    @abstractmethod
    def keep(self, rows: Sequence[int]) -> None:
        """Commit the verified rows at offsets `rows` (ascending, from 0) and forget the others."""

    @abstractmethod
    def shared_kv(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Committed keys and values [1, G, S, E] of the last layer of each attention type, by the type's name."""


def open_cache(model: PreTrainedModel) -> TargetCache:
    """An empty cache of the kind `model` needs; a UserError when there is none."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [FULL])
    if unknown := kinds - {FULL, SLIDING, LINEAR}:
        raise UserError(
            f"the target has layers of type {', '.join(sorted(unknown))}, whose cache cannot be rolled back; "
            f"known are {FULL}, {SLIDING} and {LINEAR}"
        )
    return PreallocatedCache(model) if kinds == {FULL} else RecordingCache(model)


class PreallocatedCache(TargetCache):
    """Our memory in the library's clothes."""

    takes_trees = True

    def __init__(self, model: PreTrainedModel) -> None:
        config, table = model.config.get_text_config(), embedding(model).weight
        self.memory = KVCache(
            config.num_hidden_layers,
            config.num_key_value_heads,
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            table.dtype,
            table.device,
        )
        layers = range(config.num_hidden_layers)
        self.library = Cache(layers=[_LibraryLayer(self.memory, layer, layer == layers[-1]) for layer in layers])

    @property
    def length(self) -> int:
        return self.memory.length

    def reset(self, capacity: int) -> None:
        self.memory.rollback(0)
        self.memory.reserve(capacity)

    @contextmanager
    def verification(self, rows: int) -> Iterator[None]:
        start = self.length
        self.memory.reserve(start + rows)
        yield
        self.memory.rollback(start)

    def keep(self, rows: Sequence[int]) -> None:
        self.memory.keep(self.length, list(rows))

    def shared_kv(self) -> dict[str, tuple[Tensor, Tensor]]:
        keys, values = self.memory.store[:, -1, :, :, : self.length]
        return {FULL: (keys, values)}


class RecordingCache(TargetCache):
    """The library's cache, told to keep the past of a verified chain until it is cropped."""

    takes_trees = False

    def __init__(self, model: PreTrainedModel) -> None:
        if not hasattr(DynamicCache, "activate_past_recording"):
            raise UserError(
                f"transformers {transformers.__version__} cannot roll back the cache of {type(model).__name__}; "
                "install the version that constraints.txt pins"
            )
        self._config = model.config.get_text_config()
        self._kinds: list[str] = self._config.layer_types
        self._rule = DeltaRule(model) if LINEAR in self._kinds else None
        self.reset(0)

    @property
    def length(self) -> int:
        return self.library.get_seq_length() - self._verified

    def reset(self, capacity: int) -> None:
        self.library = DynamicCache(config=self._config)
        self._verified = 0
        self._recording = False

    @contextmanager
    def verification(self, rows: int) -> Iterator[None]:
        if self._verified:
            raise RuntimeError("a verification must be followed by keep before the next one")
        # A single row is the root, which is always kept: plain decoding goes the library's own way. Recording must
        # not begin before the prompt is in, or the linear layers would keep all of its inputs.
        if rows > 1 and not self._recording:
            self.library.activate_past_recording()
            self._recording = True
        with self._rule.recording() if self._rule and rows > 1 else nullcontext():
            yield
        self._verified = rows

    def keep(self, rows: Sequence[int]) -> None:
        if list(rows) != list(range(len(rows))):
            raise ValueError(f"rows {rows} of a chain are no prefix of it")
        rejected, self._verified = self._verified - len(rows), 0
        if self._recording:
            # Also when nothing is rejected: the layers let go of the past only here.
            self.library.crop(-rejected)
        if rejected and self._rule:
            linear = (layer for layer, kind in zip(self.library.layers, self._kinds, strict=True) if kind == LINEAR)
            for layer, state in zip(linear, self._rule.replay(len(rows)), strict=True):
                layer.recurrent_states[0].copy_(state)

    def shared_kv(self) -> dict[str, tuple[Tensor, Tensor]]:
        layers = zip(self._kinds, self.library.layers, strict=False)
        return {kind: (layer.keys, layer.values) for kind, layer in layers if kind != LINEAR and layer.keys is not None}


class _LibraryLayer(CacheLayerMixin):
    """What the library asks of one layer's cache, answered from our memory."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, rows: KVCache, layer: int, last: bool) -> None:
        super().__init__()
        self._rows, self._layer, self._last = rows, layer, last
        self.is_initialized = True

    def lazy_initialization(self, *tensors: Tensor) -> None:
        """The memory exists already."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        views = self._rows.write(self._layer, key_states, value_states)
        if self._last:
            # Masks and positions of a forward are made before its first layer, so one shared length is enough.
            self._rows.advance(key_states.shape[-2])
        return views

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._rows.length + query_length, 0

    def get_seq_length(self) -> int:
        return self._rows.length

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1
