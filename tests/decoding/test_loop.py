"""The loop: golden generations, losslessness for every gate and tree, stop and length rules."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from dloop.decoding.clock import OUTSIDE_DECODING, Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.target import Target
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import Taps, load_target
from dloop.trees.draft_tree import DraftTree

from .scripted import ScriptedDrafter
from .watching import answers_of

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(scope="module", params=["dflash", "dspark", "domino"])
def folder(request, golden):
    return golden / request.param


@pytest.fixture(scope="module")
def model(folder):
    return load_target(str(folder / "target"), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def host(folder):
    return load_host(str(folder / "draft"), dtype=torch.float32, device=CPU)


def greedy(model, prompt, count):
    """Plain greedy decoding without any cache: the oracle of everything here."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def decode(model, host, prompt, settings):
    target = Target(model, host.taps if host else ())
    try:
        drafter = host.drafter(model) if host else SilentDrafter()
        return generate(target, drafter, prompt, settings, Clock(CPU))
    finally:
        target.close()


def lengths(generation):
    return [r.acceptance_length for r in generation.rounds]


@pytest.mark.parametrize("case", ["no_stop", "with_stop"])
def test_released_generation_equals_the_reference(folder, model, host, case):
    reference = json.loads((folder / "generation.json").read_text())
    stops = frozenset(reference[case].get("stop_token_ids", []))
    prompt = reference["prompt_ids"]
    result = decode(model, host, prompt, Settings(reference["max_new_tokens"], stops))
    assert prompt + result.output_ids == reference[case]["output_ids"]
    expected = list(reference[case]["acceptance_lengths"])
    if folder.name == "dspark" and reference[case].get("stop_is_accepted_draft"):
        # That reference leaves the target's own token out of the last round's length.
        expected[-1] += 1
    assert lengths(result) == expected
    assert result.finish == ("stop" if stops else "length")


@torch.inference_mode()
def test_verifications_of_two_rounds_equal_the_reference(folder, model, host):
    reference = load_file(folder / "rounds.safetensors")
    target = Target(model, host.taps)
    answers = answers_of(target)
    target.reset(64)
    root, features = target.prefill(reference["prompt_ids"][0].tolist())
    known, block = 0, host.network.config.block_size
    for r in range(2):
        expected = {name.split(".")[1]: part[0] for name, part in reference.items() if name.startswith(f"round{r}.")}
        torch.testing.assert_close(features, expected["target_hidden"], atol=1e-4, rtol=0)
        assert expected["block_ids"].tolist() == [root, *[host.network.config.mask_token_id] * (block - 1)]
        assert expected["position_ids"].tolist() == list(range(known, target.cache.length + block))
        tree, drafts = DraftTree(root), expected["draft_tokens"].tolist()
        tree.graft(drafts, range(-1, len(drafts) - 1))
        known, choices = target.cache.length, target.verify(tree)
        torch.testing.assert_close(answers[-1][0], expected["verify_logits"], atol=1e-4, rtol=0)
        path = tree.longest_accepted(choices)
        assert len(path) - 1 == expected["accepted"].item()
        features, root = target.commit(path), choices[path[-1]]
    target.close()


def test_released_rounds_equal_the_derived_reference(folder, model, host):
    reference = json.loads((folder / "derived_loop_generation.json").read_text())
    expected, limit = reference["no_loop"], 4 * reference["max_new_tokens"]
    rounds = decode(model, host, reference["prompt_ids"], Settings(limit, frozenset(), Gate())).rounds
    rounds = rounds[: len(expected["acceptance_lengths"])]
    assert [r.acceptance_length for r in rounds] == expected["acceptance_lengths"]
    for ours, theirs in zip(rounds, expected["gate_sums"], strict=True):
        assert [s.gate_sum for s in ours.segments] == pytest.approx(theirs, abs=1e-3)


@pytest.mark.parametrize("run", range(3))
def test_looped_generation_equals_the_derived_reference(folder, model, host, run):
    reference = json.loads((folder / "derived_loop_generation.json").read_text())
    expected, prompt = reference["runs"][run], reference["prompt_ids"]
    gate = Gate(expected["loop_gate"], reference["max_additional_stages"])
    # The reference drafts past the token limit, so ask for more and compare the rounds it lists.
    result = decode(model, host, prompt, Settings(4 * reference["max_new_tokens"], frozenset(), gate))
    rounds = result.rounds[: len(expected["acceptance_lengths"])]
    assert (prompt + result.output_ids)[: len(expected["output_ids"])] == expected["output_ids"]
    assert [r.acceptance_length for r in rounds] == expected["acceptance_lengths"]
    assert [len(r.segments) - 1 for r in rounds] == expected["additional_stages"]
    for ours, theirs in zip(rounds, expected["gate_sums"], strict=True):
        assert [s.gate_sum for s in ours.segments] == pytest.approx(theirs, abs=1e-3)


def test_loop_stage_rows_equal_the_derived_trace(folder, model, host):
    trace = load_file(folder / "derived_loop_trace.safetensors")
    names = sorted({name.rsplit(".", 1)[0] for name in trace})
    reference = json.loads((folder / "derived_loop_generation.json").read_text())
    ids = reference["runs"][0]["output_ids"]
    with torch.inference_mode(), Taps(model, host.taps) as taps:
        model(torch.tensor([ids]), use_cache=False)
        features = torch.cat(list(taps.take().values()), dim=-1)[0]
        for name in names:
            anchor, stage = trace[f"{name}.a_and_stage"].tolist()
            extra = trace[f"{name}.extra_positions"].tolist()
            assert extra == list(range(anchor + 1, anchor + stage * host.network.config.stage_length))
            drafter = host.drafter(model)
            drafter.reset(len(ids))
            drafter.begin(features[:anchor], [ids[anchor]])
            segment = drafter.first_stage()
            for _ in range(stage):
                segment = drafter.next_stage()
            rows = trace[f"{name}.hidden"][0, -drafter.stage_length :]
            torch.testing.assert_close(drafter._bank[-drafter.stage_length :], rows, atol=1e-4, rtol=0)
            assert segment.chain == trace[f"{name}.draft_tokens"].tolist()


PROMPTS = [[126, 84, 63, 80], [5], [17, 3, 99, 120, 22, 7, 64, 1, 2], list(range(40, 75))]
GATES = [Gate(), Gate(-0.5), Gate(-4.0), Gate(-math.inf, 3), Gate(-math.inf)]


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("gate", GATES, ids=str)
def test_ids_equal_plain_greedy(model, host, prompt, gate):
    expected = greedy(model, prompt, 40)
    for limit in (1, 2, 17, 40):
        result = decode(model, host, prompt, Settings(limit, frozenset(), gate))
        assert result.output_ids == expected[:limit]
        produced = 1 + sum(lengths(result))
        assert limit <= produced - 1 < limit + (result.rounds[-1].verified_tokens)


def test_silent_drafter_is_plain_greedy(model):
    result = decode(model, None, PROMPTS[0], Settings(24, frozenset()))
    assert result.output_ids == greedy(model, PROMPTS[0], 24)
    assert set(lengths(result)) == {1}
    assert {r.verified_tokens for r in result.rounds} == {1}


@pytest.mark.parametrize("gate", [Gate(), Gate(-math.inf)], ids=str)
def test_stops_behind_the_first_stop_token(model, host, gate):
    plain = greedy(model, PROMPTS[0], 40)
    for place in (0, 5, 11):
        result = decode(model, host, PROMPTS[0], Settings(40, frozenset({plain[place]}), gate))
        assert result.output_ids == plain[: plain.index(plain[place]) + 1]
        assert result.finish == "stop"
    first = decode(model, host, PROMPTS[0], Settings(40, frozenset({plain[0]}), gate))
    assert first.rounds == []


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [0, 9, 14])
def test_random_trees_are_lossless_and_features_are_those_of_a_fresh_prefill(model, seed, budget):
    expected = greedy(model, PROMPTS[0], 60)
    drafter = ScriptedDrafter(expected, length=5, vocabulary=130, seed=seed)
    target = Target(model, ("layers.1", "layers.3"))
    commit = target.commit
    target.commit = lambda path: (drafter.committed(len(path)), commit(path))[1]
    settings = Settings(40, frozenset(), Gate(-1.0), budget, budget)
    result = generate(target, drafter, PROMPTS[0], settings, Clock(CPU))
    assert result.output_ids == expected[:40]
    for done in result.rounds:
        assert len(done.stage_rows) == len(done.stage_accepted) == len(done.segments)
        assert 1 + sum(done.stage_rows) == done.verified_tokens
        assert 1 + sum(done.stage_accepted) == done.acceptance_length
        # A later stage's nodes hang below the chain of the one before: none is accepted unless that chain was.
        for accepted, later, segment in zip(done.stage_accepted, done.stage_accepted[1:], done.segments, strict=False):
            assert not later or accepted == len(segment.chain)
    if budget:
        assert any(r.verified_tokens > 1 + 5 * len(r.segments) for r in result.rounds)
    assert any(len(r.segments) > 1 for r in result.rounds)
    seen = torch.cat(drafter.features)
    target.reset(128)
    with torch.inference_mode():
        _, fresh = target.prefill(PROMPTS[0] + expected[: len(seen) - len(PROMPTS[0])])
    torch.testing.assert_close(seen, fresh, atol=1e-4, rtol=1e-4)
    target.close()


def test_a_watcher_sees_every_token_with_the_round_that_made_it(model, host):
    seen = []
    target = Target(model, host.taps)
    settings = Settings(24, frozenset(), Gate(-math.inf, 1))
    watch = lambda tokens, drafted: seen.append((list(tokens), drafted))  # noqa: E731
    result = generate(target, host.drafter(model), PROMPTS[0], settings, Clock(CPU), watch)
    target.close()
    assert seen[0] == (result.output_ids[:1], None)
    assert [drafted for _, drafted in seen[1:]] == result.rounds
    assert all(len(tokens) == drafted.acceptance_length for tokens, drafted in seen[1:])
    assert [token for tokens, _ in seen for token in tokens][:24] == result.output_ids


def test_clock_charges_every_part(model, host):
    target, clock = Target(model, host.taps), Clock(CPU)
    generate(target, host.drafter(model), PROMPTS[0], Settings(12, frozenset(), Gate(-math.inf, 1)), clock)
    target.close()
    parts = clock.read()
    assert set(parts) == {*OUTSIDE_DECODING, "draft", "gate", "tree_build", "verify", "commit"}
    assert all(seconds > 0 for seconds in parts.values())
