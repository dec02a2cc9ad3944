"""AdamW on float32 master weights, gradient clipping, and the learning-rate schedule.

Parameters may be bfloat16 in the forward pass; the optimizer then owns float32 copies and writes the rounded
values back after each step. Float32 parameters are their own masters. Knows nothing about the loop around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

BETAS, EPSILON = (0.9, 0.999), 1e-8


def learning_rate(step: int, *, peak: float, total_steps: int, warmup_ratio: float) -> float:
    """The rate of optimizer step `step` (from 0): linear warm-up, then a cosine to 0 over the rest."""
    warmup = int(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return peak * 0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0)))


class MasterAdamW:
    """AdamW (no weight decay) over float32 masters of `parameters`."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, max_grad_norm: float) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [_master(parameter) for parameter in self.parameters]
        self.max_grad_norm = max_grad_norm
        self.adamw = torch.optim.AdamW(self.masters, lr=0.0, betas=BETAS, eps=EPSILON, weight_decay=0.0, fused=True)

    def step(self, rate: float) -> Tensor:
        """Clip, update at learning rate `rate`, forget the gradients; returns their norm before clipping."""
        for parameter, master in self._copied():
            assert parameter.grad is not None, "the loss must be connected to every parameter of the draft"
            master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(self.masters, self.max_grad_norm)
        self.adamw.param_groups[0]["lr"] = rate
        self.adamw.step()
        self._write_back()
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None
        return norm.detach()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: plain numbers and tensors."""
        return {
            "adamw": self.adamw.state_dict(),
            "masters": [master.detach() for _, master in self._copied()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of the same parameters; parameters with a master copy get its rounded value."""
        self.adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for (_, master), saved in zip(self._copied(), state["masters"], strict=True):
                master.copy_(saved)
        self._write_back()

    def _copied(self) -> list[tuple[nn.Parameter, Tensor]]:
        pairs = zip(self.parameters, self.masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if master is not parameter]

    @torch.no_grad()
    def _write_back(self) -> None:
        for parameter, master in self._copied():
            parameter.copy_(master)


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().to(torch.float32, copy=True).requires_grad_()
