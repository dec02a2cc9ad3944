"""Draft trees in the loop: reference runs, losslessness for every host, gate and budget, forced chains."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from dloop.cli import UserError
from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, generate
from dloop.decoding.target import Target
from dloop.hosts.host import Segment
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import load_target
from dloop.hosts.tree_options import LINEAR, TreeOptions, resolve_tree

from .test_loop import greedy, lengths

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("runtime")


def load(folder):
    model = load_target(str(folder / "target"), dtype=torch.float32, device=CPU)
    return model, load_host(str(folder / "draft"), dtype=torch.float32, device=CPU)


def decode(model, host, prompt, settings, watch=None):
    target = Target(model, host.taps)
    if watch is not None:
        verify = target.verify
        target.verify = lambda tree: (watch.append(tree), verify(tree))[1]
    drafter = host.drafter(model, TreeOptions(settings.tree_budget, settings.stage_tree_budget))
    try:
        return generate(target, drafter, prompt, settings, Clock(CPU))
    finally:
        target.close()


@pytest.fixture(scope="module")
def ddtree(golden):
    folder = golden / "ddtree"
    return *load(folder), json.loads((folder / "generation.json").read_text())


def rounds_before(limit, acceptance_lengths):
    """How many rounds start before `limit` tokens: the reference drafts otherwise in the last ones of a tiny tree."""
    starts = [sum(acceptance_lengths[:place]) for place in range(len(acceptance_lengths))]
    return sum(start <= limit for start in starts)


@pytest.mark.parametrize("budget", ["linear", "1", "4", "16", "64", "256"])
def test_ddtree_generation_equals_the_reference(ddtree, budget):
    model, host, prompts = ddtree
    for case in prompts:
        stops = frozenset([case["eos"]] if isinstance(case["eos"], int) else case["eos"] or [])
        trees = []
        settings = Settings(case["max_new_tokens"], stops, tree_budget=0 if budget == "linear" else int(budget))
        result = decode(model, host, case["prompt"], settings, trees)
        run = case["runs"][budget]
        assert result.output_ids == case["greedy_ids"]
        comparable = rounds_before(case["max_new_tokens"] - host.network.config.block_size, run["acceptance_lengths"])
        if budget in ("linear", "16", "64", "256"):
            comparable = len(run["acceptance_lengths"])
        assert lengths(result)[:comparable] == run["acceptance_lengths"][:comparable]
        for tree, round_, expected in zip(trees, result.rounds, run.get("round_trees") or [], strict=False):
            place = 0
            for token in (tree.tokens[node] for node in expected["accepted_indices"][1:]):
                place = tree.children[place][token]
            assert place == expected["accepted_indices"][-1]
            assert round_.acceptance_length == len(expected["accepted_indices"])
            nodes = expected["tree"]
            assert tree.tokens[1:] == nodes["node_token_ids"][-len(tree) + 1 :]
            assert tree.parents[1:] == nodes["parents"][-len(tree) + 1 :]
            assert tree.depths[1:] == nodes["node_depths"][-len(tree) + 1 :]


def test_first_round_equals_the_reference(ddtree, golden):
    model, host, _ = ddtree
    reference = load_file(golden / "ddtree/first_round.safetensors")
    with torch.inference_mode():
        target = Target(model, host.taps)
        target.reset(64)
        root, features = target.prefill(reference["prompt_ids"].tolist())
        target.close()
        assert root == reference["root"].item()
        torch.testing.assert_close(features, reference["context_features"], atol=1e-4, rtol=0)
        drafter = host.drafter(model)
        drafter.reset(64)
        drafter.begin(features, [root])
        drafter.first_stage()
    torch.testing.assert_close(drafter._bank, reference["block_hidden"][1:], atol=1e-4, rtol=0)
    torch.testing.assert_close(drafter.head(drafter._bank), reference["draft_logits"], atol=1e-4, rtol=0)


@pytest.fixture(scope="module", params=["dflash", "dspark", "domino"])
def pair(request, golden):
    model, host = load(golden / request.param)
    return model, host, {tuple(prompt): greedy(model, prompt, 30) for prompt in ([5], [126, 84, 63, 80])}


@pytest.mark.parametrize("gate", [Gate(), Gate(-0.5), Gate(-math.inf, 2)], ids=str)
@pytest.mark.parametrize(("budget", "stage_budget"), [(1, 0), (3, 2), (64, 64), (256, 5)])
def test_ids_equal_plain_greedy(pair, gate, budget, stage_budget):
    model, host, expected = pair
    for prompt, ids in expected.items():
        settings = Settings(30, frozenset(), gate, budget, stage_budget)
        assert decode(model, host, list(prompt), settings).output_ids == ids


def test_a_closed_gate_gives_exactly_the_hosts_trees(pair):
    model, host, expected = pair
    prompt = list(next(iter(expected)))
    plain, gated = [], []
    decode(model, host, prompt, Settings(20, frozenset(), Gate(), 24, 8), plain)
    decode(model, host, prompt, Settings(20, frozenset(), Gate(1.0, 3), 24, 8), gated)
    assert [(t.tokens, t.parents) for t in plain] == [(t.tokens, t.parents) for t in gated]
    assert any(not tree.is_chain for tree in plain)


def test_open_gates_force_the_whole_chain_of_every_stage(pair):
    model, host, expected = pair
    prompt = list(next(iter(expected)))
    trees = []
    result = decode(model, host, prompt, Settings(25, frozenset(), Gate(-math.inf, 2), 3, 2), trees)
    looped = 0
    for tree, round_ in zip(trees, result.rounds, strict=True):
        for node, parent in enumerate(tree.parents[1:], start=1):
            assert tree.depths[node] == tree.depths[parent] + 1
        anchor = 0
        for segment in round_.segments[:-1]:
            for token in segment.chain:
                anchor = tree.children[anchor][token]
            looped += 1
    assert looped > 5


@pytest.mark.parametrize("budget", [0, 16])
def test_a_response_keeps_no_logits(pair, budget):
    model, host, expected = pair
    result = decode(model, host, list(next(iter(expected))), Settings(12, frozenset(), Gate(), budget))
    assert {type(segment) for round_ in result.rounds for segment in round_.segments} == {Segment}


def test_the_chain_does_not_depend_on_the_tree(pair):
    model, host, expected = pair
    prompt = list(next(iter(expected)))
    first = [decode(model, host, prompt, Settings(9, frozenset(), Gate(), budget)).rounds[0] for budget in (0, 64)]
    assert first[0].segments[0].chain == first[1].segments[0].chain
    assert first[0].segments[0].log_probs == first[1].segments[0].log_probs


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_tree_flags_resolve_to_the_hosts_defaults(name, golden):
    defaults = load(golden / name)[1].tree_defaults
    assert resolve_tree(name, defaults, {}) == LINEAR
    assert resolve_tree(name, defaults, {"tree_budget": 0}) == LINEAR
    resolved = resolve_tree(name, defaults, {"tree_budget": 256})
    assert (resolved.tree_budget, resolved.stage_tree_budget) == (256, 64 if name == "dflash" else 0)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("dflash", {"tree_budget": 8, "tree_width": 4}, "--tree-width has no effect on dflash"),
        ("dspark", {"tree_budget": 8, "topk_k": 4}, "--topk-k has no effect on dspark"),
        ("dflash", {"stage_tree_budget": 4}, "no effect without a tree"),
        ("domino", {"tree_budget": 0, "tree_beta": -0.1}, "no effect without a tree"),
        ("domino", {"tree_budget": 8, "tree_beta": 0.1}, "must not be above 0"),
        ("dflash", {"tree_budget": -1}, "at least 0"),
        ("domino", {"tree_budget": 8, "tree_width": 0}, "at least 1"),
    ],
)
def test_flags_without_effect_are_refused(name, given, message, golden):
    defaults = load(golden / name)[1].tree_defaults
    with pytest.raises(UserError, match=message):
        resolve_tree(name, defaults, given)
