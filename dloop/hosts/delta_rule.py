"""Rolling back the gated delta rule of a target's linear layers (Qwen3.5) by replaying the accepted rows.

The library's cache overwrites the recurrent state at every forward and `crop` does not restore it. So the inputs of
the rule and the state it started from are kept while a block is verified, and the rule runs once more over the
accepted prefix: no second forward of the target. The library's model looks its two rule functions up by name at each
call; rebinding these names, whatever kernel stands behind them, is the only patch in this project.
Shape letters: R rows of the block, K and V key and value heads, E and F their dimensions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers
from torch import Tensor

from dloop.cli import UserError
from dloop.hosts.target_model import decoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK, RECURRENT = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
LONGEST_RECURRENT = 32
"""Verified rows up to which the recurrent rule is used, which then is the arithmetic of token-by-token decoding."""


@dataclass(frozen=True)
class _Block:
    """One layer's rule over a block: key [1, R, K, E], value [1, R, V, F], g and beta [1, R, V], start [1, V, E, F]."""

    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor
    start: Tensor
    options: dict[str, Any]


class DeltaRule:
    """The rule of one model's linear layers, recorded block by block."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers = [module for name, module in decoder(model).named_modules() if name.endswith(".linear_attn")]
        self._library: Any = sys.modules[type(layers[0]).__module__] if layers else None
        self._layers = len(layers)
        if not all(hasattr(self._library, name) for name in (CHUNK, RECURRENT)):
            raise _unsupported(model)
        self._model = model
        self._blocks: list[_Block] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Within, a forward over several rows leaves what `replay` needs; the layers must have a state already."""
        chunk, recurrent = getattr(self._library, CHUNK), getattr(self._library, RECURRENT)
        self._blocks = []

        def rule(
            query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, **options: Any
        ) -> Any:
            # The cache is about to overwrite the state in place.
            self._blocks.append(_Block(key, value, g, beta, initial_state.clone(), options))
            inner = recurrent if key.shape[1] <= LONGEST_RECURRENT else chunk
            return inner(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)

        self._bind(rule, rule)
        try:
            yield
        finally:
            self._bind(chunk, recurrent)
        if len(self._blocks) != self._layers:
            raise _unsupported(self._model)

    def _bind(self, chunk: Any, recurrent: Any) -> None:
        setattr(self._library, CHUNK, chunk)
        setattr(self._library, RECURRENT, recurrent)

    def replay(self, rows: int) -> Iterator[Tensor]:
        """Each linear layer's state [1, V, E, F] behind the first `rows` rows of the recorded block."""
        recurrent = getattr(self._library, RECURRENT)
        for block in self._blocks:
            key = block.key[:, :rows]
            # The query only reads the state; any tensor of its shape will do.
            yield recurrent(
                key,
                key,
                block.value[:, :rows],
                g=block.g[:, :rows],
                beta=block.beta[:, :rows],
                initial_state=block.start,
                **block.options,
            )[1]


def _unsupported(model: PreTrainedModel) -> UserError:
    return UserError(
        f"transformers {transformers.__version__} does not let the linear layers of {type(model).__name__} be rolled "
        f"back (it never calls {CHUNK}); install the version that constraints.txt pins"
    )
