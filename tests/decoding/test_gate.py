"""When another stage may follow."""

import math

import pytest

from dloop.decoding.gate import Gate
from dloop.hosts.host import Segment
from dloop.trees.draft_tree import DraftTree

SEGMENT = Segment([4, 5, 6], [-0.1, -0.2, -0.1])


def opens(gate, *, segment=SEGMENT, depth=0, extra=0, wanted=100, stops=()):
    tree = DraftTree(1)
    tree.graft(range(10, 10 + depth), range(-1, depth - 1))
    tree.move_anchor(range(10, 10 + depth))
    return gate.opens(segment, tree, extra, wanted, stops)


def test_opens_strictly_above_the_threshold():
    assert opens(Gate(-0.5))
    assert not opens(Gate(SEGMENT.gate_sum))
    assert not opens(Gate(-0.3))


def test_the_default_never_opens_even_for_a_certain_draft():
    assert not opens(Gate(), segment=Segment([4], [0.0]))


@pytest.mark.parametrize(("extra", "expected"), [(0, True), (1, True), (2, False)])
def test_the_cap_counts_additional_stages(extra, expected):
    assert opens(Gate(-math.inf, 2), extra=extra) is expected


def test_no_stage_follows_a_drafted_stop_token():
    assert not opens(Gate(-0.5), stops={5})
    assert opens(Gate(-0.5), stops={7})


@pytest.mark.parametrize(("depth", "wanted", "expected"), [(0, 4, True), (0, 3, False), (6, 10, True), (6, 9, False)])
def test_no_stage_follows_when_enough_tokens_are_drafted(depth, wanted, expected):
    assert opens(Gate(-math.inf), depth=depth, wanted=wanted) is expected
