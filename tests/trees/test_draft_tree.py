"""The draft tree against naive walks over its parents."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from dloop.trees.draft_tree import DraftTree

grown = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=30)


def build(steps):
    tree = DraftTree(9)
    for parent, token in steps:
        tree.add(token, parent % len(tree))
    return tree


def ancestors(tree, node):
    return {node} | (ancestors(tree, tree.parents[node]) if node else set())


@given(grown)
def test_invariants_and_ancestor_mask(steps):
    tree = build(steps)
    mask = tree.ancestor_mask()
    for node in range(len(tree)):
        assert tree.parents[node] < node
        assert tree.depths[node] == len(ancestors(tree, node)) - 1
        assert mask[node].nonzero()[:, 0].tolist() == sorted(ancestors(tree, node))
        tokens = [tree.tokens[child] for child in range(len(tree)) if tree.parents[child] == node]
        assert len(tokens) == len(set(tokens))
    assert tree.is_chain == (tree.parents == list(range(-1, len(tree) - 1)))


@given(grown, st.lists(st.integers(0, 3), min_size=31, max_size=31))
def test_longest_accepted_is_the_longest_path_the_target_agrees_with(steps, choices):
    tree = build(steps)
    agreed = [
        node
        for node in range(len(tree))
        if all(n == 0 or tree.tokens[n] == choices[tree.parents[n]] for n in ancestors(tree, node))
    ]
    deepest = max(agreed, key=lambda node: tree.depths[node])
    assert tree.longest_accepted(choices) == sorted(ancestors(tree, deepest))


def test_stages_hang_below_the_anchor():
    tree = DraftTree(1)
    tree.graft([5, 6, 7], [-1, 0, -1])
    tree.move_anchor([5, 6])
    assert (tree.anchor, tree.anchor_depth) == (2, 2)
    tree.graft([5, 8], [-1, 0])
    assert tree.parents == [-1, 0, 1, 0, 2, 4]
    assert tree.depths == [0, 1, 2, 1, 3, 4]
    assert not tree.is_chain


def test_a_repeated_child_is_the_same_node():
    tree = DraftTree(1)
    assert tree.add(4, 0) == tree.add(4, 0) == 1
    assert len(tree) == 2
    assert torch.equal(tree.ancestor_mask(), torch.tensor([[True, False], [True, True]]))
