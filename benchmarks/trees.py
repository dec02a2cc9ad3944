"""What a draft tree costs beside the forwards: milliseconds by part, for each block drafter and budget.

The rows of one random stage go through the real drafter, its tree is built, hung into a round's tree and masked, again
and again, and medians are shown. *Beam and rest* is everything in building that no other column counts.

    python benchmarks/trees.py
    python benchmarks/trees.py --shape wide --hosts dflash
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from probes import Stopwatch, Watched, clock
from rich.console import Console
from rich.table import Table
from steering import HEADS, dflash_config, random_draft, repeating_target

from dloop.cli import parse, run
from dloop.hosts.block import scorer
from dloop.hosts.domino import GRUScorer
from dloop.hosts.dspark import MarkovScorer
from dloop.hosts.tree_options import TreeOptions
from dloop.results.atomic import write_json
from dloop.results.provenance import environment
from dloop.training.distributed import choose_device
from dloop.trees import dartree, ddtree
from dloop.trees.draft_tree import DraftTree

SPREAD = 6.0
"""Standard deviation of the logits: the best token of a row then has a probability near one half."""
WATCHED: dict[str, list[Watched]] = {
    "candidates": [(ddtree, "best_ids"), (scorer, "best_ids")],
    "correction": [(MarkovScorer, "scores"), (GRUScorer, "scores")],
    "state": [(GRUScorer, "root_state"), (GRUScorer, "advance")],
    "search": [(ddtree, "cheapest_prefixes"), (dartree, "prune")],
}
"""Parts of building by the calls that make them up."""
PARTS = (*WATCHED, "beam and rest", "hang", "mask")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Time the building of draft trees; prints a table, and with --output writes JSON."""

    hosts: tuple[Literal["dflash", "dspark", "domino"], ...] = ("dflash", "dspark", "domino")
    """Draft families: DDTree for DFlash, DARTree for the others."""
    budgets: tuple[int, ...] = (16, 64, 256)
    """Draft nodes of a tree."""
    tree_width: int = TreeOptions().tree_width
    """DARTree's beam."""
    shape: Literal["tiny", "narrow", "wide"] = "narrow"
    """Sizes of the random target; `wide` is `narrow` with Qwen3's 151,936 tokens."""
    repeats: int = 200
    """Trees of each kind that are timed."""
    device: str | None = None
    """Default: a GPU if there is one."""
    threads: int = 1
    """CPU threads of torch."""
    output: Path | None = None
    """Folder for trees.json."""


@dataclass(frozen=True)
class Row:
    """Medians over the trees of one kind, in milliseconds; `corrections` counts the evaluations of one's head."""

    host: str
    budget: int
    nodes: int
    corrections: int
    parts_ms: dict[str, float]


@torch.inference_mode()
def main() -> None:
    """Measure and show."""
    options = parse(Options)
    torch.set_num_threads(options.threads)
    device = choose_device(options.device)
    target = repeating_target(options.shape, torch.float32, device)
    rows = [row for name in options.hosts for row in time_host(name, target, options, device)]
    show(rows)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()}
        facts = {"options": values, "env": environment(device, "float32", "default")}
        write_json(options.output / "trees.json", {**facts, "rows": [asdict(row) for row in rows]})


def time_host(name: str, target: Any, options: Options, device: torch.device) -> list[Row]:
    """One row a budget."""
    raw = dflash_config(target)
    raw["dflash_config"] |= HEADS[name]
    host = random_draft(target, raw)
    drafter: Any = host.drafter(target, TreeOptions(max(options.budgets), tree_width=options.tree_width))
    rows_TD = torch.randn(drafter.stage_length, target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    rows_TD = rows_TD.to(device)
    rows_TD *= SPREAD / drafter.head(rows_TD).std()
    chain_2T, *kept = drafter.read(rows_TD, torch.tensor([1], device=device))
    segment = drafter.segment(1, chain_2T, rows_TD, *kept)
    return [time_budget(name, segment.subtree, budget, options.repeats, device) for budget in options.budgets]


def time_budget(name: str, build: Callable[[int], Any], budget: int, repeats: int, device: torch.device) -> Row:
    """Trees of one budget; the first tenth warms up."""
    now = clock(device, "wall")
    watch = Stopwatch(now)
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    with ExitStack() as stack:
        for kind, calls in WATCHED.items():
            stack.enter_context(watch.watching(kind, calls))
        for _ in range(repeats + repeats // 10):
            watch.calls.clear()
            tree, stamps = DraftTree(1), [now()]
            nodes = build(budget)
            stamps.append(now())
            tree.graft(*nodes)
            stamps.append(now())
            tree.ancestor_mask().to(device)
            stamps.append(now())
            building, hang, mask = (after - before for before, after in pairwise(stamps))
            inside = {kind: sum(end - begin for begin, end in watch.calls.get(kind, [])) for kind in WATCHED}
            found = inside | {"beam and rest": building - sum(inside.values()), "hang": hang, "mask": mask}
            for part, seconds in found.items():
                times[part].append(seconds)
    medians = {part: 1000 * median(several[repeats // 10 :]) for part, several in times.items()}
    return Row(name, budget, len(tree) - 1, len(watch.calls.get("correction", [])), medians)


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="Milliseconds a draft tree")
    table.add_column("host", no_wrap=True)
    for heading in ("budget", "nodes", "corrections", *PARTS, "total"):
        table.add_column(heading, justify="right")
    for row in rows:
        numbers = [f"{value:.3f}" for value in (*row.parts_ms.values(), sum(row.parts_ms.values()))]
        table.add_row(row.host, str(row.budget), str(row.nodes), str(row.corrections), *numbers)
    Console(width=max(Console().width, 132)).print(table)


if __name__ == "__main__":
    run(main)
