"""How many rows of logits a loss holds at a time, and what it saves for its backward pass."""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LogitRows(TorchDispatchMode):
    """The most rows over a vocabulary of `size` in any tensor an operator makes, views aside."""

    def __init__(self, size):
        super().__init__()
        self.size, self.most = size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, tuple | list) else (made,):
            if isinstance(part, torch.Tensor) and not func.is_view and part.shape[-1:] == (self.size,):
                self.most = max(self.most, part.numel() // self.size)
        return made


@contextmanager
def saved_shapes():
    """The shapes of all tensors saved for a backward pass within."""
    shapes = []

    def keep(tensor):
        shapes.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield shapes
