"""A training sample as a person reads it: which text the model sees, and which part of it carries the loss.

Meant for the start of a run and for `python -m dloop.data.check FILE --tokenizer NAME --show N`; it knows
nothing about batches or devices.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dloop.data.loader import ConversationDataset

_EDGE = 160
"""Characters shown at either end of a run of text more than three times as long."""


def describe_sample(dataset: ConversationDataset, row: int) -> str:
    """Row `row` (or the next usable one) as `describe_tokens` shows it, below a line with its file."""
    sample = dataset[row]
    lines = [f"row {row} of {dataset.rows.path}"]
    lines += [f"  row {bad.row} is unusable ({bad.reason}), the next one is shown" for bad in sample.replaced]
    ids, mask = sample.input_ids[0].tolist(), sample.loss_mask[0].tolist()
    return "\n".join([*lines, describe_tokens(ids, mask, dataset.encode.tokenizer)])


def describe_tokens(ids: list[int], mask: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens [L] decoded, one line a run of equal `mask` [L]: supervised runs are marked `loss`."""
    lines = [f"  {len(ids)} tokens, {sum(mask)} of them carry the loss"]
    for supervised, run in groupby(zip(ids, mask, strict=True), key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        lines.append(f"  {'loss' if supervised else '    '} | {_shortened(_one_line(text))}")
    return "\n".join(lines)


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _shortened(text: str) -> str:
    left_out = len(text) - 2 * _EDGE
    if left_out <= _EDGE:
        return text
    return f"{text[:_EDGE]} [... {left_out} characters ...] {text[-_EDGE:]}"
