"""From options to a trainer: rows, models, objective, optimizer and the state to go on from.

It decides nothing: every value is a resolved option of `dloop/train.py`.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dloop.cli import UserError
from dloop.data.loader import ConversationDataset, TrainingLoader, training_loader
from dloop.data.preview import describe_sample
from dloop.data.token_counts import supervised_counts
from dloop.hosts.host import Host, ObjectiveOptions
from dloop.hosts.registry import MTP, load_host, new_host, recognise, recognise_config
from dloop.hosts.target_model import decoder, embedding, load_target
from dloop.training.distributed import World
from dloop.training.optimizer import MasterAdamW
from dloop.training.target_pass import FrozenTarget
from dloop.training.trainer import Plan, Settings, Trainer

if TYPE_CHECKING:
    from dloop.train import Options


def open_dataset(options: Options, tokenizer: Any, world: World) -> ConversationDataset:
    """The training rows; one process a node builds their index."""
    with world.one_a_node_first():
        return ConversationDataset(
            options.train_data_path,
            tokenizer,
            options.chat_template,
            options.max_length,
            system_prompt=options.system_prompt,
            train_only_last_turn=options.train_only_last_turn,
            strict=options.strict_data,
            cache_dir=options.cache_dir,
        )


def epoch_loader(
    options: Options, dataset: ConversationDataset, world: World, epoch: int, start: int
) -> TrainingLoader:
    """This process's batches of `epoch` from batch `start` on."""
    return training_loader(
        dataset,
        batch_size=options.batch_size,
        rank=world.rank,
        world_size=world.size,
        epoch=epoch,
        start_batch=start,
        num_workers=options.dataloader_num_workers,
    )


def plan_run(options: Options, dataset: ConversationDataset, world: World) -> Plan:
    """How many steps the run has; a resolved `global_batch_size` is needed."""
    assert options.global_batch_size is not None
    return Plan.of(
        len(epoch_loader(options, dataset, world, epoch=0, start=0)),
        epochs=options.num_epochs,
        accumulation=options.global_batch_size // (world.size * options.batch_size),
        max_steps=options.max_steps,
    )


def build_trainer(
    options: Options, world: World, dataset: ConversationDataset, plan: Plan, checkpoint: Path | None
) -> Trainer:
    """Load the models and put the trainer together, in the state of `checkpoint` if there is one."""
    dtype = getattr(torch, str(options.dtype))
    assert options.learning_rate is not None
    assert options.warmup_ratio is not None
    assert options.max_grad_norm is not None
    target = load_target(options.target_model_path, dtype=dtype, device=world.device, revision=options.revision)
    check_target(options, target, dataset.encode.tokenizer)
    host = load_draft(options, checkpoint, dtype, world.device)
    host.check_target(target)
    if checkpoint is None and options.draft_config is not None:
        host.adopt_vocabulary(lambda token_ids: count_tokens(options, dataset, world, token_ids))
    made_here: dict[str, Any] = {"total_steps": plan.total_steps, "from_scratch": options.draft_config is not None}
    chosen = {
        field.name: getattr(options, field.name) for field in fields(ObjectiveOptions) if field.name not in made_here
    }
    objective = host.objective(target, ObjectiveOptions(**chosen, **made_here))
    say_start(host, target, dataset, plan, checkpoint, world)
    trainer = Trainer(
        world=world,
        host=host,
        objective=objective,
        target=FrozenTarget(
            target,
            objective.taps,
            seed=options.seed,
            position_offset_max=options.position_offset_max,
            remember=options.remember_target_states,
        ),
        optimizer=MasterAdamW(objective.parameters(), max_grad_norm=options.max_grad_norm),
        loader=lambda epoch, start: epoch_loader(options, dataset, world, epoch, start),
        plan=plan,
        settings=Settings(
            learning_rate=options.learning_rate,
            warmup_ratio=options.warmup_ratio,
            log_interval=options.log_interval,
            save_interval=options.save_interval,
            keep_checkpoints=options.keep_checkpoints,
            dtype=dtype,
        ),
        folder=options.output_dir,
    )
    if checkpoint is not None:
        trainer.resume(checkpoint)
    return trainer


def family_of(options: Options) -> type[Host]:
    """The family of the draft that the command line names; a start of another family's is refused."""
    source, revision = start_of(options)
    family = recognise_config(source) if options.draft_config is not None else recognise(source, revision)
    if options.mtp is not None and family is not MTP[options.mtp]:
        raise UserError(
            f"--mtp {options.mtp}: {source} is a {family.name} draft of another kind; leave one of both out"
        )
    given = next((name for name in ("draft_init_path", "ckpt_dir") if getattr(options, name) is not None), None)
    if given not in (None, family.start_flag):
        wrong, right = ("--" + str(name).replace("_", "-") for name in (given, family.start_flag))
        raise UserError(f"{wrong} {source} belongs to {family.name}: start from it with {right}")
    return family


def start_of(options: Options) -> tuple[str, str | None]:
    """Where the draft to start from, or its configuration, lies: the name and its revision."""
    if options.draft_config is not None:
        return options.draft_config, None
    source = options.draft_init_path or options.ckpt_dir
    if source is not None:
        return source, options.draft_revision
    return options.target_model_path, options.revision


def load_draft(options: Options, checkpoint: Path | None, dtype: torch.dtype, device: torch.device) -> Host:
    """The draft to train: the checkpoint to go on from, else the start the command line names."""
    if checkpoint is not None:
        return load_host(str(checkpoint), dtype=dtype, device=device)
    source, revision = start_of(options)
    if options.draft_config is not None:
        return new_host(source, seed=options.seed, dtype=dtype, device=device)
    return load_host(source, dtype=dtype, device=device, revision=revision)


def count_tokens(options: Options, dataset: ConversationDataset, world: World, token_ids: int) -> Tensor:
    """How often each of `token_ids` ids is supervised in the training rows, counted by all processes together."""
    counts = supervised_counts(
        dataset,
        token_ids,
        rank=world.rank,
        world_size=world.size,
        num_workers=options.dataloader_num_workers,
    )
    return world.sums(counts)


def check_target(options: Options, target: nn.Module, tokenizer: Any) -> None:
    """Refuse a target that cannot see every token or every position of the run."""
    rows = embedding(target).num_embeddings
    if len(tokenizer) > rows:
        raise UserError(
            f"the tokenizer of {options.target_model_path} has {len(tokenizer)} tokens, its model {rows}; "
            "they do not belong together"
        )
    config: Any = decoder(target).config
    if options.position_offset_max > config.max_position_embeddings:
        raise UserError(
            f"--position-offset-max {options.position_offset_max} leaves the target's "
            f"{config.max_position_embeddings} positions; give at most that"
        )


def say_start(
    host: Host,
    target: nn.Module,
    dataset: ConversationDataset,
    plan: Plan,
    checkpoint: Path | None,
    world: World,
) -> None:
    """Print what is about to be trained on what: sizes, steps, and one row with its supervised part."""
    if not world.is_main:
        return

    def million(module: nn.Module) -> str:
        return f"{sum(parameter.numel() for parameter in module.parameters()) / 1e6:.2f} M parameters"

    print(f"target: {million(target)}, frozen; {host.name} draft: {million(host.network)}")
    print(
        f"{plan.total_steps} steps in {plan.epochs} epochs of {len(dataset)} rows, {world.size} processes, "
        f"{plan.accumulation} micro-steps a step"
    )
    print(f"going on from {checkpoint}" if checkpoint else "from the start")
    print(describe_sample(dataset, 0), flush=True)
