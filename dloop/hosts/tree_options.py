"""Which tree flags a host has, what they default to, and which of those given make no sense together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

from dloop.cli import UserError


@dataclass(frozen=True)
class TreeOptions:
    """Resolved tree settings. Budgets are draft nodes a stage adds (EAGLE-3's first one counts the root too); 0 is the
    host's chain alone."""

    tree_budget: int = 0
    stage_tree_budget: int = 0
    topk_k: int | None = None
    """Most candidates a depth; None is no cap. EAGLE-3: prefixes a level expands and tokens tried behind each."""
    tree_width: int = 12
    """Nodes kept a depth."""
    tree_beta: float = -0.2
    """Length bonus a node of depth d is ranked with: beta x d."""
    tree_depth: int = 7
    """Levels drafted behind the first, in a chain too."""
    mtp_k: int | None = None
    """Tokens a stage of a multi-token-prediction head drafts; None is the head's default."""


DARTREE_DEFAULTS: Mapping[str, Any] = {
    "tree_budget": 0,
    "stage_tree_budget": 0,
    "tree_width": 12,
    "tree_beta": -0.2,
}
"""Tree flags of the hosts whose later tokens depend on earlier ones (DSpark, Domino)."""

LINEAR = TreeOptions()
"""Chains alone."""

CHAIN_FLAGS = frozenset({"tree_depth", "mtp_k"})
"""Flags that shape a chain as well."""


def resolve_tree(host: str, defaults: Mapping[str, Any], given: Mapping[str, Any]) -> TreeOptions:
    """`given` flags (None: left out) over the `defaults` of a host, which also say which flags it has.

    A flag of another host, a flag without effect in linear mode, or a value out of range is a UserError.
    """
    explicit = {name: value for name, value in given.items() if value is not None}
    for name in explicit.keys() - defaults.keys():
        raise UserError(f"{_flag(name)} has no effect on {host} drafts; leave it out")
    _check_range(explicit)
    budget = explicit.get("tree_budget", defaults.get("tree_budget", 0))
    if budget:
        return TreeOptions(**{**defaults, **explicit})
    for name in explicit.keys() - {"tree_budget"} - CHAIN_FLAGS:
        raise UserError(f"{_flag(name)} has no effect without a tree; give --tree-budget too, or leave it out")
    return TreeOptions(**{name: value for name, value in {**defaults, **explicit}.items() if name in CHAIN_FLAGS})


def _check_range(explicit: Mapping[str, Any]) -> None:
    for name, least in (
        ("tree_budget", 0),
        ("stage_tree_budget", 0),
        ("topk_k", 1),
        ("tree_width", 1),
        ("tree_depth", 1),
        ("mtp_k", 1),
    ):
        if explicit.get(name, least) < least:
            raise UserError(f"{_flag(name)} is {explicit[name]}; it must be at least {least}")
    if not -inf < explicit.get("tree_beta", 0.0) <= 0:
        raise UserError(
            f"--tree-beta is {explicit['tree_beta']}; it must be finite and must not be above 0 "
            "(a deeper node would outrank its parent)"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


FLAGS = tuple(field.name for field in fields(TreeOptions))
"""Names of all tree flags as options of the evaluation command."""
