"""EAGLE's dynamic tree: a beam over a draft that goes token by token, re-ranked over all its levels.

Every level expands the `width` best prefixes of the one before by their `width` best tokens; the tree is made of the
best entries of all levels together (SafeAILab/EAGLE). Knows the draft as two functions from chosen entries to logits.
Nothing waits for the device before all entries are read in one packed copy.

Shape letters: P prefixes expanded at once (1 at the root, then K), K width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dloop.trees.best_ids import best_ids
from dloop.trees.nodes import Nodes


class StepwiseDraft(Protocol):
    """A draft seen from its tree."""

    def root_logits(self) -> Tensor:
        """Float32 logits [1, V] behind the root."""

    def advance(self, parents_K: Tensor, ids_K: Tensor) -> Tensor:
        """Float32 logits [K, V] behind new tokens, whose parents are rows of the last call (the root for the first)."""


class Expansion(NamedTuple):
    """All entries of a beam, level by level; within a level by parent, then by rank."""

    ids: list[int]
    """Token ids in the draft's vocabulary."""
    scores: list[float]
    """Summed log-probabilities from the root."""
    parents: list[int]
    """Entry of the parent, -1 for the root."""
    width: int

    def chain(self) -> list[int]:
        """Entries of the greedy chain: the best first token, then best child after best child.

        It ends where its last entry was not expanded, because `width` better prefixes were.
        """
        first_child = dict(zip(reversed(self.parents), range(len(self.parents) - 1, -1, -1), strict=True))
        chain = [first_child[-1]]
        while (child := first_child.get(chain[-1])) is not None:
            chain.append(child)
        return chain

    def row(self, entry: int) -> int:
        """At which place an entry's parent was expanded, counted over all calls of `advance`."""
        return entry // self.width - 1


def expand(draft: StepwiseDraft, width: int, depth: int) -> Expansion:
    """The beam of `depth` + 1 levels: `depth` expansions behind the one of the root. Ties go to the earlier entry."""
    logits_PV = draft.root_logits()
    width = min(width, logits_PV.shape[-1])
    score_P = logits_PV.new_zeros(1)
    entry_P = torch.full((1,), -1, device=logits_PV.device)
    levels: list[tuple[Tensor, Tensor, Tensor]] = []
    entries = 0
    for level in range(depth + 1):
        ids_PK = best_ids(logits_PV, width)
        log_probs_PK = logits_PV.gather(-1, ids_PK) - logits_PV.logsumexp(-1, keepdim=True)
        ids, scores = ids_PK.flatten(), (score_P[:, None] + log_probs_PK).flatten()
        levels.append((ids, scores, entry_P.repeat_interleave(width)))
        if level == depth:
            break
        chosen_K = best_ids(scores[None], width)[0]
        logits_PV = draft.advance(chosen_K // width, ids[chosen_K])
        score_P, entry_P = scores[chosen_K], chosen_K + entries
        entries += len(ids)
    packed = torch.stack([torch.cat(column).double() for column in zip(*levels, strict=True)])
    read_ids, read_scores, read_parents = packed.cpu().numpy()
    return Expansion(read_ids.astype(int).tolist(), read_scores.tolist(), read_parents.astype(int).tolist(), width)


def best_entries(expansion: Expansion, budget: int) -> list[int]:
    """The `budget` entries of the largest scores, best first, ties by entry.

    No child scores more than its parent, which comes before it, so every start of the answer is a tree.
    """
    return np.argsort(-np.array(expansion.scores), kind="stable")[:budget].tolist()


def rerank(expansion: Expansion, tokens: list[int], budget: int) -> Nodes:
    """The tree of the `budget` best entries, numbered in the order of the beam; `tokens` are the entries' own."""
    ranking = best_entries(expansion, budget)
    kept = sorted(ranking)
    moved = {-1: -1} | {entry: node for node, entry in enumerate(kept)}
    return Nodes(
        [tokens[entry] for entry in kept],
        [moved[expansion.parents[entry]] for entry in kept],
        [moved[entry] for entry in ranking],
    )
