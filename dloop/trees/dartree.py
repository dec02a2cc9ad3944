"""DARTree: a beam over corrected logits, pruned to a budget (magneto0124/DARTree, the variant that only prunes).

For drafts whose token distributions depend on the tokens before (DSpark, Domino): every depth keeps the `width` best
prefixes, whose parents' corrections are computed in one batch. Knows the draft as a scorer of few candidates a depth.
Nothing waits for the device before the whole supertree is read in one packed copy.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from dloop.cli import UserError
from dloop.trees.nodes import Nodes


class CandidateScorer(Protocol):
    """A draft seen from its tree. Depths count from 0; P parents, W chosen nodes, C candidates, G state size."""

    candidates_LC: Tensor
    """Token ids tried at each depth, the same below every parent, by descending base logit."""
    root_token: int

    def root_state(self) -> Tensor:
        """What the draft remembers behind the root [1, G]; G may be 0."""

    def scores(self, depth: int, parent_tokens_P: Tensor, states_PG: Tensor) -> Tensor:
        """Corrected float32 logits [P, C] of the candidates of `depth` below each parent."""

    def advance(self, depth: int, states_WG: Tensor, tokens_W: Tensor) -> Tensor:
        """States [W, G] behind `tokens_W` of `depth`, given the states of their parents."""


class Supertree(NamedTuple):
    """Everything the beam kept, depth by depth, each depth by descending path score."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    """From 1: the distance to the root, which is no node of its own."""
    path_scores: list[float]
    """Summed log-probabilities from the root, each normalised over its candidates."""


def build_dartree(scorer: CandidateScorer, *, width: int, beta: float, budget: int) -> Nodes:
    """At most `budget` nodes, chosen by path score + `beta` * depth from a beam of `width` prefixes a depth.

    Numbered depth by depth. A positive `beta` is refused: a child could then outrank its parent.
    """
    if beta > 0:
        raise UserError(
            f"--tree-beta is {beta}, but only a value of at most 0 keeps parents before their children: give 0 or less"
        )
    return prune(grow(scorer, width), beta, budget)


def grow(scorer: CandidateScorer, width: int) -> Supertree:
    """The beam: at each depth the `width` best prefixes, ties by the order of parents, then of candidates."""
    candidates_LC = scorer.candidates_LC
    parent_tokens = torch.full((1,), scorer.root_token, device=candidates_LC.device)
    states = scorer.root_state()
    paths = torch.zeros(1, device=candidates_LC.device)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    for depth, candidates_C in enumerate(candidates_LC):
        log_probs_PC = scorer.scores(depth, parent_tokens, states).log_softmax(-1)
        paths, order = (paths[:, None] + log_probs_PC).flatten().sort(stable=True, descending=True)
        paths, order = paths[:width], order[:width]
        parents, ranks = order // len(candidates_C), order % len(candidates_C)
        parent_tokens = candidates_C[ranks]
        levels.append((parents, parent_tokens, paths))
        if depth + 1 < len(candidates_LC):
            states = scorer.advance(depth, states[parents], parent_tokens)
    return _read(levels)


def _read(levels: list[tuple[Tensor, Tensor, Tensor]]) -> Supertree:
    """Bring the levels (parents counted within the level before, tokens, path scores) to the host in one copy."""
    packed = torch.stack([torch.cat(column).double() for column in zip(*levels, strict=True)])
    local_parents, tokens, path_scores = packed.cpu().numpy()
    parents: list[int] = []
    depths: list[int] = []
    first, size = -1, 1
    for depth, (level, _, _) in enumerate(levels, start=1):
        here = local_parents[len(parents) : len(parents) + len(level)]
        parents += (here.astype(int) + first).tolist()
        depths += [depth] * len(level)
        first, size = first + size, len(level)
    return Supertree(tokens.astype(int).tolist(), parents, depths, path_scores.tolist())


def prune(supertree: Supertree, beta: float, budget: int) -> Nodes:
    """The `budget` nodes of the largest path score + `beta` * depth, ties by order in the supertree, which they keep.

    With `beta` <= 0 no child outranks its parent, so what stays is a tree.
    """
    keys = [score + beta * depth for score, depth in zip(supertree.path_scores, supertree.depths, strict=True)]
    ranking = sorted(range(len(keys)), key=lambda node: -keys[node])[:budget]
    kept = sorted(ranking)
    moved = {-1: -1} | {old: new for new, old in enumerate(kept)}
    return Nodes(
        [supertree.tokens[node] for node in kept],
        [moved[supertree.parents[node]] for node in kept],
        [moved[node] for node in ranking],
    )
