"""The method: draft, draft again while the gate is open, verify everything at once, keep what the target agrees with.

Lossless by construction: only tokens the target chose itself are ever emitted, either because a draft equals the
target's choice behind its parent or because it is that choice. Neither the drafter nor the gate can change the output,
only how many tokens a verification yields. Autoregressive decoding is this same loop with a drafter that is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.target import Target
from dloop.hosts.host import Drafter, Segment
from dloop.trees.draft_tree import DraftTree


@dataclass(frozen=True)
class Round:
    """One verification. `acceptance_length` counts the accepted drafts and the target's own token behind them.

    A stage adds `stage_rows` nodes to the tree, of which `stage_accepted` are kept.
    """

    acceptance_length: int
    verified_tokens: int
    segments: tuple[Segment, ...]
    stage_rows: tuple[int, ...]
    stage_accepted: tuple[int, ...]


@dataclass(frozen=True)
class Generation:
    """One response. `output_ids` are the new tokens, cut at the limit and behind the first stop token."""

    output_ids: list[int]
    rounds: list[Round]
    finish: str


@dataclass(frozen=True)
class Settings:
    """What a run decides about decoding. Budgets are draft nodes a stage adds, 0 for its chain alone."""

    max_new_tokens: int
    stop_ids: frozenset[int]
    gate: Gate = Gate()
    tree_budget: int = 0
    stage_tree_budget: int = 0


Watch = Callable[[Sequence[int], Round | None], None]
"""Sees the tokens a round emitted, uncut; the first call holds the prefill's token and no round."""


def ignore(tokens: Sequence[int], drafted: Round | None) -> None:
    """Nobody watches."""


@torch.inference_mode()
def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Sequence[int],
    settings: Settings,
    clock: Clock,
    watch: Watch = ignore,
) -> Generation:
    """Greedy continuation of `prompt_ids`, batch 1; `watch` sees every round's tokens as they come."""
    target.reset(len(prompt_ids) + settings.max_new_tokens + 2 * drafter.stage_length + 1)
    drafter.reset(len(prompt_ids) + settings.max_new_tokens)
    clock.start()
    root, features = target.prefill(prompt_ids)
    clock.mark("prefill")
    tokens = [root]
    fresh = [*prompt_ids[1:], root]
    rounds: list[Round] = []
    watch([root], None)
    first_draft = "draft_prefill"
    while len(tokens) <= settings.max_new_tokens and not _stopped(tokens, rounds, settings.stop_ids):
        tree = DraftTree(root)
        drafter.begin(features, fresh)
        segments = [drafter.first_stage()]
        clock.mark(first_draft)
        first_draft = "draft"
        wanted = settings.max_new_tokens - len(tokens) + 1
        while settings.gate.opens(segments[-1], tree, len(segments) - 1, wanted, settings.stop_ids):
            tree.graft(*segments[-1].subtree(_budget(settings, len(segments)), whole_chain=True))
            tree.move_anchor(segments[-1].chain)
            clock.mark("gate")
            segments.append(drafter.next_stage())
            clock.mark("draft")
        tree.graft(*segments[-1].subtree(_budget(settings, len(segments))))
        clock.mark("tree_build")
        choices = target.verify(tree)
        clock.mark("verify")
        path = tree.longest_accepted(choices)
        features = target.commit(path)
        drafter.end()
        root = choices[path[-1]]
        fresh = [*(tree.tokens[node] for node in path[1:]), root]
        tokens += fresh
        rounds.append(_record(tree, path, segments))
        clock.mark("commit")
        watch(fresh, rounds[-1])
    return _finish(tokens, rounds, settings)


def _record(tree: DraftTree, path: list[int], segments: list[Segment]) -> Round:
    # A segment that can grow a tree holds its stage's logits; kept for a whole response they would fill the device.
    numbers = tuple(segment.record() for segment in segments)
    return Round(len(path), len(tree), numbers, tuple(tree.stage_rows), tuple(tree.accepted_by_stage(path)))


def _budget(settings: Settings, stage: int) -> int:
    return settings.tree_budget if stage == 1 else settings.stage_tree_budget


def _stopped(tokens: list[int], rounds: list[Round], stops: Collection[int]) -> bool:
    """Whether the newest tokens hold a stop token: those of the last round, or the one from the prefill."""
    newest = rounds[-1].acceptance_length if rounds else 1
    return any(token in stops for token in tokens[-newest:])


def _finish(tokens: list[int], rounds: list[Round], settings: Settings) -> Generation:
    kept = tokens[: settings.max_new_tokens]
    stop = next((place for place, token in enumerate(kept) if token in settings.stop_ids), None)
    if stop is None:
        return Generation(kept, rounds, "length")
    return Generation(kept[: stop + 1], rounds, "stop")


class SilentDrafter:
    """Proposes nothing: with it the loop is plain autoregressive decoding, one token a verification."""

    stage_length = 0

    def reset(self, capacity: int) -> None:
        """Nothing to forget."""

    def begin(self, features: torch.Tensor, tokens: Sequence[int]) -> None:
        """Nothing to listen to."""

    def first_stage(self) -> Segment:
        """An empty segment."""
        return Segment([], [])

    def next_stage(self) -> Segment:
        """An empty segment."""
        return Segment([], [])

    def end(self) -> None:
        """Nothing to drop."""
