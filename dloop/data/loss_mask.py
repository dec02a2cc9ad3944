"""Which tokens of a rendered conversation are answers, and so carry the loss.

Answers are found in the text by the template's header and end of turn; a text is tokenised once, with
character offsets. It knows neither files nor batches. See a masked example: `python -m dloop.data.check
FILE --tokenizer NAME`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dloop.cli import UserError
from dloop.data.chat_template import ChatTemplate, Message, training_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Half-open interval of characters."""


def supervised_spans(text: str, template: ChatTemplate) -> list[Span]:
    """Every answer in `text`: behind a header, up to and including the next end of turn (or to the end).

    Markers that a message quotes count like real ones, as in sgl-project/SpecForge:specforge/data/parse.py.
    """
    header, end = re.escape(template.assistant_header), re.escape(template.end_of_turn)
    spans = []
    for match in re.finditer(rf"{header}(.*?(?:{end}|\Z))", text, re.DOTALL):
        start, stop = match.span(1)
        if text.startswith(template.unsupervised_prefix, start):
            start += len(template.unsupervised_prefix)
        if start < stop:
            spans.append((start, stop))
    return spans


def mask_from_offsets(offsets: Iterable[Span], spans: Sequence[Span]) -> list[int]:
    """1 for each token whose characters [start, end) lie inside one of the ascending `spans`, else 0.

    A token that straddles the start of an answer is not supervised.
    """
    mask, current = [], 0
    for start, end in offsets:
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        inside = current < len(spans) and spans[current][0] <= start and end <= spans[current][1]
        mask.append(int(inside))
    return mask


@dataclass(frozen=True)
class Encoded:
    """A tokenised conversation: ids and mask of the L tokens kept, and the length before the cut."""

    input_ids: list[int]
    loss_mask: list[int]
    uncut_length: int


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """From messages to ids and mask: everything that decides how a conversation is trained on.

    Needs a fast tokenizer, because only those give character offsets; `UserError` otherwise.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    max_length: int
    """Tokens kept, from the start of the text."""
    system_prompt: str | None = None
    """Instead of the template's default; "" is none."""
    train_only_last_turn: bool = False
    """Supervise the last answer only."""

    def __post_init__(self) -> None:
        if not self.tokenizer.is_fast:
            raise UserError(
                f"the tokenizer {self.tokenizer.name_or_path!r} gives no character offsets, which the loss "
                "mask needs: use a fast tokenizer (one with a tokenizer.json)"
            )

    def __call__(self, messages: list[Message]) -> Encoded:
        """Render and tokenise once, without further special tokens.

        `loss_mask[i]` says that token i belongs to an answer (no shift). Raises `RowError` as `training_text`
        does.
        """
        text = training_text(messages, self.tokenizer, self.template, self.system_prompt)
        tokens = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        spans = supervised_spans(text, self.template)
        if self.train_only_last_turn:
            spans = spans[-1:]
        ids = tokens["input_ids"]
        mask = mask_from_offsets(tokens["offset_mapping"][: self.max_length], spans)
        return Encoded(ids[: self.max_length], mask, len(ids))
