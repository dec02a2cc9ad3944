"""Forcing the chain against the rule it follows, on trees grown by hand and by DDTree."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dloop.trees.ddtree import build_ddtree
from dloop.trees.forced_chain import force_chain
from dloop.trees.nodes import Nodes


def paths(nodes):
    """The tokens from the root to each node."""
    found = []
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@st.composite
def ranked_trees(draw):
    """Any tree in any numbering that keeps parents first, with a ranking that does so in another order."""
    edges = []
    for _ in range(draw(st.integers(0, 12))):
        edge = (draw(st.integers(-1, len(edges) - 1)), draw(st.integers(0, 2)))
        if edge not in edges:
            edges.append(edge)
    worth = [draw(st.integers(0, 5)) for _ in edges]
    for node, (parent, _) in enumerate(edges):
        worth[node] += worth[parent] if parent >= 0 else 0
    ranking = sorted(range(len(edges)), key=lambda node: (worth[node], node))
    return Nodes([token for _, token in edges], [parent for parent, _ in edges], ranking)


@given(ranked_trees(), st.lists(st.integers(0, 3), max_size=5), st.integers(0, 15))
def test_chain_then_the_best_others_in_their_usual_order(nodes, chain, budget):
    prefixes = [tuple(chain[: depth + 1]) for depth in range(len(chain))]
    before = paths(nodes)
    others = [before[node] for node in nodes.ranking if before[node] not in prefixes]
    others = others[: max(budget - len(chain), 0)]
    kept = [path for path in before if path in others or path in prefixes]
    forced = force_chain(nodes, chain, budget)
    after = paths(forced)
    assert after == kept + [prefix for prefix in prefixes if prefix not in kept]
    assert [after[node] for node in forced.ranking] == prefixes + others
    assert all(parent < node for node, parent in enumerate(forced.parents))
    assert len(set(after)) == len(after) <= max(budget, len(chain))


@given(ranked_trees(), st.lists(st.integers(0, 3), max_size=5))
def test_nothing_changes_when_the_chain_is_there(nodes, chain):
    forced = force_chain(nodes, chain, len(nodes.tokens) + len(chain))
    again = force_chain(forced, chain, len(forced.tokens))
    assert again == forced


def test_a_confident_chain_is_already_in_a_ddtree():
    logits_LV = torch.randn(7, 50, generator=torch.Generator().manual_seed(1))
    logits_LV[:, 3] += 9.0
    nodes = build_ddtree(logits_LV, 16)
    assert force_chain(nodes, [3] * 7, 16)[:2] == nodes[:2]


def test_a_budget_below_the_chain_leaves_the_chain_alone():
    nodes = build_ddtree(torch.zeros(4, 5), 3)
    assert force_chain(nodes, [4, 4, 4, 4], 3) == ([4, 4, 4, 4], [-1, 0, 1, 2], [0, 1, 2, 3])
