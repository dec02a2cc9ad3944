"""One process or many: who this process is, and the few collectives training needs.

Reads torchrun's environment variables; without them the process is alone and every collective is a no-op, so
that callers never ask how many there are. Knows nothing about models, data or checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dloop.cli import UserError

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class World:
    """This process among `size`: its global `rank`, its `local_rank` on the machine, its `device`."""

    device: torch.device
    rank: int = 0
    local_rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """Print `text` once, on the main process."""
        if self.is_main:
            print(text, flush=True)

    def sums(self, values: Tensor) -> Tensor:
        """Elementwise sums of `values` over all processes, on the CPU."""
        summed = values.detach().cpu().clone()
        if self.size > 1:
            dist.all_reduce(summed)
        return summed

    def any(self, flag: bool) -> bool:
        """Whether `flag` holds on at least one process."""
        return flag if self.size == 1 else bool(self.sums(torch.tensor(int(flag))))

    def from_main(self, value: ValueT) -> ValueT:
        """The main process's `value`, on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: ValueT) -> list[ValueT]:
        """Every process's `value` in the order of ranks, on every process."""
        if self.size == 1:
            return [value]
        box: list[ValueT] = [value] * self.size
        dist.all_gather_object(box, value)
        return box

    @contextmanager
    def one_a_node_first(self) -> Iterator[None]:
        """Run the body on local rank 0, then on the others, which find its work done (index, download)."""
        if self.size > 1 and self.local_rank > 0:
            dist.barrier()
        yield
        if self.size > 1 and self.local_rank == 0:
            dist.barrier()

    def replicate(self, module: nn.Module) -> nn.Module:
        """`module`, its gradients averaged over all processes during the backward pass."""
        if self.size == 1:
            return module
        devices = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=devices, broadcast_buffers=False, gradient_as_bucket_view=True
        )


def without_reduction(module: nn.Module) -> AbstractContextManager[None]:
    """Keep gradients local during one pass of a replicated `module`: another micro-step follows."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) else nullcontext()


def choose_device(name: str | None, local_rank: int = 0) -> torch.device:
    """`name`, or a GPU where there is one; `cuda` without an index means the one of this local rank."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise UserError(f"--device {name}: torch knows no such device; use cuda, cuda:0 or cpu") from error
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"--device {name}: only CPUs and CUDA devices are supported; use cuda, cuda:0 or cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch finds no CUDA device here; use --device cpu")
    return torch.device("cuda", local_rank) if device == torch.device("cuda") else device


@contextmanager
def join_world(device_name: str | None = None) -> Iterator[World]:
    """Join the processes torchrun started (NCCL between GPUs, gloo between CPUs), or be alone."""
    rank, local_rank, size = (int(os.environ.get(key, "0")) for key in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = choose_device(device_name, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(device=device, rank=rank, local_rank=local_rank, size=max(size, 1))
    if world.size > 1:
        # Host-side values travel over gloo even between GPUs: reading them must not wait for the device.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield world
    finally:
        if world.size > 1:
            dist.destroy_process_group()
