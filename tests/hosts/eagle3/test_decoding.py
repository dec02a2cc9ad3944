"""EAGLE-3 in the loop: lossless for every tree and gate, and nothing of the draft's own survives a verification."""

import math
from dataclasses import replace

import pytest
import torch

from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, generate
from dloop.decoding.target import Target
from dloop.hosts.eagle3.drafter import Eagle3Drafter
from dloop.hosts.tree_options import TreeOptions
from tests.decoding.test_loop import greedy
from tests.hosts.golden_training import CPU, load

PROMPTS = [[9], [5, 44, 100, 7], list(range(40, 60))]
SHAPES = [(0, 0), (1, 3), (8, 4), (60, 48), (60, 0)]
GATES = [Gate(-math.inf, 2), Gate(-0.5), Gate(1.0)]
LENGTH = 28


@pytest.fixture(scope="module")
def pair(golden):
    model, host = load(golden / "eagle3")
    host.check_target(model)
    return model, host


@pytest.fixture(scope="module")
def expected(pair):
    return {tuple(prompt): greedy(pair[0], prompt, LENGTH) for prompt in PROMPTS}


def decode(pair, prompt, budgets, gate, drafter_class=Eagle3Drafter, watch=None, **shape):
    model, host = pair
    target = Target(model, host.taps)
    options = TreeOptions(*budgets, **({"topk_k": 10} | shape))
    drafter = drafter_class(host.network, model, options)
    settings = Settings(LENGTH, frozenset(), gate, *budgets)
    try:
        return generate(target, drafter, prompt, settings, Clock(CPU))
    finally:
        target.close()


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("budgets", SHAPES, ids=str)
def test_ids_equal_plain_greedy(pair, expected, budgets, gate):
    for prompt, ids in expected.items():
        assert decode(pair, list(prompt), budgets, gate).output_ids == ids


@pytest.mark.parametrize("shape", [{"tree_depth": 1}, {"tree_depth": 3, "topk_k": 2}, {"topk_k": 500}])
def test_other_shapes_are_lossless_too(pair, expected, shape):
    for prompt, ids in expected.items():
        assert decode(pair, list(prompt), (20, 9), Gate(-2.0), **shape).output_ids == ids


def test_budgets_count_as_eagle_s(pair):
    """The first one counts the root, those of later stages do not; 0 is the chain."""
    for budget, stage_budget in ((60, 48), (16, 9), (0, 0)):
        for round_ in decode(pair, PROMPTS[1], (budget, stage_budget), Gate(-0.5)).rounds:
            stages = len(round_.segments)
            chains = sum(len(segment.chain) for segment in round_.segments)
            assert round_.verified_tokens == (budget + stage_budget * (stages - 1) if budget else 1 + chains)
    assert {r.verified_tokens for r in decode(pair, PROMPTS[1], (1, 0), Gate()).rounds} == {1}


def test_the_chain_and_its_sum_do_not_depend_on_the_tree(pair):
    linear, tree = (decode(pair, PROMPTS[2], budgets, Gate()).rounds[0].segments[0] for budgets in ((0, 0), (60, 48)))
    assert len(linear.chain) == 8
    assert linear.chain[: len(tree.chain)] == tree.chain
    assert linear.log_probs[: len(tree.chain)] == pytest.approx(tree.log_probs, abs=1e-5)


class Compared(Eagle3Drafter):
    """After every extension: its cache and its state equal those of a fresh drafter that saw it all at once."""

    looked = 0

    def reset(self, capacity):
        super().reset(capacity)
        self.features, self.tokens = [], []

    def begin(self, features, tokens):
        super().begin(features, tokens)
        self.features.append(features)
        self.tokens += tokens
        fresh = Eagle3Drafter(self.network, self.model, self.options)
        fresh.reset(len(self.tokens))
        fresh.begin(torch.cat(self.features), self.tokens)
        assert fresh.cache.length == self.cache.length == len(self.tokens)
        rows = slice(0, len(self.tokens))
        torch.testing.assert_close(self.cache.store[..., rows, :], fresh.cache.store[..., rows, :], atol=1e-5, rtol=0)
        ours, theirs = (self.network.logits(drafter._state_1D) for drafter in (self, fresh))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
        type(self).looked += 1

    def __init__(self, network, model, options):
        super().__init__(network, model, options)
        self.model, self.options = model, options


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("budgets", [(0, 0), (60, 48)], ids=str)
def test_a_round_starts_from_what_a_fresh_prefill_would_hold(pair, budgets, gate):
    before = Compared.looked
    result = decode(pair, PROMPTS[1], budgets, gate, Compared)
    assert Compared.looked - before == len(result.rounds)


def test_a_loop_stage_equals_drafting_behind_the_same_chain_row_by_row(pair):
    """The chain's rows that a stage keeps are those that single steps along the chain would have left."""
    model, host = pair
    target = Target(model, host.taps)
    target.reset(64)
    with torch.inference_mode():
        root, features = target.prefill(PROMPTS[2])
        tokens = [*PROMPTS[2][1:], root]
        wide = host.drafter(model, TreeOptions(60, 48, topk_k=10))
        wide.reset(64)
        wide.begin(features, tokens)
        first = wide.first_stage()
        second = wide.next_stage()
        steps = replace(TreeOptions(), tree_depth=len(first.chain) + len(second.chain) - 1)
        narrow = host.drafter(model, steps)
        narrow.reset(64)
        narrow.begin(features, tokens)
        whole = narrow.first_stage()
    target.close()
    assert first.chain + second.chain == whole.chain
    assert first.log_probs + second.log_probs == pytest.approx(whole.log_probs, abs=1e-4)
    start = len(tokens)
    kept = slice(start, start + len(first.chain))
    torch.testing.assert_close(wide.cache.store[..., kept, :], narrow.cache.store[..., kept, :], atol=1e-5, rtol=0)
    wide.end()
    assert wide.cache.length == start


def test_a_stage_reads_the_device_once(pair, monkeypatch):
    model, host = pair
    drafter = host.drafter(model, TreeOptions(60, 48, topk_k=10))
    drafter.reset(64)
    reads = []
    for name in ("cpu", "item", "tolist", "nonzero", "__bool__", "__int__"):
        plain = getattr(torch.Tensor, name)

        def counted(self, *args, plain=plain, name=name, **kwargs):
            reads.append(name)
            return plain(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    with torch.inference_mode():
        drafter.begin(torch.randn(4, 144), [1, 2, 3, 4])
        assert reads == []
        first = drafter.first_stage()
        assert reads == ["cpu"]
        drafter.next_stage()
        first.subtree(60, whole_chain=True)
        drafter.end()
    assert reads == ["cpu", "cpu"]
