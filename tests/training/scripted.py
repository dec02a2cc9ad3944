"""A scripted target, host and loader: everything the trainer touches, without weights or a tokenizer.

As a program it is one training process for the tests that need several or need to kill one:
`python -m tests.training.scripted FOLDER [--kill-in-save N | --kill-after-step N]`, also under torchrun.
"""

from __future__ import annotations

import argparse
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dloop.data.loader import Batch
from dloop.hosts.host import Host, Loss, Objective, ObjectiveOptions, TargetOutputs
from dloop.training.distributed import World, join_world
from dloop.training.optimizer import MasterAdamW
from dloop.training.run_folder import claim
from dloop.training.target_pass import FrozenTarget
from dloop.training.trainer import Plan, Settings, Trainer

HIDDEN, LAYERS, VOCAB = 8, 3, 16
ALONE = World(device=torch.device("cpu"))


class ScriptedDecoder(nn.Module):
    """Adds every layer's linear map of (token, position); slices its layers as the library does."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=LAYERS)
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)
        self.layers_run = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Tensor:
        assert not use_cache
        hidden = self.embed_tokens(input_ids)
        hidden = hidden + position_ids[..., None].to(hidden.dtype) / 100
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden = hidden + layer(hidden).tanh()
            self.layers_run += 1
        return self.norm(hidden)


class ScriptedTarget(nn.Module):
    """The causal model around that decoder."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.decoder = ScriptedDecoder()
        self.eval().requires_grad_(False)

    def get_decoder(self) -> nn.Module:
        return self.decoder


class ScriptedObjective(Objective):
    """Regression of the next tapped state on supervised tokens, normalised in each micro-batch."""

    taps = ("layers.1",)

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, batch: Batch, outputs: TargetOutputs, step: int) -> Loss:
        states = outputs.states["layers.1"].to(self.network.weight.dtype)
        mask = batch.loss_mask[:, 1:].float()
        noise = torch.stack([_noise(batch.epoch, place) for place in batch.places])
        wanted = states[:, 1:] + noise[:, None] + step / 1000
        errors = (self.network(states[:, :-1]) - wanted).float().square().mean(-1)
        numerator, denominator = (errors * mask).sum(), mask.sum()
        total = numerator / (denominator + 1e-6)
        good = (errors.detach() < 1.0).float() * mask
        return Loss(
            total + sum(parameter.sum() for parameter in self.network.parameters()) * 0.0,
            {
                "host/loss": (numerator.detach(), denominator),
                "host/accepted_prefix": (good.sum(), denominator),
            },
        )


def _noise(epoch: int, place: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * epoch + place)
    return torch.randn(HIDDEN, generator=generator) / 10


class ScriptedHost(Host):
    """One linear map; its format is a `config.json` and a safetensors file."""

    name = "scripted"
    taps = ScriptedObjective.taps

    def __init__(self, tensors: dict[str, Tensor] | None = None, dtype: torch.dtype = torch.float32) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.network = nn.Linear(HIDDEN, HIDDEN)
        if tensors:
            self.network.load_state_dict(tensors)
        self.network.to(dtype)

    @classmethod
    def recognises(cls, config, keys):
        return config.get("model_type") == "scripted"

    @classmethod
    def load(cls, config, tensors, *, dtype, device):
        return cls(tensors, dtype)

    def check_target(self, target: nn.Module) -> None:
        pass

    def save(self, folder: Path, dtype: torch.dtype) -> None:
        (folder / "config.json").write_text('{"model_type": "scripted"}', encoding="utf-8")
        tensors = {name: tensor.detach().to(dtype) for name, tensor in self.network.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")

    def drafter(self, target: nn.Module):
        raise NotImplementedError

    def objective(self, target: nn.Module, options: ObjectiveOptions) -> ScriptedObjective:
        return ScriptedObjective(self.network)


def row(number: int, unsupervised: frozenset[int] = frozenset()) -> tuple[Tensor, Tensor]:
    """Ids and loss mask of training row `number`: 4 to 8 tokens, its second half supervised."""
    length = 4 + number % 5
    ids = torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(number))
    mask = (torch.arange(length) >= length // 2).long()
    return ids, mask * (number not in unsupervised)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A scripted run."""

    rows: int = 24
    batch_size: int = 2
    accumulation: int = 2
    epochs: int = 3
    max_steps: int | None = None
    save_interval: int = 4
    log_interval: int = 3
    keep_checkpoints: int = 2
    position_offset_max: int = 20
    learning_rate: float = 0.05
    dtype: torch.dtype = torch.float32
    unsupervised: frozenset[int] = field(default_factory=frozenset)

    def batches(self, world: World, epoch: int, start: int):
        """This rank's batches of the epoch from `start` on, places dealt out as the real loader does."""
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(epoch)).tolist()
        mine = list(enumerate(order))[world.rank :: world.size]
        count = len(mine) // self.batch_size
        for number in range(start, count):
            chosen = mine[number * self.batch_size : (number + 1) * self.batch_size]
            rows = [row(index, self.unsupervised) for _, index in chosen]
            pad = torch.nn.utils.rnn.pad_sequence
            yield Batch(
                input_ids=pad([ids for ids, _ in rows], batch_first=True),
                attention_mask=pad([torch.ones_like(ids) for ids, _ in rows], batch_first=True),
                loss_mask=pad([mask for _, mask in rows], batch_first=True),
                epoch=epoch,
                places=tuple(place for place, _ in chosen),
            )


def scripted_trainer(folder: Path, recipe: Recipe = Recipe(), world: World = ALONE) -> Trainer:
    """A trainer in the state in which a process called on `folder` would have it."""
    config = {"--learning-rate": recipe.learning_rate, "--rows": recipe.rows}
    checkpoint = world.from_main(claim(folder, config, resume=True, move_aside=False) if world.is_main else None)
    tensors = load_file(checkpoint / "model.safetensors") if checkpoint else None
    host = ScriptedHost(tensors, recipe.dtype)
    target = ScriptedTarget().to(recipe.dtype)
    objective = host.objective(target, ObjectiveOptions())
    trainer = Trainer(
        world=world,
        host=host,
        objective=objective,
        target=FrozenTarget(target, objective.taps, position_offset_max=recipe.position_offset_max),
        optimizer=MasterAdamW(objective.parameters(), max_grad_norm=1.0),
        loader=lambda epoch, start: recipe.batches(world, epoch, start),
        plan=Plan.of(
            recipe.rows // world.size // recipe.batch_size,
            recipe.epochs,
            recipe.accumulation,
            recipe.max_steps,
        ),
        settings=Settings(
            learning_rate=recipe.learning_rate,
            warmup_ratio=0.2,
            log_interval=recipe.log_interval,
            save_interval=recipe.save_interval,
            keep_checkpoints=recipe.keep_checkpoints,
            dtype=recipe.dtype,
        ),
        folder=folder,
    )
    if checkpoint:
        trainer.resume(checkpoint)
    return trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_save(count: int) -> None:
    """Make the `count`-th save of this process its last act, with half of the files written."""
    save, calls = ScriptedHost.save, []

    def deadly(self: ScriptedHost, folder: Path, dtype: torch.dtype) -> None:
        save(self, folder, dtype)
        calls.append(folder)
        if len(calls) == count:
            die()

    ScriptedHost.save = deadly


def die_after_step(step: int) -> None:
    """Kill the process right after optimizer step `step`."""
    train_step = Trainer.train_step

    def deadly(self: Trainer, batches: list[Batch]) -> None:
        train_step(self, batches)
        if self.step == step:
            die()

    Trainer.train_step = deadly


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kill-in-save", type=int)
    parser.add_argument("--kill-after-step", type=int)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.kill_in_save:
        die_in_save(chosen.kill_in_save)
    if chosen.kill_after_step:
        die_after_step(chosen.kill_after_step)
    recipe = Recipe(
        accumulation=chosen.accumulation,
        batch_size=chosen.batch_size,
    )
    with join_world("cpu") as world:
        scripted_trainer(chosen.folder, recipe, world).run()


if __name__ == "__main__":
    main()
