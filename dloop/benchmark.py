"""Measure one method on benchmarks: the autoregressive baseline, or a target with a draft.

One process, or one a GPU through torchrun; greedy, batch 1. Every response and every round goes into the result file;
tables are made from these files alone (`python -m dloop.tables`).

    python -m dloop.benchmark --model Qwen/Qwen3-4B --baseline --dataset gsm8k --output results/base.json
    python -m dloop.benchmark --model Qwen/Qwen3-4B --draft-model z-lab/Qwen3-4B-DFlash-b16 --loop-gate -0.5 \\
        --dataset gsm8k --baseline-result results/base.json --output results/dloop.json
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    from dloop.results.record import Result
    from dloop.training.distributed import World


@dataclass(frozen=True, kw_only=True)
class Options:
    """Evaluate a target, alone or with a draft, on benchmarks; one JSON result a benchmark."""

    model: str
    """Target: folder or hub repository."""
    dataset: tuple[str, ...]
    """Benchmark names (gsm8k math500 aime25 humaneval mbpp livecodebench mt-bench alpaca) or JSONL files whose rows
    hold `turns` or `prompt_ids`."""
    draft_model: str | None = None
    """Draft: folder or hub repository. Its family is recognised from its files. `mtp`: the multi-token-prediction head
    inside the target's own checkpoint (Qwen3.5)."""
    baseline: bool = False
    """Measure autoregressive decoding instead of a draft."""
    output: tuple[Path, ...] = ()
    """One file a benchmark, in the same order; without it results/<target>/<benchmark>/<setting>.json."""
    loop_gate: float = 1.0
    """Another stage follows while the summed log-probability of the last one is above this; 1.0 never opens."""
    max_extra_stages: int | None = None
    """Cap on the additional stages of a round."""
    tree_budget: int | None = None
    """Draft nodes verified a round; 0 is the host's chain alone. Default: as the host is released, which is a tree of
    60 for EAGLE-3, whose number counts the root, and a chain for the others."""
    stage_tree_budget: int | None = None
    """Draft nodes an additional stage adds to a tree; 0 is its chain alone. Default: 64 for DFlash, 48 for
    EAGLE-3, else 0."""
    topk_k: int | None = None
    """DFlash tree: most candidates a depth; default: no cap. EAGLE-3 tree: prefixes a level expands, and tokens tried
    behind each; default: 10."""
    tree_width: int | None = None
    """DSpark and Domino tree: nodes kept a depth; default: 12."""
    tree_beta: float | None = None
    """DSpark and Domino tree: length bonus, at most 0; default: -0.2."""
    tree_depth: int | None = None
    """EAGLE-3: levels drafted behind the first; default: 7, so that chains have 8 tokens."""
    mtp_k: int | None = None
    """Multi-token prediction: tokens a stage drafts. Default: 3 for Qwen3.5's head, 6 for Gemma 4's assistant."""
    max_new_tokens: int = 2048
    """New tokens a response may have."""
    max_samples: int | None = None
    """Prompts a benchmark; default: the paper's number."""
    stop_token_ids: str | None = None
    """Ids joined by commas, or `none`; default: those of the tokenizer and the generation configuration."""
    baseline_result: tuple[Path, ...] = ()
    """Stored baselines, one a benchmark: fills the lossless audit and the speedup."""
    require_lossless: bool = False
    """Fail when a response differs from the baseline's (meant for float32)."""
    thinking: bool = False
    """Let the target think before it answers."""
    mtbench_history: Literal["own", "baseline"] = "own"
    """Whose first answer later turns see."""
    revision: str | None = None
    """Revision of the target on the hub."""
    draft_revision: str | None = None
    """Revision of the draft on the hub."""
    target_runtime: Literal["lean", "library"] = "library"
    """What computes the target: the library's forward, or a faster one of plain Qwen3 over the same weights."""
    runtime: Literal["eager", "graphs"] = "eager"
    """`graphs`: verifications and stages of block drafts over static shapes, replayed as CUDA graphs on a GPU (not yet
    run on one). Needs --target-runtime lean, for the baseline too."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Default: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """Default: a GPU if there is one."""
    expect_device: str | None = None
    """Slug such as h100-80gb: fail when the device found is another one."""
    warmup_runs: int = 3
    """Unmeasured runs before the first prompt."""
    seed: int = 0
    """Seed of every generator."""
    overwrite: bool = False
    """Measure again although the output exists."""

    def recorded(self) -> dict[str, Any]:
        """The options as they stand in a result: plain JSON values, stop ids as a list."""
        values = asdict(self)
        for name in ("output", "baseline_result", "dataset"):
            values[name] = [str(entry) for entry in values[name]]
        stops = self.given_stops()
        return values | {"stop_token_ids": stops if stops is None else sorted(stops)}

    def given_stops(self) -> frozenset[int] | None:
        """`--stop-token-ids` as a set; None when it was left out."""
        if self.stop_token_ids is None:
            return None
        if self.stop_token_ids.strip().lower() == "none":
            return frozenset()
        try:
            return frozenset(int(part) for part in self.stop_token_ids.split(","))
        except ValueError:
            raise UserError(
                f"--stop-token-ids is {self.stop_token_ids!r}; write ids joined by commas, or none"
            ) from None


_TREE = ("tree_budget", "stage_tree_budget", "topk_k", "tree_width", "tree_beta", "tree_depth", "mtp_k")
DRAFTING = ("loop_gate", "max_extra_stages", *_TREE)
"""Options that only a draft has use for."""
_RESOLVED_LATER = {"dtype", "stop_token_ids", *_TREE}
"""Options that stand resolved in a result although the command line may leave them open."""
_NOT_COMPARED = {
    "output",
    "overwrite",
    "baseline_result",
    "require_lossless",
    "expect_device",
    "device",
    "dataset",
}
"""Options that change no number of a result."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, or `arguments` in its place."""
    options = parse(Options, arguments)
    _check(options)
    outputs = options.output or tuple(_default_output(options, name) for name in options.dataset)
    _check_outputs(outputs, options)
    pending = [
        place for place in range(len(outputs)) if options.overwrite or not _already_there(outputs, place, options)
    ]
    if not pending:
        return
    baselines = [_read_baseline(options, place) for place in pending]

    from dloop.data.benchmarks import load_benchmark
    from dloop.decoding.session import Session
    from dloop.training.distributed import join_world

    with join_world(options.device) as world:
        _check_device(options, world)
        with world.one_a_node_first():
            benchmarks = [load_benchmark(options.dataset[place], max_samples=options.max_samples) for place in pending]
        session = Session(options, world, benchmarks)
        for place, benchmark, baseline in zip(pending, benchmarks, baselines, strict=True):
            result = session.measure(benchmark, baseline, options.baseline_result[place : place + 1])
            if world.is_main and result is not None:
                _finish(outputs[place], result, options)


def _check(options: Options) -> None:
    options.given_stops()
    if options.baseline == (options.draft_model is not None):
        raise UserError("give exactly one of --baseline and --draft-model")
    defaults = {field.name: field.default for field in fields(Options)}
    drafting = [name for name in DRAFTING if getattr(options, name) != defaults[name]]
    if options.baseline and drafting:
        raise UserError(f"--{drafting[0].replace('_', '-')} has no effect on --baseline; leave it out")
    if options.runtime == "graphs" and options.target_runtime != "lean":
        raise UserError("--runtime graphs captures our own forward of the target; add --target-runtime lean")
    for flag, given in (("--output", options.output), ("--baseline-result", options.baseline_result)):
        if given and len(given) != len(options.dataset):
            raise UserError(f"{flag} names {len(given)} files for {len(options.dataset)} benchmarks; give one for each")
    if math.isnan(options.loop_gate):
        raise UserError("--loop-gate is not a number; 1.0 never opens, -inf always does")
    for flag, count in (("--max-new-tokens", options.max_new_tokens), ("--max-samples", options.max_samples)):
        if count is not None and count < 1:
            raise UserError(f"{flag} is {count}; it must be at least 1")
    if not options.dataset:
        raise UserError("--dataset names no benchmark; give at least one")
    for flag, least in (("max_extra_stages", 0), ("warmup_runs", 0), ("seed", 0)):
        given = getattr(options, flag)
        if given is not None and given < least:
            raise UserError(f"--{flag.replace('_', '-')} is {given}; it must be at least {least}")
    if options.seed >= 1 << 32:
        raise UserError(f"--seed is {options.seed}; it must be below 2**32")
    wants_baseline = options.require_lossless or options.mtbench_history == "baseline"
    if wants_baseline and not options.baseline_result:
        raise UserError("--require-lossless and --mtbench-history baseline compare with --baseline-result; give it")


def _default_output(options: Options, dataset: str) -> Path:
    def slug(text: str) -> str:
        return "".join("_" if letter in "/: " else letter for letter in text)

    setting = "baseline"
    if options.draft_model:
        marks = {"gate": options.loop_gate if options.loop_gate != 1.0 else None, "tb": options.tree_budget}
        marks |= {"stb": options.stage_tree_budget, "k": options.topk_k}
        marks |= {"w": options.tree_width, "beta": options.tree_beta, "d": options.tree_depth}
        marks |= {"mtp": options.mtp_k}
        setting = slug(options.draft_model) + "".join(
            f"__{mark}{value:g}" for mark, value in marks.items() if value is not None
        )
    return Path("results", slug(options.model), Path(dataset).stem, f"{setting}.json")


def _check_outputs(outputs: Sequence[Path], options: Options) -> None:
    """Refuse before anything is measured what could not be written, or would be written over, afterwards."""
    for place, path in enumerate(outputs):
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise UserError(f"--output {path} cannot be written: it is a folder, or its folder cannot be written to")
        if path in outputs[:place] or path in options.baseline_result:
            raise UserError(f"{path} would hold two results; give every benchmark an --output of its own")


def _already_there(outputs: Sequence[Path], place: int, options: Options) -> bool:
    path, dataset = outputs[place], Path(options.dataset[place])
    if not path.exists():
        return False
    from dloop.results.record import read_result

    result = read_result(path)
    # Results from before there was a choice are eager ones.
    stored, asked = {"runtime": "eager"} | result.config, options.recorded()
    for name in asked.keys() - _NOT_COMPARED:
        left_open = asked[name] is None and name in _RESOLVED_LATER
        if not left_open and stored.get(name) != asked[name]:
            raise UserError(
                f"{path} exists and was measured with {name} = {stored.get(name)!r}, not {asked[name]!r}; "
                "choose another --output or pass --overwrite"
            )
    name, revision = str(dataset), result.dataset.revision
    if dataset.is_file():
        name, revision = dataset.stem, f"sha256:{hashlib.sha256(dataset.read_bytes()).hexdigest()}"
    if (result.dataset.name, result.dataset.revision) != (name, revision):
        raise UserError(
            f"{path} exists and was measured on other prompts than those of {dataset} now; "
            "choose another --output or pass --overwrite"
        )
    _demand_lossless(path, result.summary, options)
    print(f"{path} exists; --overwrite measures it again")
    return True


def _read_baseline(options: Options, place: int) -> Result | None:
    if not options.baseline_result:
        return None
    from dloop.results.record import read_result

    return read_result(options.baseline_result[place])


def _check_device(options: Options, world: World) -> None:
    from dloop.results.provenance import device_name

    name = device_name(world.device)
    if options.expect_device and not all(word in name.lower() for word in options.expect_device.split("-")):
        raise UserError(
            f"this device is {name!r}, --expect-device is {options.expect_device!r}; "
            "speedups are only compared within one kind of device, so run on that one or correct the slug"
        )


def _finish(path: Path, result: Result, options: Options) -> None:
    """Write the result and say in one line what it shows."""
    from dloop.results.record import write_result

    write_result(path, result)
    summary = result.summary
    shown = [f"{result.dataset.name}: {summary['num_responses']} responses, {summary['tokens']} tokens"]
    if summary["throughput"]:
        shown.append(f"{summary['throughput']:.1f} tokens/s")
    if result.kind == "speculative" and summary["tau"]:
        shown.append(f"acceptance length {summary['tau']:.2f}")
    if summary["speedup"]:
        shown.append(f"speedup {summary['speedup']:.2f}x")
    if summary["identical_to_baseline"] is not None:
        shown.append(f"{summary['identical_to_baseline']}/{summary['num_responses']} identical to the baseline")
    print(", ".join(shown), "->", path)
    _demand_lossless(path, summary, options)


def _demand_lossless(path: Path, summary: dict[str, Any], options: Options) -> None:
    if options.require_lossless and summary["identical_to_baseline"] != summary["num_responses"]:
        raise UserError(
            f"{path}: only {summary['identical_to_baseline']} of {summary['num_responses']} responses equal the "
            "baseline's although --require-lossless was given; see first_divergence and divergence_margin there"
        )


if __name__ == "__main__":
    run(main)
