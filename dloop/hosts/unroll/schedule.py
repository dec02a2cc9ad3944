"""How long the unroll of an optimizer step is."""

from __future__ import annotations

import random
from collections.abc import Sequence


def unroll_length(lengths: Sequence[int], seed: int, step: int) -> int:
    """One of `lengths`, drawn uniformly (twice in the list is twice as likely): a function of (seed, optimizer step).

    So the ranks, which must do equal work, and a resumed run agree without talking.
    """
    return random.Random(f"unroll length {seed} {step}").choice(lengths)
