"""flex_attention compiled once for a whole run; block drafters and unrolled heads share it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def flex_kernel(compiled: bool, backend: Any = "inductor") -> Any:
    """The function `flex_attention`, compiled for shapes that change, or as it is.

    Compiled whole: when torch would give up compiling it anew, which it otherwise answers with a kernel that holds all
    scores, it raises instead.
    """
    from torch.nn.attention.flex_attention import flex_attention

    # Uncompiled it materialises all scores: right for a check on a CPU, never for training.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend) if compiled else flex_attention
