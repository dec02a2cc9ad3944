"""What the demo's target has learnt, measured on conversations it was not trained on, and whether that is enough.

An answer counts as exact when every one of its tokens is the model's first choice behind the true tokens before it:
greedy decoding then gives exactly this answer. Knows neither training nor files. Used by `dloop.demo.tiny_target`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from dloop.demo.target_training import Row, answer_logits, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODE_DOMAINS = ("humaneval", "mbpp", "livecodebench")
MOST_LOSS = 0.1
"""Nats a token: held-out loss below this is enough."""
LEAST_EXACT_CODE = 0.5
"""Share of the code answers: so many exact ones are enough, too."""
_BATCH = 32


@dataclass
class Quality:
    """Answers of one domain: summed loss in nats, their tokens, how many were exact, how many there were."""

    loss_sum: float = 0.0
    tokens: int = 0
    exact: int = 0
    answers: int = 0

    @property
    def loss(self) -> float:
        """Mean loss in nats a token."""
        return self.loss_sum / max(1, self.tokens)

    @property
    def exact_share(self) -> float:
        """Share of the answers that were exact."""
        return self.exact / max(1, self.answers)


def total(parts: Sequence[Quality]) -> Quality:
    """All of `parts` together."""
    return Quality(*(sum(values) for values in zip(*(asdict(part).values() for part in parts), strict=True)))


@torch.inference_mode()
def measure(model: PreTrainedModel, rows: Sequence[Row]) -> dict[str, Quality]:
    """Quality by domain; a conversation of two turns counts as one answer."""
    model.eval()
    qualities: dict[str, Quality] = {}
    ordered = sorted(rows, key=lambda row: len(row.ids))
    for start in range(0, len(ordered), _BATCH):
        batch = ordered[start : start + _BATCH]
        logits_RV, tokens_R = answer_logits(model, *padded(batch))
        losses_R = F.cross_entropy(logits_RV, tokens_R, reduction="none")
        right_R = logits_RV.argmax(-1) == tokens_R
        sizes = [int(row.answer[1:].sum()) for row in batch]
        for row, losses, right in zip(batch, losses_R.split(sizes), right_R.split(sizes), strict=True):
            quality = qualities.setdefault(row.domain, Quality())
            quality.loss_sum += float(losses.sum())
            quality.tokens += len(losses)
            quality.exact += int(right.all())
            quality.answers += 1
    return dict(sorted(qualities.items()))


def is_enough(qualities: dict[str, Quality]) -> bool:
    """Whether drafts can be trained on this target: a poor one gives drafts whose gate never opens."""
    code = total([qualities.get(domain, Quality()) for domain in CODE_DOMAINS])
    return total(list(qualities.values())).loss < MOST_LOSS or code.exact_share >= LEAST_EXACT_CODE


def report(qualities: dict[str, Quality]) -> dict[str, Any]:
    """JSON of the measurement: `loss`, `exact_code`, and both for each domain."""
    code = total([qualities.get(domain, Quality()) for domain in CODE_DOMAINS])
    return {
        "loss": round(total(list(qualities.values())).loss, 4),
        "exact_code": round(code.exact_share, 4),
        "domains": {
            domain: {"loss": round(quality.loss, 4), "exact": quality.exact, "answers": quality.answers}
            for domain, quality in qualities.items()
        },
    }
