"""Decoding over static shapes against the eager runtime: ids, rounds, padding, row counts, refusals."""

import gc
import json
import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from dloop import benchmark
from dloop.cli import UserError
from dloop.decoding import static_shapes
from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.static_drafter import StaticBackbone, over_static_shapes
from dloop.decoding.static_target import accepted_rows
from dloop.decoding.target import Target
from dloop.hosts.block.cached import CachedBackbone
from dloop.hosts.kv_cache import KVCache
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import load_target
from dloop.hosts.tree_options import TreeOptions
from dloop.trees.draft_tree import DraftTree

from .test_loop import greedy

CPU = torch.device("cpu")
PROMPTS = ([5], [126, 84, 63, 80])


@pytest.fixture(scope="module", params=["dflash", "dspark", "domino"])
def pair(request, golden):
    folder = golden / request.param
    model = load_target(str(folder / "target"), dtype=torch.float32, device=CPU)
    return model, load_host(str(folder / "draft"), dtype=torch.float32, device=CPU)


@pytest.fixture
def short_spans(monkeypatch):
    """Spans of few rows, so that a response crosses several."""
    monkeypatch.setattr(static_shapes, "SMALLEST_SPAN", 16)


def decode(model, host, prompt, settings, runtime):
    target = Target(model, host.taps, runtime)
    drafter = host.drafter(model, TreeOptions(settings.tree_budget, settings.stage_tree_budget), target.cache)
    if runtime == "graphs":
        drafter = over_static_shapes(drafter)
    return generate(target, drafter, prompt, settings, Clock(CPU))


def rounds(generation):
    return [
        (r.acceptance_length, r.verified_tokens, r.stage_rows, r.stage_accepted, [s.chain for s in r.segments])
        for r in generation.rounds
    ]


@pytest.mark.usefixtures("short_spans")
@pytest.mark.parametrize("gate", [Gate(), Gate(-0.5), Gate(-math.inf, 2)], ids=str)
@pytest.mark.parametrize(("budget", "stage_budget"), [(0, 0), (3, 2), (64, 5)])
def test_ids_equal_plain_greedy_and_rounds_the_eager_runtimes(pair, gate, budget, stage_budget):
    model, host = pair
    settings = Settings(30, frozenset(), gate, budget, stage_budget)
    for prompt in PROMPTS:
        eager, static = (decode(model, host, prompt, settings, runtime) for runtime in ("lean", "graphs"))
        assert static.output_ids == greedy(model, prompt, 30)
        assert rounds(static) == rounds(eager)


def test_golden_acceptance_is_reproduced(golden):
    case = json.loads((golden / "ddtree/generation.json").read_text())[0]
    model = load_target(str(golden / "ddtree/target"), dtype=torch.float32, device=CPU)
    host = load_host(str(golden / "ddtree/draft"), dtype=torch.float32, device=CPU)
    settings = Settings(case["max_new_tokens"], frozenset(), tree_budget=64)
    eager, static = (decode(model, host, case["prompt"], settings, runtime) for runtime in ("lean", "graphs"))
    assert static.output_ids == case["greedy_ids"]
    assert rounds(static) == rounds(eager)
    assert max(r.acceptance_length for r in static.rounds) > 1


def test_the_baseline_runs_over_one_row(pair):
    model, _ = pair
    target = Target(model, (), "graphs")
    result = generate(target, SilentDrafter(), PROMPTS[1], Settings(20, frozenset()), Clock(CPU))
    assert result.output_ids == greedy(model, PROMPTS[1], 20)
    assert [rows for _, rows, _ in target._runtime._shapes._made] == [1]


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 40])
@torch.inference_mode()
def test_verifications_and_commits_equal_the_lean_runtimes(pair, rows):
    model, host = pair
    answers = []
    for runtime in ("lean", "graphs"):
        target = Target(model, host.taps, runtime)
        target.reset(128)
        target.prefill(PROMPTS[1])
        wanted = greedy(model, PROMPTS[1], 40)
        given = 0
        for shift in range(3):
            before = target.cache.memory.store[..., : target.cache.length, :].clone()
            tree = bushy_tree(wanted[given : given + 2 + rows // 4], rows, shift)
            choices = target.verify(tree)
            path = tree.longest_accepted(choices)
            features = target.commit(path)
            kept = target.cache.memory.store[..., : target.cache.length, :].clone()
            assert torch.equal(before, kept[..., : before.shape[-2], :])
            assert len(path) == rows // 4 + 1
            given += len(path)
            answers.append((choices, path, features.clone(), kept))
    for (choices, path, *theirs), (our_choices, our_path, *ours) in zip(answers[:3], answers[3:], strict=True):
        assert (our_choices, our_path) == (choices, path)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def bushy_tree(path, rows, seed):
    """A tree of about `rows` nodes: the tokens of `path` but the last from the root down, wrong ones beside each."""
    tree, at = DraftTree(path[0]), 0
    for token in path[1:]:
        for wrong in range(rows // (len(path) - 1) - 1):
            tree.add((token + 1 + wrong + seed) % 131, at)
        if tree.depths[at] < len(path) - 2:
            at = tree.add(token, at)
    return tree


@given(st.data())
def test_rows_accepted_on_the_device_are_the_loops_path(data):
    tree = DraftTree(0)
    for _ in range(data.draw(st.integers(0, 12))):
        tree.add(data.draw(st.integers(0, 2)), data.draw(st.integers(0, len(tree) - 1)))
    choices = data.draw(st.lists(st.integers(0, 2), min_size=len(tree), max_size=len(tree)))
    accepted = accepted_rows(torch.tensor(tree.tokens), torch.tensor(choices), tree.ancestor_mask())
    assert accepted.nonzero()[:, 0].tolist() == tree.longest_accepted(choices)


@torch.inference_mode()
def test_more_rows_than_any_count_run_as_without_graphs(pair, monkeypatch):
    monkeypatch.setattr(static_shapes, "ROWS", (1, 4))
    model, host = pair
    settings = Settings(20, frozenset(), Gate(-math.inf, 2), 12, 4)
    eager, static = (decode(model, host, PROMPTS[0], settings, runtime) for runtime in ("lean", "graphs"))
    assert static.output_ids == eager.output_ids
    assert rounds(static) == rounds(eager)


@torch.inference_mode()
def test_a_stage_equals_the_eager_one_whatever_its_context(pair):
    _, host = pair
    config = host.network.config
    generator = torch.Generator().manual_seed(0)
    caches, outputs = [], []
    embed = torch.nn.Embedding(64, config.hidden_size)
    for kind in (CachedBackbone, StaticBackbone):
        generator.manual_seed(0)
        cache = KVCache(config.layers, config.kv_heads, config.head_dim, torch.float32, CPU)
        cache.reserve(40)
        backbone, position = kind(host.network, cache, embed), 0
        for context in (300, 3, 1, 8, 0, 20, 9):
            made = torch.randn(context, config.hidden_size, generator=generator)
            ids = torch.randint(0, 64, (config.block_size,), generator=generator)
            committed = cache.store[..., : cache.length, :].clone()
            rows, anchor = backbone(ids, made, position, position + context + 1, lambda raw, anchor: (raw, anchor))
            assert anchor.tolist() == ids[:1].tolist()
            outputs.append(rows.clone())
            assert torch.equal(cache.store[..., : committed.shape[-2], :], committed)
            position += context
        caches.append(cache.store[..., : cache.length, :])
    half = len(outputs) // 2
    torch.testing.assert_close(outputs[half:], outputs[:half], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(caches[1], caches[0], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_memory_that_moved_is_captured_again_and_fresh_memory_may_hold_anything(pair, monkeypatch):
    model, host = pair
    made = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, **kind: made(*shape, **kind).fill_(math.nan))
    target = Target(model, host.taps, "graphs")
    drafter = over_static_shapes(host.drafter(model, TreeOptions(), target.cache))
    shapes, captured = target._runtime._shapes, []
    for limit in (600, 600, 2600):
        target.reset(limit)
        drafter.reset(limit)
        # The loop's own resets ask for less, so that the memory is as large as these made it.
        result = generate(target, drafter, PROMPTS[1], Settings(12, frozenset()), Clock(CPU))
        assert result.output_ids == greedy(model, PROMPTS[1], 12)
        captured.append(set(shapes._made.values()))
    assert captured[0] == captured[1]
    assert captured[0].isdisjoint(captured[2])


@torch.inference_mode()
def test_what_was_captured_goes_with_the_memory_it_was_captured_over(pair):
    model, host = pair
    target = Target(model, host.taps, "graphs")
    drafter = over_static_shapes(host.drafter(model, TreeOptions(4), target.cache))
    generate(target, drafter, PROMPTS[1], Settings(8, frozenset(), tree_budget=4), Clock(CPU))
    gc.collect()
    gc.disable()
    try:
        for shapes in (target._runtime._shapes, drafter.backbone._shapes):
            made = [weakref.ref(one) for one in shapes._made.values()]
            assert made
            shapes._made.clear()
            assert all(one() is None for one in made)
    finally:
        gc.enable()


def test_outputs_keep_their_addresses():
    values = iter(torch.arange(6.0).view(3, 2))
    replay = static_shapes.Replay(CPU)
    first = replay(lambda: (next(values),))[0]
    held = first.clone()
    assert replay(lambda: (next(values),))[0] is first
    assert not torch.equal(first, held)


def test_other_drafts_are_refused(golden):
    model = load_target(str(golden / "eagle3/target"), dtype=torch.float32, device=CPU)
    host = load_host(str(golden / "eagle3/draft"), dtype=torch.float32, device=CPU)
    with pytest.raises(UserError, match="serves DFlash, DSpark and Domino drafts; use --runtime eager"):
        over_static_shapes(host.drafter(model))


def test_other_targets_are_refused():
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, hidden_act="gelu")
    with pytest.raises(UserError, match="computes plain Qwen3 models"):
        Target(Qwen3ForCausalLM(config).eval(), (), "graphs")


def test_the_librarys_forward_is_refused(tmp_path):
    arguments = ["--model", "m", "--baseline", "--dataset", "gsm8k", "--output", str(tmp_path / "r.json")]
    with pytest.raises(UserError, match="add --target-runtime lean"):
        benchmark.main([*arguments, "--runtime", "graphs"])


def test_the_command_warms_up_the_whole_length_and_answers_as_the_eager_one(golden, tmp_path, monkeypatch):
    prompts, warmed = tmp_path / "ids.jsonl", []
    prompts.write_text(json.dumps({"prompt_ids": [5, 6, 80]}) + "\n")

    def watched(target, drafter, ids, settings, clock):
        warmed.append(settings.max_new_tokens)
        return generate(target, drafter, ids, settings, clock)

    monkeypatch.setattr("dloop.decoding.evaluation.generate", watched)
    folder, answers = golden / "dflash", []
    for runtime in ("eager", "graphs"):
        arguments = ["--model", folder / "target", "--draft-model", folder / "draft", "--dataset", prompts]
        arguments += ["--max-new-tokens", 90, "--loop-gate", -0.5, "--tree-budget", 8, "--stop-token-ids", "none"]
        arguments += ["--target-runtime", "lean", "--runtime", runtime, "--warmup-runs", 1, "--device", "cpu"]
        benchmark.main([*map(str, arguments), "--output", str(tmp_path / f"{runtime}.json")])
        result = json.loads((tmp_path / f"{runtime}.json").read_text())
        assert result["config"]["runtime"] == runtime
        answers.append((result["responses"][0]["output_ids"], result["responses"][0]["acceptance_lengths"]))
    assert answers[0] == answers[1]
    assert warmed == [64, 90, 90, 90]
