"""DDTree against the golden trees and against all prefixes, sorted."""

import json
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from dloop.trees.ddtree import build_ddtree, cheapest_prefixes
from dloop.trees.draft_tree import DraftTree
from dloop.trees.forced_chain import force_chain
from tests.conftest import GOLDEN

TREES = json.loads((GOLDEN / "ddtree/trees.json").read_text())
UNIONS = json.loads((GOLDEN / "ddtree/union_trees.json").read_text())

rows = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(-2, 3), min_size=width, max_size=width), min_size=1, max_size=4)
)


def grafted(nodes, root=-1):
    tree = DraftTree(root)
    tree.graft(nodes.tokens, nodes.parents)
    return tree


def best_prefixes(logits_LV, budget, candidates=None):
    """All prefixes by exact probability, then by the ranks of their tokens."""
    width = min(budget, logits_LV.shape[1], candidates or budget)
    steps = []
    for row in logits_LV.float():
        ids = sorted(range(len(row)), key=lambda token: (-float(row[token]), token))[:width]
        steps.append([(token, Fraction(float(row[token] - row.logsumexp(0)))) for token in ids])
    prefixes = [ranks for depth in range(1, len(steps) + 1) for ranks in product(range(width), repeat=depth)]

    def log_probability(ranks):
        return sum(steps[depth][rank][1] for depth, rank in enumerate(ranks))

    best = sorted(prefixes, key=lambda ranks: (-log_probability(ranks), ranks))[:budget]
    return [steps[len(ranks) - 1][ranks[-1]][0] for ranks in best], [
        best.index(ranks[:-1]) if len(ranks) > 1 else -1 for ranks in best
    ]


@pytest.mark.parametrize("budget", ["1", "16", "64", "256"])
@pytest.mark.parametrize("case", TREES)
def test_golden_trees(case, budget):
    nodes = build_ddtree(load_file(GOLDEN / "ddtree/logits.safetensors")[case], int(budget))
    tree, expected = grafted(nodes), TREES[case][budget]
    assert tree.tokens[1:] == expected["tokens"]
    assert tree.parents == expected["parents"]
    assert tree.depths[1:] == expected["depths"]


@pytest.mark.parametrize("name", UNIONS)
def test_golden_unions_of_stages(name):
    case, first_budget, stage_budget = name.split("/")
    stages = load_file(GOLDEN / "ddtree/union_logits.safetensors")
    expected, tree, sums = UNIONS[name], DraftTree(-1), []
    for stage in range(3):
        logits_LV = stages[f"{case}.{stage}"]
        best, chain = logits_LV.log_softmax(-1).max(-1)
        sums.append(float(best.sum()))
        budget = int(stage_budget if stage else first_budget)
        nodes = build_ddtree(logits_LV, budget)
        is_open = sums[-1] > expected["gate"] and stage < 2
        if is_open:
            nodes = force_chain(nodes, chain.tolist(), budget)
        tree.graft(nodes.tokens, nodes.parents)
        if not is_open:
            break
        tree.move_anchor(chain.tolist())
    assert stage == expected["additional_stages"]
    assert sums == pytest.approx(expected["gate_sums"], abs=1e-4)
    assert (tree.tokens, tree.parents, tree.depths) == tuple(expected[key] for key in ("tokens", "parents", "depths"))


@given(rows, st.integers(1, 40), st.sampled_from([None, 1, 2, 3]))
def test_the_most_probable_prefixes_with_ties(logits, budget, candidates):
    logits_LV = torch.tensor(logits, dtype=torch.float32)
    nodes = build_ddtree(logits_LV, budget, candidates)
    assert (nodes.tokens, nodes.parents) == best_prefixes(logits_LV, budget, candidates)
    assert nodes.ranking == list(range(len(nodes.tokens)))


@given(st.integers(0, 10**6), st.sampled_from([0.5, 3.0, 12.0]), st.integers(1, 60))
def test_the_most_probable_prefixes_of_random_logits(seed, scale, budget):
    logits_LV = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)) * scale
    nodes = build_ddtree(logits_LV, budget)
    assert (nodes.tokens, nodes.parents) == best_prefixes(logits_LV, budget)


def test_every_prefix_when_the_budget_allows():
    nodes = build_ddtree(torch.zeros(3, 2), 100)
    assert len(nodes.tokens) == 2 + 4 + 8
    assert len(build_ddtree(torch.zeros(3, 2), 100, candidates=1).tokens) == 3


@pytest.mark.parametrize(("depths", "budget"), [(3, 0), (0, 5), (0, 0)])
def test_nothing_to_draft(depths, budget):
    assert build_ddtree(torch.zeros(depths, 4), budget) == ([], [], [])


def test_half_precision_logits_are_ranked_in_float32():
    logits_LV = torch.randn(5, 3000, generator=torch.Generator().manual_seed(0)).mul(3).to(torch.bfloat16)
    assert build_ddtree(logits_LV, 64) == build_ddtree(logits_LV.float(), 64)


def test_equal_costs_follow_the_ranks_from_the_root_on():
    places, parents = cheapest_prefixes([0.0, 0.0, 0.0, 0.0], depths=2, width=2, budget=6)
    assert places == [0, 2, 3, 1, 2, 3]
    assert parents == [-1, 0, 0, -1, 3, 3]
