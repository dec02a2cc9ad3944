"""The demo's corpus: conversations of eight domains, one for each benchmark, all invented by a seeded generator.

In: a seed and four sizes. Out: `benchmarks/<name>.jsonl` (evaluation prompts), `heldout.jsonl` (to judge the target),
`prompts.jsonl` (to be answered by the target: training data of the drafts) and `target_train.jsonl`. A conversation is
in one of them only, and the evaluation prompts are taken first. Knows no tokenizer and no model.

    python -m dloop.demo.corpus --output-dir D
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from dloop.cli import UserError, parse, run
from dloop.demo import problems, programs, prose
from dloop.demo.pattern import Pattern, Turns
from dloop.results.atomic import write_text

DOMAINS: dict[str, tuple[Pattern, ...]] = {
    "gsm8k": problems.WORD_PROBLEMS,
    "math500": problems.ALGEBRA,
    "aime25": problems.COUNTING,
    "humaneval": programs.COMPLETIONS,
    "mbpp": programs.FUNCTIONS,
    "livecodebench": programs.INPUT_PROGRAMS,
    "mt-bench": prose.TWO_TURNS,
    "alpaca": prose.INSTRUCTIONS,
}
"""The patterns of each domain, drawn in equal shares; the domains, too, have equal shares of every set."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write the demo's conversations and evaluation prompts."""

    output_dir: Path
    """Folder for the files."""
    benchmark_prompts: int = 8
    """Evaluation prompts a benchmark."""
    heldout: int = 192
    """Conversations that judge the target, over all domains."""
    prompts: int = 1200
    """Conversations whose questions the target answers, over all domains."""
    conversations: int = 8000
    """Conversations that train the target, over all domains."""
    seed: int = 0
    """Seed of every draw."""


@dataclass(frozen=True)
class Draw:
    """One domain's conversations, by set."""

    benchmark: list[Turns]
    heldout: list[Turns]
    prompts: list[Turns]
    training: list[Turns]


def draw(domain: str, options: Options) -> Draw:
    """Different conversations of `domain` for the four sets, the evaluation prompts first."""
    totals = (options.heldout, options.prompts, options.conversations)
    sizes = (options.benchmark_prompts, *(-(-total // len(DOMAINS)) for total in totals))
    patterns = DOMAINS[domain]
    available = len(patterns) * min(pattern.size for pattern in patterns)
    if sum(sizes) > available:
        raise UserError(
            f"{sum(sizes)} conversations of {domain} were asked for, but only {available} different ones can be "
            f"drawn in equal shares from its patterns: ask for fewer --conversations"
        )
    streams = [
        pattern.stream(random.Random(f"{options.seed}/{domain}/{number}")) for number, pattern in enumerate(patterns)
    ]
    turns = (next(stream) for stream in cycle(streams))
    return Draw(*(list(islice(turns, size)) for size in sizes))


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
"""The system prompt that `--chat-template qwen` puts before training conversations without one."""


def row(identifier: str, turns: Turns, *, system: bool) -> dict[str, Any]:
    """One line of a conversations file."""
    messages = [SYSTEM] if system else []
    messages += [
        {"role": role, "content": text}
        for pair in turns
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]
    return {"id": identifier, "conversations": messages}


def _write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    write_text(path, "".join(json.dumps(line) + "\n" for line in rows))


def write_corpus(options: Options) -> None:
    """Draw every domain and write all files into `options.output_dir`."""
    draws = {domain: draw(domain, options) for domain in DOMAINS}
    for domain, sets in draws.items():
        questions = ({"turns": [question for question, _ in turns]} for turns in sets.benchmark)
        _write(options.output_dir / "benchmarks" / f"{domain}.jsonl", questions)
    for name, kind in (("heldout", "heldout"), ("prompts", "prompts"), ("target_train", "training")):
        rows = [
            # The target meets both forms: drafts are trained behind the system prompt, evaluation has none.
            row(f"{domain}/{kind}/{number}", turns, system=kind == "training" and number % 2 == 0)
            for domain, sets in draws.items()
            for number, turns in enumerate(getattr(sets, kind))
        ]
        random.Random(f"{options.seed}/{name}").shuffle(rows)
        _write(options.output_dir / f"{name}.jsonl", rows)


def main() -> None:
    """Command line."""
    options = parse(Options)
    if min(options.benchmark_prompts, options.heldout, options.prompts, options.conversations) < 1:
        raise UserError("a set of the corpus is empty: give every size a number of 1 or more")
    write_corpus(options)


if __name__ == "__main__":
    run(main)
