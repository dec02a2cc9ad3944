"""Try a draft in the terminal: the target's answer as it comes, coloured by the stage that drafted each token.

    python -m dloop.chat --model Qwen/Qwen3-4B --draft-model z-lab/Qwen3-4B-DFlash-b16 --loop-gate -0.5
    python -m dloop.chat --model results/demo/targets/tiny --draft-model results/train/tiny/dflash/trained/final \\
        --prompt "What is 17 plus 25?"

Without `--prompt` it asks for one line after another (`/new` forgets the conversation, Ctrl-D ends). The text is the
target's own greedy answer whatever the draft; below it stand the running acceptance length and the speed beside
autoregressive decoding, measured once on the first prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isnan
from typing import TYPE_CHECKING, Literal

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    from rich.console import Console

    from dloop.decoding.loop import Round
    from dloop.decoding.session import Session

PLAIN_TOKENS = 48
"""Tokens the autoregressive rate is measured on."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Talk to a target through a draft."""

    model: str
    """Target: folder or hub repository."""
    draft_model: str
    """Draft: folder or hub repository, or `mtp` for the head inside the target. Its family is recognised."""
    prompt: str | None = None
    """Answer this and end."""
    loop_gate: float = -0.5
    """Another stage follows while the summed log-probability of the last one is above this; 1.0 never opens."""
    max_extra_stages: int | None = None
    """Cap on the additional stages of a round."""
    tree_budget: int | None = None
    """Draft nodes verified a round; 0 is the host's chain alone."""
    stage_tree_budget: int | None = None
    """Draft nodes an additional stage adds to a tree."""
    topk_k: int | None = None
    """Candidates a depth (DFlash and EAGLE-3 trees)."""
    tree_width: int | None = None
    """Nodes kept a depth (DSpark and Domino trees)."""
    tree_beta: float | None = None
    """Length bonus, at most 0 (DSpark and Domino trees)."""
    tree_depth: int | None = None
    """Depth of the tree (EAGLE-3)."""
    mtp_k: int | None = None
    """Drafts a stage (MTP)."""
    max_new_tokens: int = 512
    """New tokens an answer may have."""
    thinking: bool = False
    """Let the target think before it answers."""
    revision: str | None = None
    """Revision of the target on the hub."""
    draft_revision: str | None = None
    """Revision of the draft on the hub."""
    target_runtime: Literal["lean", "library"] = "library"
    """The library's own forward, or our lean one over the same weights (plain Qwen3 alone)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Default: bfloat16 on a GPU, float32 on a CPU."""
    device: str | None = None
    """Default: a GPU if there is one."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, or `arguments` in its place."""
    options = parse(Options, arguments)
    if options.max_new_tokens < 1:
        raise UserError(f"--max-new-tokens is {options.max_new_tokens}; it must be at least 1")
    if isnan(options.loop_gate):
        raise UserError("--loop-gate is not a number; 1.0 never opens, -inf always does")
    if options.max_extra_stages is not None and options.max_extra_stages < 0:
        raise UserError(f"--max-extra-stages is {options.max_extra_stages}; it must be at least 0")
    from rich.console import Console

    from dloop.reporting.stream import legend

    console = Console(highlight=False)
    with console.status("loading the models"):
        session = _session(options)
    console.print(legend())
    conversation: list[dict[str, str]] = []
    plain_rate: float | None = None
    for words in [options.prompt] if options.prompt is not None else _asked(console, conversation):
        conversation.append({"role": "user", "content": words})
        ids = _prompt_ids(session, conversation, options)
        if plain_rate is None:
            with console.status("measuring the autoregressive rate"):
                # The first run pays for what a new shape needs.
                plain_rate = max(_plain_rate(session, ids) for _ in range(2))
        conversation.append({"role": "assistant", "content": _answer(session, ids, console, plain_rate)})


def _session(options: Options) -> Session:
    """The evaluation's own models and settings, so that what is shown here is what would be measured there."""
    from dloop.benchmark import Options as Evaluation
    from dloop.data.benchmarks import Benchmark, Prompt
    from dloop.decoding.session import Session
    from dloop.training.distributed import join_world

    given = asdict(options)
    del given["prompt"]
    with join_world(options.device) as world:
        nothing = dict.fromkeys(("hub_id", "config", "split", "revision"))
        benchmark = Benchmark(name="chat", total_rows=1, prompts=[Prompt(0, ["Warmup"], None)], **nothing)
        return Session(Evaluation(dataset=(), warmup_runs=1, **given), world, [benchmark])


def _asked(console: Console, conversation: list[dict[str, str]]) -> Iterator[str]:
    """Lines typed by a person until the end of the input."""
    console.print("Ctrl-D ends, /new forgets the conversation", style="dim")
    while True:
        try:
            words = input("\n> ").strip()
        except EOFError:
            console.print()
            return
        if words == "/new":
            conversation.clear()
        elif words:
            yield words


def _prompt_ids(session: Session, conversation: Sequence[dict[str, str]], options: Options) -> list[int]:
    from dloop.data.chat_template import prompt_ids

    return prompt_ids(list(conversation), session.tokenizer, options.thinking)


def _plain_rate(session: Session, ids: Sequence[int]) -> float:
    """Tokens a second of autoregressive decoding on the same target."""
    from dloop.decoding.clock import OUTSIDE_DECODING, Clock
    from dloop.decoding.loop import Settings, SilentDrafter, generate

    evaluator = session.evaluator
    clock = Clock(evaluator.target.device)
    generation = generate(evaluator.target, SilentDrafter(), ids, Settings(PLAIN_TOKENS, frozenset()), clock)
    seconds = sum(value for part, value in clock.read().items() if part not in OUTSIDE_DECODING)
    return len(generation.rounds) / seconds


def _answer(session: Session, ids: Sequence[int], console: Console, plain_rate: float) -> str:
    """Stream one answer; what was said until Ctrl-C is kept."""
    from dloop.decoding.clock import Clock
    from dloop.decoding.loop import generate
    from dloop.reporting.stream import AnswerView

    evaluator, tokenizer = session.evaluator, session.tokenizer
    assert tokenizer is not None, "a session whose prompts are texts has one"
    said: list[int] = []

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)

    def watch(tokens: Sequence[int], drafted: Round | None) -> None:
        said.extend(tokens)
        view(tokens, None if drafted is None else drafted.stage_accepted)

    clock = Clock(evaluator.target.device)
    with AnswerView(console, decode, session.stops, plain_rate) as view, suppress(KeyboardInterrupt):
        generate(evaluator.target, evaluator.drafter, ids, evaluator.settings, clock, watch)
    return decode(said)


if __name__ == "__main__":
    run(main)
