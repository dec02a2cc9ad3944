"""Time a target and a draft once: verifications by rows, drafting stages.

Measured wall-clock speedups of small runs are noisy. With acceptance lengths, which are not, these few times give a
modelled speedup beside the measured one (`python -m dloop.tables --cost-table`).

    python -m dloop.cost_table --model Qwen/Qwen3-4B --draft-model z-lab/Qwen3-4B-DFlash-b16 --output costs.json
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dloop.cli import CommaInts, UserError, parse, run

if TYPE_CHECKING:
    from dloop.decoding.target import Target
    from dloop.hosts.host import Drafter

WARM_UPS = 3


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time verifications and drafting stages behind a context; medians go into a small JSON file."""

    model: str
    """Target: folder or hub repository."""
    draft_model: str
    """Draft: folder or hub repository; `mtp`: the head inside the target's checkpoint."""
    revision: str | None = None
    """Revision of the target on the hub."""
    draft_revision: str | None = None
    """Revision of the draft on the hub."""
    output: Path
    """File to write."""
    rows: CommaInts = (1, 2, 4, 8, 15, 16, 22, 29, 31, 46, 61)
    """Rows of a verification to time; 1 is an autoregressive step."""
    context: int = 256
    """Cached tokens before the timed forward."""
    target_runtime: Literal["lean", "library"] = "library"
    """What computes the target, as in `dloop.benchmark`."""
    repeats: int = 30
    """Timings a median is taken of."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Default: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """Default: a GPU if there is one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, or `arguments` in its place."""
    options = parse(Options, arguments)
    if min(*options.rows, options.context, options.repeats, len(set(options.rows)) - 1) < 1 or 1 not in options.rows:
        raise UserError("--rows needs 1 and another number above it; --context and --repeats must be at least 1")
    import torch
    from tqdm import tqdm

    from dloop.decoding.session import ATTENTION
    from dloop.decoding.target import Target
    from dloop.hosts.registry import INSIDE_TARGET, load_host
    from dloop.hosts.target_model import DTYPES, load_target
    from dloop.results.atomic import write_json
    from dloop.results.provenance import environment
    from dloop.training.distributed import choose_device

    device = choose_device(options.device)
    dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    model = load_target(options.model, dtype=DTYPES[dtype], device=device, revision=options.revision, attn=ATTENTION)
    inside = options.draft_model == INSIDE_TARGET
    source, revision = (options.model, options.revision) if inside else (options.draft_model, options.draft_revision)
    host = load_host(source, dtype=DTYPES[dtype], device=device, revision=revision)
    host.check_target(model)
    target = Target(model, host.taps, options.target_runtime)
    with torch.inference_mode():
        rows = tqdm(options.rows, desc="verification rows", leave=False)
        verify = {str(count): verify_seconds(target, count, options) for count in rows}
        draft = draft_seconds(target, host.drafter(model, cache=target.cache), options)
    write_json(
        options.output,
        {
            "model": options.model,
            "host": host.name,
            "verify_seconds": verify,
            "draft_stage_seconds": draft,
            "options": {key: str(value) for key, value in asdict(options).items()},
            "env": environment(device, dtype, ATTENTION),
        },
    )
    shown = ", ".join(f"{count} rows {seconds * 1e3:.2f} ms" for count, seconds in verify.items())
    print(f"verify: {shown}; stage: {draft['first'] * 1e3:.2f} ms -> {options.output}")


def verify_seconds(target: Target, rows: int, options: Options) -> float:
    """Median seconds of one verification of a chain of `rows` rows behind the context."""
    from dloop.trees.draft_tree import DraftTree

    target.reset(options.context + rows)
    target.prefill(_context(options))
    tree = DraftTree(0)
    tree.graft([1] * (rows - 1), range(-1, rows - 2))
    seconds = []
    for _ in range(WARM_UPS + options.repeats):
        seconds.append(_seconds(lambda: target.verify(tree), target.device))
        target.commit([0])
    return statistics.median(seconds[WARM_UPS:])


def draft_seconds(target: Target, drafter: Drafter, options: Options) -> dict[str, float]:
    """Median seconds of a first stage over a few fresh features, and of a loop stage behind it."""
    target.reset(options.context)
    drafter.reset(2 * options.context)
    root, features = target.prefill(_context(options))
    tokens = [*_context(options)[1:], root]
    drafter.begin(features, tokens)
    drafter.first_stage()
    drafter.end()

    def first_stage() -> None:
        drafter.begin(features[:4], tokens[:4])
        drafter.first_stage()

    first: list[float] = []
    following: list[float] = []
    for _ in range(options.repeats):
        first.append(_seconds(first_stage, target.device))
        following.append(_seconds(drafter.next_stage, target.device))
        drafter.end()
    return {"first": statistics.median(first), "next": statistics.median(following)}


def _context(options: Options) -> list[int]:
    return [1 + place % 7 for place in range(options.context)]


def _seconds(call: Callable[[], Any], device: Any) -> float:
    from dloop.decoding.clock import Clock

    clock = Clock(device)
    clock.start()
    call()
    clock.mark("call")
    return clock.read()["call"]


if __name__ == "__main__":
    run(main)
