"""EAGLE's dynamic tree against a plain enumeration, with ties everywhere; structure of what it answers."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dloop.trees.dynamic import best_entries, expand, rerank
from dloop.trees.forced_chain import force_chain


class Table:
    """A draft whose logits are a function of the path: whole numbers, so that equal scores are common."""

    def __init__(self, vocabulary, seed, kinds=3):
        self.vocabulary, self.seed, self.kinds = vocabulary, seed, kinds
        self.paths = [()]
        self.calls = 0

    def row(self, path):
        draw = random.Random(f"{self.seed} {path}")
        return [float(draw.randrange(self.kinds)) for _ in range(self.vocabulary)]

    def root_logits(self):
        return torch.tensor([self.row(())])

    def advance(self, parents, ids):
        self.calls += 1
        pairs = zip(parents.tolist(), ids.tolist(), strict=True)
        self.paths = [(*self.paths[parent], token) for parent, token in pairs]
        return torch.tensor([self.row(path) for path in self.paths])


def enumerate_beam(table, width, depth):
    """(path, score, parent entry) of every entry in order, in float32 like the device: the specification, naively."""

    def best(path):
        logits = torch.tensor(table.row(path))
        log_probs = logits - logits.logsumexp(-1)
        order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[:width]
        return [(token, log_probs[token]) for token in order]

    entries = [((token,), lp, -1) for token, lp in best(())]
    frontier = list(range(len(entries)))
    for _ in range(depth):
        first = len(entries)
        for entry in frontier:
            path, score, _ = entries[entry]
            entries += [((*path, token), score + lp, entry) for token, lp in best(path)]
        frontier = sorted(range(first, len(entries)), key=lambda entry: (-float(entries[entry][1]), entry))[:width]
    return entries


cases = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.integers(0, 999), st.integers(1, 4))


@settings(deadline=None, max_examples=60)
@given(cases, st.integers(0, 40))
def test_entries_and_tree_equal_the_enumeration(case, budget):
    vocabulary, width, depth, seed, kinds = case
    table = Table(vocabulary, seed, kinds)
    found = expand(table, width, depth)
    entries = enumerate_beam(table, min(width, vocabulary), depth)
    assert found.ids == [path[-1] for path, _, _ in entries]
    assert found.parents == [parent for _, _, parent in entries]
    assert found.scores == pytest.approx([float(score) for _, score, _ in entries], abs=1e-5)
    assert table.calls == depth
    ranking = sorted(range(len(entries)), key=lambda entry: (-found.scores[entry], entry))[:budget]
    assert best_entries(found, budget) == ranking
    nodes = rerank(found, found.ids, budget)
    kept = sorted(ranking)
    assert nodes.tokens == [found.ids[entry] for entry in kept]
    for node, entry in enumerate(kept):
        parent = nodes.parents[node]
        assert (kept[parent] if parent >= 0 else -1) == found.parents[entry]
        assert parent < node
    assert [kept[node] for node in nodes.ranking] == ranking
    assert len(set(zip(nodes.parents, nodes.tokens, strict=True))) == len(kept), "siblings differ in their token"


@settings(deadline=None, max_examples=60)
@given(cases)
def test_the_chain_is_greedy_and_its_rows_are_where_it_was_expanded(case):
    vocabulary, width, depth, seed, kinds = case
    table = Table(vocabulary, seed, kinds)
    expanded = []
    advance = table.advance

    def watched(parents, ids):
        answer = advance(parents, ids)
        expanded.extend(table.paths)
        return answer

    table.advance = watched
    found = expand(table, width, depth)
    chain = found.chain()
    path = ()
    for place, entry in enumerate(chain):
        row = table.row(path)
        path = (*path, row.index(max(row)))
        assert found.ids[entry] == path[-1]
        if place:
            assert expanded[found.row(entry)] == path[:-1]
    if len(chain) <= depth:
        assert path not in expanded, "the chain may end early only where it left the beam"


def test_a_sure_draft_s_chain_is_whole_and_a_linear_beam_is_its_chain():
    class Sure(Table):
        def row(self, path):
            return [9.0 if token == len(path) % self.vocabulary else 0.0 for token in range(self.vocabulary)]

    wide, narrow = expand(Sure(5, 0), 3, 6), expand(Sure(5, 0), 1, 6)
    assert [wide.ids[entry] for entry in wide.chain()] == narrow.ids == [0, 1, 2, 3, 4, 0, 1]
    assert narrow.chain() == list(range(7))
    nodes = force_chain(rerank(wide, wide.ids, 9), narrow.ids, 9)
    assert sorted(nodes.tokens) == sorted(rerank(wide, wide.ids, 9).tokens), "nothing had to be forced"
