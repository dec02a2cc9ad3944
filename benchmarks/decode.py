"""Decoding speed, side by side in one process: transformers' own loops and ours.

Every decoder answers the same prompt in turn (A B C ... A B C ...) and medians over the repeats are compared. By
default target and draft are random and acceptance is steered (`steering.py`), the same for all; with `--model` and
`--draft-model` they are real and acceptance is theirs.

    python benchmarks/decode.py --quick
    python benchmarks/decode.py --output results/benchmarks
    python benchmarks/decode.py --model Qwen/Qwen3-4B --draft-model z-lab/Qwen3-4B-DFlash-b16 --device cuda
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from peers import Peer, Run, library_assisted, library_dflash, library_draft, library_greedy, ours
from probes import Now, OperatorCount, Stopwatch, clock
from report import Group, Row, show, write
from steering import Steering, random_draft, repeating_target

from dloop.cli import UserError, parse, run
from dloop.hosts.host import Host
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import DTYPES, load_target
from dloop.training.distributed import choose_device


@dataclass(frozen=True, kw_only=True)
class Options:
    """Compare decoding loops; prints a table, and with --output writes JSON and a plot."""

    quick: bool = False
    """Fewer tokens and repeats: under five minutes on two cores."""
    model: str | None = None
    """Target: folder or hub repository. Default: a random one that repeats a token."""
    draft_model: str | None = None
    """A DFlash draft of that target."""
    shape: Literal["tiny", "narrow", "qwen3-4b"] | None = None
    """Sizes of the random target. Default: qwen3-4b on a GPU, else narrow."""
    gemma: Path | None = Path("tests/golden/mtp_gemma4")
    """Folder with a Gemma 4 `target` and its `assistant`, compared in a table of its own; `None` leaves it out."""
    tau: float = 6.4
    """Acceptance length that a random draft is steered to (that of Qwen3-8B with DFlash on GSM8K)."""
    gate: float = -0.5
    """Gate of the looped decoders."""
    tree_budget: int = 64
    """Draft nodes of the tree decoders."""
    prompt_length: int = 64
    """Tokens of the prompt."""
    tokens: int | None = None
    """New tokens of a response. Default: 256, quick 96."""
    repeats: int | None = None
    """Responses of each decoder that are timed, and once more as many that are looked into. Default: 9, quick 3."""
    target_runtime: Literal["lean", "library"] = "lean"
    """What runs the target in our decoders."""
    runtime: Literal["eager", "graphs"] = "eager"
    """As in `dloop.benchmark`, for our decoders, autoregressive included."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Default: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """Default: a GPU if there is one."""
    threads: int = 1
    """CPU threads of torch."""
    clock: Literal["wall", "cpu"] = "wall"
    """`cpu` counts this process's own time, for a machine that is busy otherwise."""
    output: Path | None = None
    """Folder for decode.json and decode.png."""


def main() -> None:
    """Measure and show."""
    options = parse(Options)
    if (options.model is None) != (options.draft_model is None):
        raise UserError("give --model and --draft-model together, or neither")
    if options.runtime == "graphs" and options.target_runtime != "lean":
        raise UserError("--runtime graphs captures our own forward of the target; leave --target-runtime at lean")
    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    groups = [measure(line_up(options, device), options, device)]
    if options.gemma is not None:
        groups.append(measure(line_up_gemma(options, options.gemma, device), options, device))
    for group in groups:
        show(group)
    if options.output is not None:
        write(options.output, groups, asdict(options), device)


@dataclass(frozen=True)
class LineUp:
    """Decoders of one target; `restart` is called before every response."""

    title: str
    peers: list[Peer]
    restart: Callable[[], None] = lambda: None


def measure(line_up: LineUp, options: Options, device: torch.device) -> Group:
    """Warm up, time, look inside."""
    tokens = options.tokens or (96 if options.quick else 256)
    repeats = options.repeats or (3 if options.quick else 9)
    now = clock(device, options.clock)
    compare_ids(line_up, tokens)
    return Group(line_up.title, look_into(line_up, tokens, repeats, now, time_responses(line_up, tokens, repeats, now)))


def line_up(options: Options, device: torch.device) -> LineUp:
    """All decoders over one Qwen3 target and one DFlash draft."""
    dtype = precision(options, device)
    steering = None
    if options.model and options.draft_model:
        model = load_target(options.model, dtype=dtype, device=device)
        host: Host = load_host(options.draft_model, dtype=dtype, device=device)
        host.network.eval().requires_grad_(False)
    else:
        model = repeating_target(options.shape or ("qwen3-4b" if device.type == "cuda" else "narrow"), dtype, device)
        host = random_draft(model)
        steering = Steering(options.tau, model.config.hidden_size, dtype, device)
    if host.name != "dflash":
        raise UserError(f"{options.draft_model} is a {host.name} draft; only DFlash has a decoder in transformers")
    theirs = library_draft(host)
    if steering:
        for network in (host.network, theirs):
            network.norm.register_forward_hook(steering)
        theirs.register_forward_pre_hook(steering.advance)
    prompt = prompt_of(options, model.config.vocab_size)
    runtime = "graphs" if options.runtime == "graphs" else options.target_runtime
    mode = (model, host, prompt, runtime, steering.advance if steering else None)
    peers = [
        library_greedy(model, prompt),
        ours("ours, autoregressive", model, None, prompt, runtime, against="transformers generate"),
        library_dflash(model, theirs, prompt),
        ours("ours, DFlash", *mode, against="transformers DFlash"),
        ours("ours, DFlash + DLoop", *mode, options.gate, against="transformers DFlash"),
        ours("ours, DDTree", *mode, tree_budget=options.tree_budget, against="transformers DFlash"),
        ours(
            "ours, DDTree + DLoop",
            *mode,
            options.gate,
            options.tree_budget,
            options.tree_budget // 4,
            against="transformers DFlash",
        ),
    ]
    title = f"{options.model or 'random Qwen3'}, our target by the {runtime} runtime"
    return LineUp(title, peers, steering.restart) if steering else LineUp(title, peers)


def line_up_gemma(options: Options, folder: Path, device: torch.device) -> LineUp:
    """All decoders over a Gemma 4 target and its assistant, whose acceptance is their own."""
    dtype = precision(options, device)
    model = load_target(str(folder / "target"), dtype=dtype, device=device)
    host = load_host(str(folder / "assistant"), dtype=dtype, device=device)
    assistant = load_target(str(folder / "assistant"), dtype=dtype, device=device)
    prompt = prompt_of(options, model.config.get_text_config().vocab_size)
    assisted = "transformers assisted"
    peers = [
        library_greedy(model, prompt),
        ours("ours, autoregressive", model, None, prompt, "library", against="transformers generate"),
        library_assisted(model, assistant, prompt),
        ours("ours, assistant", model, host, prompt, "library", against=assisted),
        ours("ours, assistant + DLoop", model, host, prompt, "library", gate=options.gate, against=assisted),
    ]
    return LineUp(f"Gemma 4 of {folder}, the target by the library runtime", peers)


def precision(options: Options, device: torch.device) -> torch.dtype:
    """What `--dtype` says, or what fits the device."""
    return DTYPES[options.dtype or ("bfloat16" if device.type == "cuda" else "float32")]


def prompt_of(options: Options, vocabulary: int) -> list[int]:
    """Ids that mean nothing."""
    return [1 + (place * 37) % (vocabulary - 1) for place in range(options.prompt_length)]


def compare_ids(line_up: LineUp, tokens: int) -> None:
    """One unmeasured response of each; says so when decoders disagree."""
    answers = {}
    for peer in line_up.peers:
        line_up.restart()
        answers[peer.name] = peer.answer(tokens).ids
    first = line_up.peers[0].name
    for name, ids in answers.items():
        if ids != answers[first]:
            print(f"note: {name} says something else than {first}; in 16 bits near-ties do that")


def time_responses(line_up: LineUp, tokens: int, repeats: int, now: Now) -> dict[str, float]:
    """Median seconds of a whole response, prompt included, by decoder."""
    seconds: dict[str, list[float]] = {peer.name: [] for peer in line_up.peers}
    for _ in range(repeats):
        for peer in line_up.peers:
            line_up.restart()
            begin = now()
            peer.answer(tokens)
            seconds[peer.name].append(now() - begin)
    return {name: statistics.median(several) for name, several in seconds.items()}


def look_into(line_up: LineUp, tokens: int, repeats: int, now: Now, seconds: dict[str, float]) -> list[Row]:
    """The table's rows: `repeats` more responses with the networks' calls timed, two with operators counted."""
    looks: dict[str, list[tuple[float, float, float]]] = {peer.name: [] for peer in line_up.peers}
    runs: dict[str, Run] = {}
    for _ in range(repeats):
        for peer in line_up.peers:
            line_up.restart()
            runs[peer.name], look = look_once(peer, tokens, now)
            looks[peer.name].append(look)
    rows: list[Row] = []
    for peer in line_up.peers:
        answer = runs[peer.name]
        total, target, draft = (statistics.median(part) for part in zip(*looks[peer.name], strict=True))
        rows.append(
            Row(
                name=peer.name,
                against=peer.against,
                tokens_per_second=tokens / seconds[peer.name],
                tau=answer.accepted / answer.rounds,
                verified=answer.verified / answer.rounds,
                extra_stages=answer.extra_stages / answer.rounds,
                round_ms=total * 1e3,
                target_ms=target * 1e3,
                draft_ms=draft * 1e3,
                operators=operators(peer, line_up.restart, tokens),
                parts_ms={part: value / answer.rounds * 1e3 for part, value in answer.parts.items()},
            )
        )
    return rows


def look_once(peer: Peer, tokens: int, now: Now) -> tuple[Run, tuple[float, float, float]]:
    """Seconds a round behind the prompt: in all, in the target, in the draft."""
    watch = Stopwatch(now)
    with ExitStack() as stack:
        stack.enter_context(watch.watching("draft", peer.drafts))
        stack.enter_context(watch.watching("target", peer.targets))
        answer = peer.answer(tokens)
    end = now()
    prefill, *steps = watch.calls["target"]
    inside = [sum(last - first for first, last in calls) for calls in (steps, watch.calls.get("draft", []))]
    return answer, ((end - prefill[1]) / answer.rounds, inside[0] / answer.rounds, inside[1] / answer.rounds)


def operators(peer: Peer, restart: Callable[[], None], tokens: int) -> float:
    """Operators a round, from a whole response and the shortest one, so that the prompt's drop out."""
    counts = []
    for length in (tokens, 1):
        restart()
        with OperatorCount() as counter:
            answer = peer.answer(length)
        counts.append((counter.count, answer.rounds))
    (more, rounds), (fewer, earlier) = counts
    return (more - fewer) / (rounds - earlier)


if __name__ == "__main__":
    run(main)
