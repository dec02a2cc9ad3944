"""What a tree builder hands over: the draft nodes of one stage, below that stage's root."""

from __future__ import annotations

from typing import NamedTuple


class Nodes(NamedTuple):
    """The nodes of a sub-tree in the host's numbering; parents come before children, siblings differ in their token."""

    tokens: list[int]
    parents: list[int]
    """Index of each node's parent, -1 for the root of the sub-tree (which is no node of its own)."""
    ranking: list[int]
    """Node indices from the most to the least promising in the host's own eyes; every start of it is a tree."""
