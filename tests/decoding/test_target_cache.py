"""Rollback of targets whose cache is more than a length: ids stay the target's own, states those of a fresh prefill."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from dloop.cli import UserError
from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.target import Target
from dloop.hosts import delta_rule, target_cache
from dloop.hosts.host import Segment
from dloop.hosts.target_cache import RecordingCache
from dloop.hosts.target_model import load_target
from dloop.trees.draft_tree import DraftTree

from .scripted import ScriptedDrafter
from .watching import answers_of

CPU = torch.device("cpu")
TARGETS = {"mtp_qwen35": "checkpoint", "mtp_gemma4": "target"}


@pytest.fixture(scope="module", params=TARGETS)
def case(request, golden):
    """The target and its prompts with the target's own greedy continuations."""
    folder = golden / request.param
    model = load_target(str(folder / TARGETS[request.param]), dtype=torch.float32, device=CPU)
    return model, [(trace["prompt"], trace["greedy"]) for trace in json.loads((folder / "traces.json").read_text())]


@pytest.fixture(scope="module")
def qwen(golden):
    return load_target(str(golden / "mtp_qwen35/checkpoint"), dtype=torch.float32, device=CPU)


def chain(tokens):
    tree = DraftTree(tokens[0])
    tree.graft(tokens[1:], range(-1, len(tokens) - 2))
    return tree


def scripted(model, prompt, greedy, accuracy, seed=0, stage=4, extra_stages=2):
    """A generation with a drafter that is right with this chance a token, and how often the target ran."""
    target = Target(model, ("norm",))
    drafter = ScriptedDrafter(greedy, stage, vocabulary=96, seed=seed, accuracy=accuracy)
    commit, forwards = target.commit, []
    target.commit = lambda path: (drafter.committed(len(path)), commit(path))[1]
    handle = model.register_forward_hook(lambda *_: forwards.append(1))
    try:
        settings = Settings(48, frozenset(), Gate(-math.inf, extra_stages))
        return generate(target, drafter, prompt, settings, Clock(CPU)), len(forwards)
    finally:
        handle.remove()
        target.close()


def test_plain_decoding_is_the_targets_own(case):
    model, prompts = case
    for prompt, greedy in prompts:
        result = generate(Target(model), SilentDrafter(), prompt, Settings(48, frozenset()), Clock(CPU))
        assert result.output_ids == greedy[:48]


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 0.9, 1.0])
def test_any_drafter_is_lossless_with_one_forward_a_round(case, accuracy):
    model, prompts = case
    accepted = set()
    for number, (prompt, greedy) in enumerate(prompts):
        result, forwards = scripted(model, prompt, greedy, accuracy, seed=number)
        assert result.output_ids == greedy[:48]
        assert forwards == 1 + len(result.rounds)
        accepted |= {r.acceptance_length / r.verified_tokens for r in result.rounds[:-1]}
    if accuracy == 1:
        assert accepted == {1.0}
    elif accuracy:
        assert min(accepted) < 0.1 < max(accepted)


def test_rounds_that_verify_the_root_alone_mix_with_longer_ones(case):
    model, [(prompt, greedy), *_] = case
    target = Target(model)
    target.reset(80)
    with torch.inference_mode():
        root, _ = target.prefill(prompt)
        said = [root]
        for rows in (1, 4, 1, 1, 3, 1):
            tree = chain(greedy[len(said) - 1 : len(said) - 1 + rows])
            choices = target.verify(tree)
            path = tree.longest_accepted(choices)
            target.commit(path)
            said += [tree.tokens[node] for node in path[1:]] + [choices[path[-1]]]
            assert target.cache.length == len(prompt) + len(said) - 1
    assert said == greedy[: len(said)]
    assert len(said) == 12


def states(cache):
    """Everything the library's cache holds of the committed rows."""
    found = {}
    for index, layer in enumerate(cache.library.layers):
        if hasattr(layer, "recurrent_states"):
            found[f"{index} state"], found[f"{index} conv"] = layer.recurrent_states[0], layer.conv_states[0]
        else:
            found[f"{index} keys"], found[f"{index} values"] = layer.keys, layer.values
    return found


@pytest.mark.parametrize("accepted", range(6))
def test_the_cache_behind_a_rejection_is_that_of_the_accepted_tokens(case, accepted):
    model, prompts = case
    prompt, greedy = prompts[1]
    rolled, fresh = Target(model), Target(model)
    with torch.inference_mode():
        for target in (rolled, fresh):
            target.reset(64)
            target.prefill(prompt)
        wrong = (greedy[accepted + 1] + 1) % 96
        tree = chain([*greedy[: accepted + 1], wrong, 5, 6][:6])
        path = tree.longest_accepted(rolled.verify(tree))
        assert path == list(range(accepted + 1))
        rolled.commit(path)
        for token in greedy[: accepted + 1]:
            fresh.verify(chain([token]))
            fresh.commit([0])
    expected = states(fresh.cache)
    for name, found in states(rolled.cache).items():
        torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("accepted", range(8))
def test_states_behind_a_rollback_equal_the_reference(golden, qwen, accepted):
    reference = load_file(golden / "mtp_qwen35/rollback.safetensors")
    target = Target(qwen)
    with torch.inference_mode():
        target.reset(64)
        target.prefill(reference["prefix_ids"].tolist())
        if accepted:
            target.verify(chain(reference["block_ids"].tolist()))
            target.commit(list(range(accepted)))
    linear = [layer for layer in target.cache.library.layers if hasattr(layer, "recurrent_states")]
    for number, layer in enumerate(linear):
        state, conv = reference[f"L{number}.S{accepted}"], reference[f"L{number}.conv{accepted}"]
        torch.testing.assert_close(layer.recurrent_states[0], state, atol=2e-5 * float(state.abs().max()), rtol=0)
        torch.testing.assert_close(layer.conv_states[0], conv, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [1, 7])
def test_logits_and_inputs_of_the_rule_equal_the_reference(golden, qwen, rows):
    reference = load_file(golden / "mtp_qwen35/rollback.safetensors")
    block, expected = reference["block_ids"].tolist(), reference["step_logits" if rows == 1 else "block_logits"]
    target = Target(qwen)
    answers = answers_of(target)
    with torch.inference_mode():
        target.reset(64)
        target.prefill(reference["prefix_ids"].tolist())
        for start in range(0, len(block), rows):
            target.verify(chain(block[start : start + rows]))
            if rows == 7:
                for number, found in enumerate(target.cache._rule._blocks):
                    for part, name in (("key", "k"), ("value", "v"), ("g", "g"), ("beta", "beta")):
                        seen, theirs = getattr(found, part), reference[f"L{number}.{name}"]
                        theirs = theirs.repeat_interleave(seen.shape[2] // theirs.shape[2], dim=2)
                        torch.testing.assert_close(seen, theirs, atol=1e-4, rtol=0, msg=f"L{number}.{name}")
            target.commit(list(range(rows)))
    torch.testing.assert_close(torch.cat([part for part, _ in answers[1:]]), expected, atol=1e-4, rtol=0)


def test_cropping_alone_goes_wrong(golden, qwen, monkeypatch):
    class Stubborn(SilentDrafter):
        stage_length = 3

        def first_stage(self):
            return Segment([5, 6, 7], [-1.0] * 3)

    traces = json.loads((golden / "mtp_qwen35/traces.json").read_text())
    right = []
    for rule in (delta_rule.DeltaRule, lambda model: None):
        monkeypatch.setattr(target_cache, "DeltaRule", rule)
        for trace in traces[:2]:
            result = generate(Target(qwen), Stubborn(), trace["prompt"], Settings(48, frozenset()), Clock(CPU))
            right.append(result.output_ids == trace["greedy"][:48])
    assert right == [True, True, False, False]


def test_other_kernels_behind_the_names_are_recorded_and_replayed(golden, qwen, monkeypatch):
    """As with flash-linear-attention: the library's names lead to functions that take only what they know."""
    traces = json.loads((golden / "mtp_qwen35/traces.json").read_text())
    prompt, greedy = traces[0]["prompt"], traces[0]["greedy"]
    library = delta_rule.DeltaRule(qwen)._library
    used = {delta_rule.CHUNK: 0, delta_rule.RECURRENT: 0}

    def kernel(name):
        inner = getattr(library, name)

        def wrapped(query, key, value, **options):
            used[name] += 1
            return inner(query, key, value, **options)

        return wrapped

    for name in used:
        monkeypatch.setattr(library, name, kernel(name))
    result, forwards = scripted(qwen, prompt, greedy, accuracy=0.7)
    assert result.output_ids == greedy[:48]
    assert used[delta_rule.CHUNK] == 6, "the prompt alone goes through the chunk rule"
    assert used[delta_rule.RECURRENT] > 6 * (forwards - 1), "verifications, and a replay where drafts were rejected"


def test_the_names_are_put_back_even_after_an_error(qwen):
    rule = delta_rule.DeltaRule(qwen)
    before = [getattr(rule._library, name) for name in (delta_rule.CHUNK, delta_rule.RECURRENT)]
    with pytest.raises(KeyError), rule.recording():
        raise KeyError
    assert before == [getattr(rule._library, name) for name in (delta_rule.CHUNK, delta_rule.RECURRENT)]


def test_a_library_that_does_not_look_the_rule_up_is_refused(qwen, monkeypatch):
    target = Target(qwen)
    target.reset(32)
    with torch.inference_mode():
        target.prefill([5, 6, 7])
        monkeypatch.setattr(delta_rule.DeltaRule, "_bind", lambda *_: None)
        with pytest.raises(UserError, match=r"does not let the linear layers of Qwen3_5ForCausalLM be rolled back"):
            target.verify(chain([1, 2, 3]))
    monkeypatch.delattr(delta_rule.DeltaRule(qwen)._library, delta_rule.CHUNK)
    with pytest.raises(UserError, match="install the version that constraints"):
        Target(qwen)


def test_a_tree_is_refused(case):
    model, _ = case
    tree = DraftTree(1)
    tree.graft([2, 3], [-1, -1])
    with pytest.raises(UserError, match="leave out --tree-budget"):
        Target(model).verify(tree)


def test_unknown_layers_and_too_old_a_library_are_refused(golden, monkeypatch):
    model = load_target(str(golden / "mtp_gemma4/target"), dtype=torch.float32, device=CPU)
    monkeypatch.setattr(model.config.get_text_config(), "layer_types", ["chunked_attention"] * 6)
    with pytest.raises(UserError, match="layers of type chunked_attention"):
        Target(model)
    monkeypatch.undo()
    monkeypatch.delattr("transformers.cache_utils.Cache.activate_past_recording")
    with pytest.raises(UserError, match="cannot roll back the cache of Gemma4Unified"):
        Target(model)


def test_shared_keys_are_those_of_the_last_layer_of_each_kind(golden):
    model = load_target(str(golden / "mtp_gemma4/target"), dtype=torch.float32, device=CPU)
    target = Target(model)
    target.reset(64)
    with torch.inference_mode():
        target.prefill(list(range(3, 30)))
    shared = target.cache.shared_kv()
    assert isinstance(target.cache, RecordingCache)
    assert shared["full_attention"][0] is target.cache.library.layers[5].keys
    assert shared["sliding_attention"][1] is target.cache.library.layers[4].values
    # The clean rule: everything before the root, or the last window - 1 positions of it.
    assert [shared[kind][0].shape[-2] for kind in ("full_attention", "sliding_attention")] == [27, 15]
