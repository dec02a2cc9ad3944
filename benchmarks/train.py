"""Training speed by host: seconds a step by part, with the host's objective alone and with loops, and peak memory.

Every setting runs the real trainer on the same random rows, in turn (A B C ... A B C ...), and medians are compared.
A looped step depends on the stage (or the length of the unroll) that it draws: every one is timed, and the mean over
them is what training pays, since they are drawn uniformly.

    python benchmarks/train.py --quick
    python benchmarks/train.py --output results/benchmarks
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, get_args

import torch
from probes import Stopwatch, clock
from steering import HEADS, dflash_config, random_draft, repeating_target
from training_report import PARTS, MemoryRow, Row, peak_above_rest, show, write
from transformers import PreTrainedModel

from dloop.cli import parse, run
from dloop.data.loader import Batch
from dloop.demo.architectures import new_target
from dloop.hosts.host import Host, Objective, ObjectiveOptions
from dloop.hosts.target_model import DTYPES, embedding
from dloop.hosts.unroll.schedule import unroll_length
from dloop.training.distributed import World, choose_device
from dloop.training.metrics_log import PartClock
from dloop.training.optimizer import MasterAdamW
from dloop.training.target_pass import FrozenTarget
from dloop.training.trainer import Plan, Settings, Trainer

STAGES = 3
UNROLLS = {"eagle3": 7, "mtp-qwen3.5": 3, "mtp-gemma4": 6}
"""Drafts a stage of the heads that train by unrolling; looped training draws one, two or three times as many."""
MTP = {"mtp-qwen3.5": "qwen3.5", "mtp-gemma4": "gemma4"}
"""The demo's architectures that have such a head; their sizes are the demo's whatever `--shape` says."""
VOCABULARY = 4096
DEMO_DRAFTS = Path(__file__).parent.parent / "config/demo-drafts"
LONGEST_SEARCH = 1000
"""Optimizer steps among which one is sought for every stage or length."""
HostName = Literal["dflash", "dspark", "domino", "eagle3", "mtp-qwen3.5", "mtp-gemma4"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time training steps; prints tables, and with --output writes JSON."""

    quick: bool = False
    """Fewer repeats and smaller memory tables: under three minutes on one core."""
    hosts: tuple[HostName, ...] = get_args(HostName)
    """Draft families, random and as wide as the target."""
    shape: Literal["tiny", "narrow", "qwen3-4b"] | None = None
    """Sizes of the random Qwen3 target. Default: qwen3-4b on a GPU, else narrow."""
    length: int = 512
    """Tokens of a row; the last two thirds are supervised."""
    anchors: int = 64
    """Blocks a row (block drafters)."""
    batch_size: int = 1
    """Rows of a step."""
    repeats: int | None = None
    """Steps that are timed for each stage or length. Default: 9, quick 3."""
    memory: bool = True
    """Also measure peak memory against the length of a row and the number of anchors."""
    attention_backend: Literal["sdpa", "flex_attention"] | None = None
    """Default: flex_attention on a GPU, else sdpa."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Default: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """Default: a GPU if there is one."""
    threads: int = 1
    """CPU threads of torch."""
    clock: Literal["wall", "cpu"] = "wall"
    """`cpu` counts this process's own time, for a machine that is busy otherwise."""
    output: Path | None = None
    """Folder for train.json."""


def main() -> None:
    """Measure and show."""
    options = parse(Options)
    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    dtype = DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    shape = options.shape or ("qwen3-4b" if device.type == "cuda" else "narrow")
    rows: list[Row] = []
    memory: list[MemoryRow] = []
    for kind, names in by_target(options.hosts).items():
        target = mtp_target(kind, dtype, device) if kind else repeating_target(shape, dtype, device)
        for name in names:
            rows += time_host(name, target, options)
            memory += measure_memory(name, target, options) if options.memory else []
    show(rows, memory)
    if options.output is not None:
        write(options.output, rows, memory, asdict(options), device)


def by_target(hosts: tuple[HostName, ...]) -> dict[str, list[HostName]]:
    """The hosts that share a target: those of one architecture of the demo, and, under "", those of the Qwen3."""
    kinds = list(dict.fromkeys(MTP.get(name, "") for name in hosts))
    return {kind: [name for name in hosts if MTP.get(name, "") == kind] for kind in kinds}


def mtp_target(architecture: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A random target that an MTP head belongs to."""
    target: Any = new_target(architecture, VOCABULARY, eos=2, pad=0, seed=0)
    return target.to(device, dtype).eval().requires_grad_(False)


def time_host(name: HostName, target: Any, options: Options) -> list[Row]:
    """One row for the host's own objective, one with loops; their steps take turns."""
    setups = [Setup(name, target, options, looped=looped) for looped in (False, True)]
    for _ in range(2 + (options.repeats or (3 if options.quick else 9))):
        for setup in setups:
            setup.time_all_draws()
    base, looped = (setup.row() for setup in setups)
    return [base, looped]


def measure_memory(name: HostName, target: Any, options: Options) -> Iterator[MemoryRow]:
    """Peak memory of the deepest step by length at the given anchors, and by anchors at the given length."""
    factors = (1, 2) if options.quick else (1, 2, 4)
    sizes = [(options.length * factor, options.anchors) for factor in factors]
    sizes += [] if name in UNROLLS else [(options.length, options.anchors * factor) for factor in factors[1:]]
    for length, anchors in sizes:
        setup = Setup(name, target, options, looped=True, length=length, anchors=anchors)
        setup.deepest_step()
        yield MemoryRow(name, length, anchors, peak_above_rest(setup.deepest_step, setup.device) / 2**20)


class Setup:
    """A trainer over random rows with one objective, and the times of its steps."""

    def __init__(
        self,
        name: HostName,
        target: Any,
        options: Options,
        *,
        looped: bool,
        length: int | None = None,
        anchors: int | None = None,
    ) -> None:
        host = draft(name, target)
        self.name = f"{name}, {label(name, looped)}"
        self.device = target.get_input_embeddings().weight.device
        self.objective = objective(host, target, options, name, looped, anchors or options.anchors)
        self.trainer = trainer(host, self.objective, target)
        self.batch = random_rows(options.batch_size, length or options.length, embedding(target).num_embeddings)
        self.draws = draws(self.objective)
        self.watch = Stopwatch(clock(self.device, options.clock))
        self.trainer.interval.clock = CPUClock(self.device) if options.clock == "cpu" else PartClock(self.device)
        self.times: dict[int, list[dict[str, float]]] = {draw: [] for draw in self.draws}

    def time_all_draws(self) -> None:
        """One step for each stage or length that a step can draw."""
        for draw in self.draws:
            self.times[draw].append(self._step(draw))

    def deepest_step(self) -> None:
        """One step of the last stage or the greatest length."""
        self._step(max(self.draws))

    def _step(self, draw: int) -> dict[str, float]:
        """Seconds by part."""
        scored = "stage_loss" if hasattr(self.objective, "stage_loss") else "_score"
        self.trainer.step = self.draws[draw]
        self.watch.calls.clear()
        with self.watch.watching("loss", [(self.objective, scored)]):
            self.trainer.train_step([self.batch])
        seconds = self.trainer.interval.clock.pop()
        loss = sum(end - begin for begin, end in self.watch.calls["loss"])
        return seconds | {"draft": seconds.pop("forward") - loss, "loss": loss}

    def row(self) -> Row:
        """Medians over the timed steps, means over the draws; the first two rounds warmed up."""
        parts = {
            part: {draw: 1000 * median(step[part] for step in steps[2:]) for draw, steps in self.times.items()}
            for part in PARTS
        }
        totals = {draw: 1000 * median(sum(step.values()) for step in steps[2:]) for draw, steps in self.times.items()}
        mean = fmean(totals.values())
        return Row(
            self.name,
            mean,
            totals,
            {part: fmean(values.values()) for part, values in parts.items()},
            1000 * self.batch.input_ids.numel() / mean,
        )


class CPUClock(PartClock):
    """Counts this process's own time."""

    def _stamp(self) -> float:
        return time.process_time()


def draft(name: HostName, target: Any) -> Host:
    """A random draft to train."""
    if name in MTP:
        raw = json.loads((DEMO_DRAFTS / f"{name}.json").read_text())
        raw["text_config"]["vocab_size"] = VOCABULARY
    else:
        raw = dflash_config(target)
    if name == "eagle3":
        raw = {key: value for key, value in raw.items() if key not in ("dflash_config", "block_size")}
        raw |= {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
        raw |= {"draft_vocab_size": max(32, raw["vocab_size"] // 5)}
    elif name in HEADS:
        raw["dflash_config"] |= HEADS[name]
    host = random_draft(target, raw)
    host.network.train().requires_grad_(True)
    return host


def lengths(name: HostName, looped: bool) -> tuple[int, ...]:
    """Unrolls that a step draws from."""
    unroll = UNROLLS[name]
    return (unroll, 2 * unroll, 3 * unroll) if looped else (unroll,)


def label(name: HostName, looped: bool) -> str:
    """The setting in words."""
    if name in UNROLLS:
        return f"unroll {', '.join(map(str, lengths(name, looped)))}"
    return f"K = {STAGES if looped else 0}"


def objective(host: Host, target: Any, options: Options, name: HostName, looped: bool, anchors: int) -> Objective:
    """The host's objective alone, or with loop stages or longer unrolls."""
    backend = options.attention_backend or ("flex_attention" if target.device.type == "cuda" else "sdpa")
    if name in UNROLLS:
        chosen = ObjectiveOptions(ttt_length_dist=lengths(name, looped), attention_backend=backend)
    else:
        stages = STAGES if looped else 0
        chosen = ObjectiveOptions(num_anchors=anchors, dloop_max_stage=stages, attention_backend=backend)
    return host.objective(target, chosen)


def draws(objective: Any) -> dict[int, int]:
    """A step that draws it, for every stage or length of unroll."""
    found: dict[int, int] = {}
    for step in range(LONGEST_SEARCH):
        unrolled = hasattr(objective, "lengths")
        draw = unroll_length(objective.lengths, 42, step) if unrolled else objective.draw_stage(step)
        found.setdefault(draw, step)
    return found


def trainer(host: Host, objective: Objective, target: Any) -> Trainer:
    """A trainer that steps when told to and writes nothing."""
    return Trainer(
        world=World(target.device),
        host=host,
        objective=objective,
        target=FrozenTarget(target, objective.taps),
        optimizer=MasterAdamW(objective.parameters(), max_grad_norm=1.0),
        loader=lambda epoch, start: [],
        plan=Plan(1, 1, LONGEST_SEARCH, LONGEST_SEARCH),
        settings=Settings(
            learning_rate=1e-4,
            warmup_ratio=0.0,
            log_interval=LONGEST_SEARCH,
            save_interval=LONGEST_SEARCH,
            keep_checkpoints=1,
            dtype=target.dtype,
        ),
        folder=Path(),
    )


def random_rows(rows: int, length: int, vocabulary: int) -> Batch:
    """Rows of random tokens; the first third of each is a prompt."""
    ids = torch.randint(2, vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    supervised = (torch.arange(length) >= length // 3).long().expand(rows, -1)
    return Batch(ids, torch.ones_like(ids), supervised, 0, tuple(range(rows)))


if __name__ == "__main__":
    run(main)
