"""EAGLE-3 against reference outputs: chain, trees, generations with and without loops (tests/golden/eagle3)."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, generate
from dloop.decoding.target import Target
from dloop.hosts.tree_options import TreeOptions
from dloop.trees.draft_tree import DraftTree
from dloop.trees.dynamic import best_entries, expand
from tests.hosts.golden_training import CPU, load

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "eagle3"


@pytest.fixture(scope="module")
def pair(folder):
    target, host = load(folder)
    host.check_target(target)
    return target, host


def drafter_of(pair, total, depth, width, stage_budget=48):
    target, host = pair
    return host.drafter(target, TreeOptions(total, stage_budget, topk_k=width, tree_depth=depth))


def begun(pair, folder, *tree):
    chain = load_file(folder / "chain.safetensors")
    drafter = drafter_of(pair, *tree)
    drafter.reset(64)
    drafter.begin(chain["target_features"], chain["extend_input_ids"].tolist())
    return drafter, chain


def near(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_target_and_taps_are_the_reference_s(pair, folder):
    model, host = pair
    chain = load_file(folder / "chain.safetensors")
    target = Target(model, host.taps)
    target.reset(32)
    with torch.inference_mode():
        root, features = target.prefill(chain["prompt_ids"].tolist())
    target.close()
    assert host.taps == ("layers.1", "layers.3", "layers.4")
    assert root == chain["root"].item()
    near(features, chain["target_features"])


@torch.inference_mode()
def test_extension_and_chain_equal_the_reference(pair, folder):
    drafter, chain = begun(pair, folder, 0, 7, 1)
    network, rows = drafter.network, len(chain["fused"])
    near(network.fuse(chain["target_features"]), chain["fused"])
    near(drafter._state_1D[0], chain["extend_out"][-1])
    for rows_seen in range(1, rows):
        drafter.reset(64)
        drafter.begin(chain["target_features"][:rows_seen], chain["extend_input_ids"][:rows_seen].tolist())
        near(drafter._state_1D[0], chain["extend_out"][rows_seen - 1])
        near(network.logits(drafter._state_1D)[0], chain["extend_logits"][rows_seen - 1])
    drafter.reset(64)
    drafter.begin(chain["target_features"], chain["extend_input_ids"].tolist())
    near(network.logits(drafter._state_1D)[0], chain["extend_logits"][-1])
    near(drafter.cache.store[0, 0, 0, :, :rows], chain["stable_k"])
    near(drafter.cache.store[1, 0, 0, :, :rows], chain["stable_v"])
    segment = drafter.first_stage()
    assert segment.chain == chain["chain_target_ids"].tolist()
    near(torch.tensor(segment.log_probs), chain["chain_logprobs"])
    states = torch.cat(drafter._beam._levels)
    near(states, chain["chain_states"])
    near(network.logits(states), chain["chain_logits"])
    near(drafter.cache.store[0, 0, 0, :, rows : rows + 7], chain["chain_k"][:, :7])
    near(drafter.cache.store[1, 0, 0, :, rows : rows + 7], chain["chain_v"][:, :7])
    assert drafter.target_ids[chain["chain_draft_ids"]].tolist() == segment.chain
    # The last token's row comes into being where a next stage begins.
    drafter.next_stage()
    near(drafter.cache.store[:, 0, 0, :, rows + 7], torch.stack((chain["chain_k"], chain["chain_v"]))[:, :, 7])


@torch.inference_mode()
@pytest.mark.parametrize("name", ["tree_default", "tree_small"])
def test_trees_equal_the_reference(pair, folder, name, monkeypatch):
    with safe_open(folder / f"{name}.safetensors", "pt") as file:
        total, depth, width = (int(file.metadata()[key]) for key in ("total_tokens", "depth", "top_k"))
    expected = load_file(folder / f"{name}.safetensors")
    drafter, chain = begun(pair, folder, total, depth, width)
    expansions = []
    monkeypatch.setattr(
        "dloop.hosts.eagle3.drafter.expand", lambda *a: (expansions.append(expand(*a)), expansions[-1])[1]
    )
    segment = drafter.first_stage()
    (entries,) = expansions
    assert [drafter._tokens[draft_id] for draft_id in entries.ids] == expected["all_entry_tokens"].tolist()
    assert entries.parents == expected["all_entry_parents"].tolist()
    near(torch.tensor(entries.scores), expected["all_entry_scores"])
    kept = sorted(best_entries(entries, total - 1))
    assert kept == expected["entry_ids"][1:].tolist()
    near(torch.tensor([0.0, *(entries.scores[entry] for entry in kept)]), expected["scores"])
    tree = DraftTree(int(chain["root"]))
    tree.graft(*segment.subtree(total))
    assert tree.tokens == expected["tokens"].tolist()
    assert tree.parents == expected["parents"].tolist()
    assert tree.depths == expected["depth"].tolist()
    assert torch.equal(tree.ancestor_mask(), expected["mask"])
    leaves = sorted(set(range(len(tree))) - set(tree.parents))
    found = [tree.ancestor_mask()[leaf].nonzero()[:, 0].tolist() for leaf in leaves]
    assert found == [[node for node in row if node >= 0] for row in expected["retrieve_indices"].tolist()]


def decode(pair, prompt, settings, depth=7, width=10, watch=None):
    model, host = pair
    target = Target(model, host.taps)
    if watch is not None:
        verify = target.verify
        target.verify = lambda tree: (watch.append(tree), verify(tree))[1]
    drafter = drafter_of(pair, settings.tree_budget, depth, width, settings.stage_tree_budget)
    try:
        return generate(target, drafter, prompt, settings, Clock(CPU))
    finally:
        target.close()


def lengths(generation):
    return [r.acceptance_length for r in generation.rounds]


@pytest.mark.parametrize("shape", ["60/7/10", "16/3/4", "8/1/3"])
def test_generation_equals_the_reference(pair, folder, shape):
    total, depth, width = map(int, shape.split("/"))
    for case in json.loads((folder / "generation.json").read_text()):
        trees = []
        settings = Settings(case["max_new_tokens"], frozenset([case["eos"]]), tree_budget=total)
        found = decode(pair, case["prompt"], settings, depth, width, trees)
        expected = case["tree"][shape]
        assert found.output_ids == case["greedy_ids"]
        # That harness stops as soon as the root is the last token wanted, ours verifies it.
        assert lengths(found)[: len(expected["acceptance_lengths"])] == expected["acceptance_lengths"]
        assert len(found.rounds) <= len(expected["acceptance_lengths"]) + 1
        for tree, name in zip(trees, ("first_tree", "second_tree"), strict=False):
            if expected.get(name):
                assert tree.tokens == expected[name]["tokens"]
                assert tree.parents == expected[name]["parents"]


def loop_cases():
    from tests.conftest import GOLDEN

    return json.loads((GOLDEN / "eagle3/dloop_generation.json").read_text())


@pytest.mark.parametrize("case", loop_cases(), ids=lambda case: f"{case['loop_gate']}/{case['tree_budget']}")
def test_loop_generation_equals_the_reference(pair, case):
    gate = Gate(float(case["loop_gate"]), None if case["stage_cap"] is None else case["stage_cap"] - 1)
    settings = Settings(case["max_new_tokens"], frozenset([1]), gate, case["tree_budget"], case["stage_tree_budget"])
    trees = []
    found = decode(pair, case["prompt"], settings, case["depth"], case["top_k"], trees)
    assert found.output_ids == case["ids"]
    if case["min_gate_margin"] is not None and case["min_gate_margin"] < 1e-3:
        return
    known = len(case["acceptance_lengths"])
    rounds = found.rounds[:known]
    assert len(found.rounds) <= known + 1
    assert lengths(found)[:known] == case["acceptance_lengths"]
    assert [len(r.segments) - 1 for r in rounds] == case["additional_stages"]
    assert [r.verified_tokens for r in rounds] == case["nodes_verified"]
    for r, sums in zip(rounds, case["gate_sums"], strict=True):
        assert [segment.gate_sum for segment in r.segments] == pytest.approx(sums, abs=1e-4)
    starts = [len(case["prompt"]) + sum(lengths(found)[:place]) for place in range(len(trees))]
    for looped in case["looped_rounds"]:
        place = starts.index(looped["start"])
        tree, behind = trees[place], looped["start"] + len(looped["path"]) - len(case["prompt"])
        assert tree.depths == looped["depth"]
        assert lengths(found)[place] == len(looped["path"])
        assert found.output_ids[behind : behind + 1] in ([], [looped["new_root"]])
        assert tree.tokens == looped["tokens"]
        assert tree.parents == looped["parents"]


def test_the_reference_holds_rounds_with_several_stages():
    assert max(max(case["additional_stages"]) for case in loop_cases()) > 1
    assert math.inf > sum(len(case["looped_rounds"]) for case in loop_cases()) > 5
