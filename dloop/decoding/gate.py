"""The gate: may another drafting stage follow before the target verifies?

Another stage follows while the draft's summed log-probability of the stage just drafted is above the threshold. The
other three conditions only save work: none of them can change the emitted tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dloop.hosts.host import Segment
from dloop.trees.draft_tree import DraftTree

NEVER = 1.0
"""A threshold no sum of log-probabilities can exceed: the host as released."""


@dataclass(frozen=True)
class Gate:
    """`threshold` g in nats (default never opens) and an optional cap on the additional stages of a round."""

    threshold: float = NEVER
    max_extra_stages: int | None = None

    def opens(self, segment: Segment, tree: DraftTree, extra_stages: int, wanted: int, stops: Collection[int]) -> bool:
        """Whether a stage may follow `segment`, which hangs below the tree's anchor.

        `wanted` counts the tokens the response still wants behind the root; `stops` are the stop token ids.
        """
        return (
            segment.gate_sum > self.threshold
            and (self.max_extra_stages is None or extra_stages < self.max_extra_stages)
            and tree.anchor_depth + len(segment.chain) < wanted
            and not any(token in stops for token in segment.chain)
        )
