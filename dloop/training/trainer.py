"""The training loop: micro-batches in, optimizer steps, metrics and checkpoints out.

It knows a host only through its objective, and everything random is a function of (seed, epoch, place) or of
the step, so a resumed run continues bit for bit. It loads nothing: `dloop/train.py` hands it the parts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from dloop.cli import UserError
from dloop.data.loader import Batch
from dloop.hosts.host import Host, Loss
from dloop.training.checkpointing import checkpoint_name, load_state, prune, save_checkpoint
from dloop.training.distributed import World, without_reduction
from dloop.training.interruption import EXIT_CODE, StopRequest
from dloop.training.metrics_log import Interval, MetricsLog, RecentRatio
from dloop.training.optimizer import MasterAdamW, learning_rate
from dloop.training.run_folder import METRICS_FILE
from dloop.training.target_pass import FrozenTarget

ACCEPTED_PREFIX = "host/accepted_prefix"
"""The ratio every objective reports for its host stage: leading drafts that equal the text, a block."""

RECENT_STEPS = 50
"""Optimizer steps over which the final acceptance is averaged."""


@dataclass(frozen=True)
class Plan:
    """The run in numbers: `accumulation` micro-batches a step and rank, `total_steps` optimizer steps."""

    epochs: int
    accumulation: int
    steps_per_epoch: int
    total_steps: int

    @classmethod
    def of(cls, batches_per_epoch: int, epochs: int, accumulation: int, max_steps: int | None = None) -> Plan:
        """A shorter last step closes each epoch when `accumulation` does not divide its batches."""
        steps_per_epoch = -(-batches_per_epoch // accumulation)
        total = epochs * steps_per_epoch
        return cls(epochs, accumulation, steps_per_epoch, total if max_steps is None else min(total, max_steps))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to step, and how often to write what."""

    learning_rate: float
    warmup_ratio: float
    log_interval: int
    save_interval: int
    keep_checkpoints: int
    dtype: torch.dtype


class Trainer:
    """One run. `loader(epoch, start_batch)` yields this rank's micro-batches of an epoch from there on."""

    def __init__(
        self,
        *,
        world: World,
        host: Host,
        objective: nn.Module,
        target: FrozenTarget,
        optimizer: MasterAdamW,
        loader: Callable[[int, int], Iterable[Batch]],
        plan: Plan,
        settings: Settings,
        folder: Path,
    ) -> None:
        self.world, self.host, self.target, self.optimizer = world, host, target, optimizer
        self.objective = world.replicate(objective)
        self.loader, self.plan, self.settings, self.folder = loader, plan, settings, folder
        self.step = 0
        self.wall_seconds = 0.0
        self.interval = Interval(world)
        self.recent_prefix = RecentRatio(RECENT_STEPS)
        self.log = MetricsLog(folder / METRICS_FILE)

    def resume(self, checkpoint: Path) -> None:
        """Take over the state of `checkpoint`, whose weights the host already has."""
        state = load_state(checkpoint, self.world.device)
        self.step, self.wall_seconds = state["step"], state["wall_seconds"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.recent_prefix.load_state(state["recent_prefix"], self.world)

    def run(self) -> Path:
        """Train to the end of the plan; returns the last checkpoint. After SIGTERM: save, exit with 143."""
        self._started = time.perf_counter() - self.wall_seconds
        if self.world.is_main:
            self.log.truncate(self.step)
        with StopRequest() as stop, self._progress_bar() as bar:
            for batches in self._remaining_steps():
                self.train_step(batches)
                bar.update()
                self._log_and_save(bar, stopping=self.world.any(stop.received))
        return self.folder / checkpoint_name(self.plan.epochs, self.plan.total_steps)

    def train_step(self, batches: list[Batch]) -> None:
        """One optimizer step over this rank's micro-batches: the loss is their mean, averaged over ranks."""
        losses = []
        for number, batch in enumerate(batches, start=1):
            with nullcontext() if number == len(batches) else without_reduction(self.objective):
                losses.append(self._micro_step(batch, len(batches)))
        self.interval.clock.start("optimizer")
        norm = self.optimizer.step(self._learning_rate(self.step))
        self.recent_prefix.add([loss.ratios[ACCEPTED_PREFIX] for loss in losses])
        self.interval.sums.add({"grad_norm": (norm, torch.ones_like(norm))})
        self.step += 1
        self.interval.clock.start(None)

    def _micro_step(self, batch: Batch, parts: int) -> Loss:
        clock = self.interval.clock
        clock.start("target")
        lengths = batch.attention_mask.sum(dim=1).tolist()
        self.interval.count(lengths)
        batch = on_device(batch, self.world.device)
        outputs = self.target(batch, lengths)
        clock.start("forward")
        loss: Loss = self.objective(batch, outputs, self.step)
        clock.start("backward")
        (loss.total / parts).backward()
        total = loss.total.detach()
        self.interval.sums.add({"loss": (total, torch.ones_like(total)), **loss.ratios})
        return replace(loss, total=total)

    def _remaining_steps(self) -> Iterator[list[Batch]]:
        """This rank's micro-batches of each optimizer step still to do, in an uninterrupted run's order."""
        while self.step < self.plan.total_steps:
            epoch, done = divmod(self.step, self.plan.steps_per_epoch)
            batches = iter(self.loader(epoch, done * self.plan.accumulation))
            self.interval.clock.start("data")
            while window := list(islice(batches, self.plan.accumulation)):
                yield window
                if self.step == self.plan.total_steps:
                    return
                self.interval.clock.start("data")

    def _learning_rate(self, step: int) -> float:
        return learning_rate(
            step,
            peak=self.settings.learning_rate,
            total_steps=self.plan.total_steps,
            warmup_ratio=self.settings.warmup_ratio,
        )

    def _progress_bar(self) -> tqdm:
        return tqdm(
            desc="train",
            total=self.plan.total_steps,
            initial=self.step,
            unit="step",
            mininterval=1.0,
            disable=not self.world.is_main,
        )

    def _log_and_save(self, bar: tqdm, *, stopping: bool) -> None:
        finished = self.step == self.plan.total_steps
        saving = finished or stopping or self.step % self.settings.save_interval == 0
        # A line at every save: no checkpoint holds weights whose loss nobody has looked at.
        if saving or self.step % self.settings.log_interval == 0:
            self._write_metrics(bar)
        if saving:
            self._save(finished)
        if stopping and not finished:
            self.world.say(f"stopped by SIGTERM after step {self.step}; the same command goes on from there")
            raise SystemExit(EXIT_CODE)

    def _write_metrics(self, bar: tqdm) -> None:
        measured = self.interval.pop()
        for name in ("loss", "grad_norm"):
            if not math.isfinite(measured[name]):
                raise UserError(f"{name} became {measured[name]} by step {self.step}: lower --learning-rate")
        position = {"step": self.step, "epoch": self._epoch(), "lr": self._learning_rate(self.step - 1)}
        if self.world.is_main:
            self.log.write(position | measured)
        bar.set_postfix(loss=f"{measured['loss']:.3f}", prefix=f"{measured[ACCEPTED_PREFIX]:.2f}")

    def _save(self, finished: bool) -> None:
        self.interval.clock.start("save")
        self.wall_seconds = time.perf_counter() - self._started
        state = {
            "step": self.step,
            "wall_seconds": self.wall_seconds,
            "optimizer": self.optimizer.state_dict(),
            "recent_prefix": self.recent_prefix.state(self.world),
        }
        if self.world.is_main:
            name = checkpoint_name(self.plan.epochs if finished else self._epoch(), self.step)
            save_checkpoint(self.folder / name, self.host, self.settings.dtype, state)
            if not finished:
                prune(self.folder, self.settings.keep_checkpoints)
        self.interval.clock.start(None)

    def _epoch(self) -> int:
        return (self.step - 1) // self.plan.steps_per_epoch


def on_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device`; the copy does not wait where the memory is pinned."""
    names = ("input_ids", "attention_mask", "loss_mask")
    moved = {name: getattr(batch, name).to(device, non_blocking=True) for name in names}
    return replace(batch, **moved)
