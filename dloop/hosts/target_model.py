"""The frozen target as both engines and all hosts see it: loading, embedding, head, and taps on its layers.

Nothing here drives the target; decoding does that in `dloop/decoding/target.py`, training in `dloop/training/`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dloop.cli import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HEAD = "lm_head.weight"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    name: str, *, dtype: torch.dtype, device: torch.device, revision: str | None = None, attn: str = "sdpa"
) -> PreTrainedModel:
    """The causal language model `name` (folder or hub repository), frozen, in evaluation mode on `device`.

    Safetensors only, and code from the repository is never run.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # Our own bars say how far the work is; the library's flashes by and spoils log files.
    logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            revision=revision,
            attn_implementation=attn,
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:  # a damaged file or configuration fails as anything, in whichever library meets it
        raise UserError(f"cannot load the target {name!r}: {_first_line(error)}") from error
    if set(report["missing_keys"]) == {_HEAD} and _outer_config_ties(name, revision):
        head(model).weight, report["missing_keys"] = embedding(model).weight, set()
    _refuse_unfilled(name, report)
    return model.to(device).eval().requires_grad_(False)


def _refuse_unfilled(name: str, report: Mapping[str, Any]) -> None:
    """The library only warns of a weight that the files do not hold, and leaves it random."""
    unfilled = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if unfilled:
        raise UserError(
            f"cannot load the target {name!r}: its files hold no {unfilled[0]} of the size its config.json asks for"
            + (f", nor {len(unfilled) - 1} other weights" if len(unfilled) > 1 else "")
            + "; they are incomplete or belong to another configuration, so download it again"
        )


def _outer_config_ties(name: str, revision: str | None) -> bool:
    """Whether a composite configuration says outside that the head is the embedding: its text part, which is all that
    the text model sees, may be silent about it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, revision=revision)
    return config.get_text_config() is not config and bool(config.tie_word_embeddings)


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer stored beside the target `name`."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"cannot load a tokenizer from {name!r}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def decoder(target: PreTrainedModel) -> nn.Module:
    """The stack of layers below the head: the module that owns `layers` and `norm`."""
    return target.get_decoder()


def embedding(target: PreTrainedModel) -> nn.Embedding:
    """The target's input embedding [V, D]; drafts borrow it, nobody trains it."""
    return target.get_input_embeddings()


def head(target: PreTrainedModel) -> nn.Linear:
    """The target's output head D -> V."""
    return target.get_output_embeddings()


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores of the head as the target's logits: squeezed into (-cap, cap) where its configuration has a cap."""
    return scores if cap is None else cap * (scores / cap).tanh()


def stop_tokens(target: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: those of the generation configuration and of the tokenizer."""
    configured = getattr(target.generation_config, "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*several, tokenizer.eos_token_id] if token is not None)


class Taps(AbstractContextManager["Taps"]):
    """Hooks that keep the latest output of chosen submodules of the target's decoder.

    Only the chosen states stay alive, unlike with `output_hidden_states=True`. A tap on the last layer would see the
    un-normed value that the library never reports; hosts refuse it.
    """

    def __init__(self, target: PreTrainedModel, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self._states: dict[str, Tensor] = {}
        stack = decoder(target)
        self._handles = [stack.get_submodule(name).register_forward_hook(self._keeper(name)) for name in self.names]

    def _keeper(self, name: str) -> Any:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            self._states[name] = output if isinstance(output, Tensor) else output[0]

        return keep

    def take(self) -> dict[str, Tensor]:
        """The states [B, S, D] of the last forward by tap name; they are forgotten here."""
        states, self._states = self._states, {}
        return states

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
