"""Train a draft, loop-aware or not: conversations, a frozen target and a draft in, a checkpoint out.

    python -m dloop.train --target-model-path T --draft-init-path D --train-data-path F --output-dir O

With several processes it runs through torchrun. Called again, it goes on from the newest checkpoint in `--output-dir`.
It knows nothing about draft families: the draft's checkpoint says which host trains it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from math import inf, isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dloop.cli import CommaInts, UserError, parse, run

if TYPE_CHECKING:
    from dloop.training.distributed import World
    from dloop.training.trainer import Plan, Trainer


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train a draft beside its frozen target."""

    target_model_path: str
    """Target: a folder or a hub repository."""
    train_data_path: Path
    """Conversations, one JSON object with a list `conversations` a line."""
    output_dir: Path
    """Where checkpoints, metrics and the final draft go; an interrupted run there is continued."""
    draft_init_path: str | None = None
    """Start from this DFlash, DSpark or Domino draft: a folder or a hub repository."""
    ckpt_dir: str | None = None
    """Start from this EAGLE-3 draft, Gemma 4 assistant or Qwen3.5 head: a folder or a hub repository."""
    mtp: Literal["qwen3.5", "gemma4"] | None = None
    """Train for multi-token prediction. `qwen3.5` starts from the head in the target's checkpoint unless --ckpt-dir
    names another one; `gemma4` needs --ckpt-dir, the assistant. With --draft-config, from scratch."""
    draft_config: str | None = None
    """Start from scratch: a `config.json` (or a folder with one) that describes the draft."""
    revision: str | None = None
    """Revision of the target on the hub."""
    draft_revision: str | None = None
    """Revision of the draft on the hub."""

    chat_template: str = "qwen"
    """How conversations are rendered and which part is supervised."""
    system_prompt: str | None = None
    """System prompt of rows without one, instead of the template's; an empty text for none."""
    max_length: int = 4096
    """Tokens a row is cut to."""
    train_only_last_turn: bool = False
    """Supervise the last answer of a row alone."""
    strict_data: bool = False
    """Stop at an unusable row instead of taking the next one."""
    cache_dir: Path | None = None
    """Where the index of the data file is kept; default: beside the file."""
    dataloader_num_workers: int = 8
    """Processes that read and tokenise rows; 0: this one does."""
    on_the_fly_loader: bool = True
    """Tokenise rows while training; the only way there is."""
    target_model_backend: str = "hf"
    """What runs the target; only hf."""

    num_epochs: int = 1
    """Passes over the data."""
    max_steps: int | None = None
    """Stop after so many optimizer steps; the learning rate then ends there."""
    batch_size: int = 1
    """Rows a process takes through the models at once."""
    global_batch_size: int | None = None
    """Rows an optimizer step, over all processes; default: processes x batch size."""
    learning_rate: float | None = None
    """Peak of the schedule: linear warm-up, then a cosine to 0. Default: 6e-4; EAGLE-3, MTP: 1e-4."""
    warmup_ratio: float | None = None
    """Share of the steps that warm up. Default: 0.04; EAGLE-3, MTP: 0.015."""
    max_grad_norm: float | None = None
    """Gradients are clipped to this norm. Default: 1.0; EAGLE-3, MTP: 0.5."""
    seed: int = 42
    """Of everything random but the order of the rows."""

    num_anchors: int | None = None
    """Block drafters: blocks drawn from each row, at most; default: 512."""
    loss_decay_gamma: float | None = None
    """Block drafters: row i of a block weighs exp(-i / gamma); default: no decay."""
    dloop_max_stage: int | None = None
    """Block drafters: most loop stages a step trains, 0 for the host's own objective; default: 3."""
    dloop_loss_weight: float | None = None
    """DSpark, Domino: share of the loop stage's loss; default: 0.25."""
    lambda_base_start: float | None = None
    """Domino: share of the uncorrected logits' loss at the first step; default: 1."""
    lambda_base_decay_ratio: float | None = None
    """Domino: part of the run over which that share falls to 0; default: 0.5."""
    ttt_length_dist: CommaInts | None = None
    """EAGLE-3 and multi-token prediction: lengths of the unroll, one drawn a step; one length alone is the host's own
    objective. Default: 7; Qwen3.5: 3,6,9; Gemma 4: 6,12,18."""
    position_offset_max: int = 0
    """Shift each row's rotary positions by up to this minus its length; 0: never."""
    remember_target_states: bool = False
    """Keep the target's states of every row in memory: for small data seen many times, without position offsets."""
    attention_backend: Literal["flex_attention", "sdpa"] | None = None
    """Attention of the draft; default: flex_attention on a GPU, else sdpa."""
    device: str | None = None
    """Default: a GPU where there is one."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the forward passes and the saved weights; default: bfloat16 on a GPU, else float32."""

    log_interval: int = 50
    """Optimizer steps between two lines of metrics.jsonl."""
    save_interval: int = 1000
    """Optimizer steps between two checkpoints."""
    keep_checkpoints: int = 2
    """How many checkpoints on the way are kept."""
    resume: bool = True
    """Continue the run in the output folder."""
    on_config_change: Literal["refuse", "move-aside"] = "refuse"
    """What to do when the output folder holds a run with another configuration."""
    min_accepted_prefix: float | None = None
    """Fail unless the mean accepted prefix of the last 50 steps exceeds this."""


PATHS = ("target_model_path", "train_data_path", "draft_init_path", "ckpt_dir", "draft_config")
"""Options that count by what they point to, not by their spelling."""

WITHOUT_INFLUENCE = {
    *("output_dir", "strict_data", "cache_dir", "dataloader_num_workers", "on_the_fly_loader"),
    *("target_model_backend", "device", "log_interval", "save_interval", "keep_checkpoints"),
    *("resume", "on_config_change", "min_accepted_prefix"),
}
"""Options that change no weight, so that a run may go on with other values."""


def main() -> None:
    """Train as the command line says."""
    options = parse(Options)
    check(options)
    from dloop.training.distributed import join_world

    with join_world(options.device) as world:
        train(resolve(options, world), world)


def check(options: Options) -> None:
    """Refuse what no run can be made of, before anything is loaded."""
    starts = sum(getattr(options, name) is not None for name in ("draft_init_path", "ckpt_dir", "draft_config"))
    if starts + (options.mtp == "qwen3.5" and not starts) != 1:
        raise UserError(
            "give exactly one start: --draft-init-path (a block drafter), --ckpt-dir (an EAGLE-3 draft, a Gemma 4 "
            "assistant or a Qwen3.5 head), --mtp qwen3.5 (the head in the target) or --draft-config (any draft, from "
            "scratch)"
        )
    if options.target_model_backend != "hf":
        raise UserError(
            f"--target-model-backend {options.target_model_backend}: the target runs inside the trainer here; "
            "leave the flag out or say hf"
        )
    if not options.on_the_fly_loader:
        raise UserError("--no-on-the-fly-loader: rows are always tokenised on the fly; leave the flag out")
    if options.remember_target_states and options.position_offset_max:
        raise UserError(
            "--remember-target-states needs rows that never change, --position-offset-max moves them; leave one out"
        )
    for name in ("num_epochs", "batch_size", "max_length", "num_anchors", "log_interval", "save_interval"):
        _demand_positive(options, name)
    for name in ("max_steps", "keep_checkpoints", "learning_rate", "max_grad_norm"):
        _demand_positive(options, name)
    for name in ("global_batch_size", "loss_decay_gamma"):
        _demand_positive(options, name)
    for name in ("dataloader_num_workers", "position_offset_max", "seed", "dloop_max_stage", "dloop_loss_weight"):
        _demand_within(options, name)
    for name in ("warmup_ratio", "lambda_base_start", "lambda_base_decay_ratio"):
        _demand_within(options, name, 1)
    if options.ttt_length_dist is not None and min(options.ttt_length_dist) < 1:
        raise UserError(f"--ttt-length-dist is {options.ttt_length_dist}; every length must be at least 1")


def _demand_positive(options: Options, name: str) -> None:
    value = getattr(options, name)
    if value is not None and not 0 < value < inf:
        raise UserError(f"{flag(name)} is {value}; it must be positive")


def _demand_within(options: Options, name: str, most: float = inf) -> None:
    value = getattr(options, name)
    if value is not None and not (0 <= value <= most and isfinite(value)):
        upper = "" if most == inf else f" and at most {most}"
        raise UserError(f"{flag(name)} is {value}; it must be at least 0{upper}")


def flag(name: str) -> str:
    """The command-line spelling of the option `name`."""
    return "--" + name.replace("_", "-")


def resolve(options: Options, world: World) -> Options:
    """`options` with every default that depends on the machine or on the draft's family filled in."""
    from dloop.training.assembly import family_of

    on_gpu = world.device.type == "cuda"
    backend = options.attention_backend or ("flex_attention" if on_gpu else "sdpa")
    if backend == "flex_attention" and not on_gpu:
        raise UserError(
            "--attention-backend flex_attention needs a GPU (torch has no backward pass for it on a CPU): "
            "leave the flag out or say sdpa"
        )
    rows = options.global_batch_size or world.size * options.batch_size
    if rows % (world.size * options.batch_size):
        raise UserError(
            f"--global-batch-size {rows} is no multiple of {world.size} processes x --batch-size "
            f"{options.batch_size}; change one of the three"
        )
    dtype = options.dtype or ("bfloat16" if on_gpu else "float32")
    known = {name: value for name, value in asdict(options).items() if value is not None}
    chosen = {name: known.get(name, value) for name, value in family_of(options).training_defaults.items()}
    return replace(options, attention_backend=backend, global_batch_size=rows, dtype=dtype, **chosen)


def train(options: Options, world: World) -> None:
    """The whole run of resolved `options`: claim the folder, train, write the final draft and the manifest."""
    from dloop.hosts.target_model import load_tokenizer
    from dloop.training.assembly import build_trainer, open_dataset, plan_run

    world.say("\n".join(f"{flag(name)} {value}" for name, value in asdict(options).items()))
    tokenizer = load_tokenizer(options.target_model_path, options.revision)
    dataset = open_dataset(options, tokenizer, world)
    plan = plan_run(options, dataset, world)
    claimed = world.from_main(claim_folder(options, plan) if world.is_main else None)
    assert claimed is not None
    config, checkpoint, finished = claimed
    if finished:
        world.say(f"{options.output_dir} holds this run's final draft already: nothing to do")
        return
    trainer = build_trainer(options, world, dataset, plan, checkpoint)
    last = trainer.run()
    accepted = trainer.recent_prefix.mean(world)
    demand_acceptance(options, accepted)
    if world.is_main:
        facts = {"rows": len(dataset), "last_checkpoint": last.name, "run_config": config}
        finish(options, trainer, facts | {"accepted_prefix": None if isnan(accepted) else accepted})


def claim_folder(options: Options, plan: Plan) -> tuple[dict[str, Any], Path | None, bool]:
    """Make the output folder this run's: its configuration, the checkpoint to go on from, whether it is done."""
    from dloop.training.run_folder import claim, is_finished

    config = run_config(options, plan)
    aside = options.on_config_change == "move-aside"
    checkpoint = claim(options.output_dir, config, resume=options.resume, move_aside=aside)
    return config, checkpoint, is_finished(options.output_dir)


def run_config(options: Options, plan: Plan) -> dict[str, Any]:
    """What determines the run's numbers: flag -> JSON value, files by a hash of what they hold."""
    from dloop.training.run_folder import fingerprint

    revisions = {
        "target_model_path": options.revision,
        "draft_init_path": options.draft_revision,
        "ckpt_dir": options.draft_revision,
    }
    config: dict[str, Any] = {}
    for name, value in asdict(options).items():
        if name in PATHS and value is not None:
            value = fingerprint(str(value), revisions.get(name))
        if isinstance(value, tuple):
            value = list(value)
        if name not in WITHOUT_INFLUENCE:
            config[flag(name)] = value
    return config | {"steps": plan.total_steps}


def demand_acceptance(options: Options, accepted: float) -> None:
    """Refuse to call a draft final that accepts too little, before anything is built on it."""
    least = options.min_accepted_prefix
    if least is not None and not accepted > least:
        raise UserError(
            f"the mean accepted prefix of the last steps is {accepted:.2f}, --min-accepted-prefix demands more "
            f"than {least}: the draft has not learnt enough; train longer (--num-epochs, --max-steps)"
        )


def finish(options: Options, trainer: Trainer, facts: dict[str, Any]) -> None:
    """Write `final/` (the draft alone) and, last of all, `manifest.json`."""
    from dloop.results.atomic import write_json
    from dloop.results.provenance import environment
    from dloop.training.checkpointing import save_final
    from dloop.training.run_folder import FINAL, MANIFEST_FILE

    dtype = trainer.settings.dtype
    save_final(options.output_dir / FINAL, trainer.host, dtype)
    code = ("dloop.data", "dloop.hosts", "dloop.training")
    settings = {flag(name): value for name, value in asdict(options).items()}
    manifest = {
        "host": trainer.host.name,
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        **facts,
        "steps": trainer.step,
        "wall_seconds": trainer.wall_seconds,
        "env": environment(trainer.world.device, dtype, str(options.attention_backend), code=code),
    }
    write_json(options.output_dir / MANIFEST_FILE, manifest)


if __name__ == "__main__":
    run(main)
