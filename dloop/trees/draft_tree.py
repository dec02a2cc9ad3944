"""The draft tree of one round: tokens, parents, depths, ancestor mask, longest accepted path.

Plain host data. Node 0 is the root, the last committed token, whose keys and values the target does not have yet; a
chain is a tree in which every node has one child. Parents come before children and siblings differ in their token, so
the tree is a trie. A tree builder only adds nodes; nothing here knows where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor


class DraftTree:
    """Grows stage by stage below an anchor, then is verified at once."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self.children: list[dict[int, int]] = [{}]
        self.anchor = 0
        self.is_chain = True
        self.stage_rows: list[int] = []
        """Nodes that each graft added."""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, token: int, parent: int) -> int:
        """The id of the child of `parent` that holds `token`, added when it is not there yet."""
        known = self.children[parent].get(token)
        if known is not None:
            return known
        node = len(self.tokens)
        self.is_chain = self.is_chain and parent == node - 1
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.children.append({})
        self.children[parent][token] = node
        return node

    def graft(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Hang nodes below the anchor; `parents` index into `tokens`, -1 is the anchor itself."""
        ids: list[int] = []
        before = len(self)
        for token, parent in zip(tokens, parents, strict=True):
            ids.append(self.add(token, self.anchor if parent < 0 else ids[parent]))
        self.stage_rows.append(len(self) - before)

    def move_anchor(self, chain: Sequence[int]) -> None:
        """Walk `chain` down from the anchor and make its last node the anchor of the next stage."""
        for token in chain:
            self.anchor = self.children[self.anchor][token]

    @property
    def anchor_depth(self) -> int:
        """How many drafted tokens lie between the root and the anchor."""
        return self.depths[self.anchor]

    def longest_accepted(self, choices: Sequence[int]) -> list[int]:
        """Node ids from the root down while the target's choice at a node is one of its children.

        `choices[n]` is the target's greedy token behind node n. The token behind the last node of the path is the next
        root, so the acceptance length of the round is the length of the path.
        """
        path = [0]
        while (child := self.children[path[-1]].get(choices[path[-1]])) is not None:
            path.append(child)
        return path

    def accepted_by_stage(self, path: Sequence[int]) -> list[int]:
        """How many nodes of `path` (from the root down) each graft contributed; the root is nobody's."""
        ends = list(accumulate(self.stage_rows, initial=1))
        return [sum(first <= node < end for node in path) for first, end in pairwise(ends)]

    def ancestor_mask(self) -> Tensor:
        """Boolean [N, N] on the CPU: row i is True at i and at the ancestors of i."""
        # Rows as the bits of Python integers: one `or` a node, where tensor rows would cost a call each.
        rows = [1]
        for node, parent in enumerate(self.parents[1:], start=1):
            rows.append(rows[parent] | 1 << node)
        width = -(-len(rows) // 8)
        packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), np.uint8)
        bits = np.unpackbits(packed.reshape(len(rows), width), axis=1, count=len(rows), bitorder="little")
        return torch.from_numpy(bits.view(bool))
