"""Decoding with the Gemma 4 assistant: reference rounds, target-only text, one target forward a round."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file

from dloop import benchmark
from dloop.data.loader import Batch
from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.target import Target
from dloop.hosts.host import ObjectiveOptions
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import load_target
from dloop.training.target_pass import FrozenTarget

CPU = torch.device("cpu")
GATES = {"-inf": Gate(-math.inf, 7), "-0.5": Gate(-0.5, 7), "1.0": Gate(1.0)}
TRACES = {"released_k6": Gate(1.0), "loop_k6_g-0.5": Gate(-0.5, 7)}


def load(folder, target="target", draft="assistant"):
    model = load_target(str(folder / target), dtype=torch.float32, device=CPU)
    return model, load_host(str(folder / draft), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def pair(golden):
    return load(golden / "mtp_gemma4")


@pytest.fixture(scope="module")
def traces(golden):
    return json.loads((golden / "mtp_gemma4/traces.json").read_text())


def decode(model, host, prompt, gate, tokens=64):
    target = Target(model, host.taps)
    try:
        return generate(target, host.drafter(model, cache=target.cache), prompt, settings(gate, tokens), Clock(CPU))
    finally:
        target.close()


def greedy(model, prompt, tokens=64):
    return generate(Target(model), SilentDrafter(), prompt, settings(Gate(), tokens), Clock(CPU)).output_ids


def settings(gate, tokens):
    return Settings(tokens, frozenset(), gate)


@pytest.mark.parametrize("name", TRACES)
def test_every_round_equals_the_reference(pair, traces, name):
    for case in traces:
        # The reference does not stop drafting near the limit, so more is asked for than is compared.
        result = decode(*pair, case["prompt"], TRACES[name], tokens=64 + 8 * 6)
        length, root = len(case["prompt"]), result.output_ids[0]
        for expected, found in zip(case[name], result.rounds, strict=False):
            chain = [token for segment in found.segments for token in segment.chain]
            log_probs = [number for segment in found.segments for number in segment.log_probs]
            assert (root, chain) == (expected["bonus_in"], expected["drafts"])
            assert len(found.segments) == expected["stages"]
            assert log_probs == pytest.approx(expected["draft_logprob"], abs=1e-3)
            assert [s.gate_sum for s in found.segments] == pytest.approx(expected["stage_sums"], abs=2e-3)
            assert found.acceptance_length == expected["accepted"] + 1
            assert length == expected["position_id"] == expected["start_len"] - 1
            length += found.acceptance_length
            root = result.output_ids[length - len(case["prompt"])]
            assert root == expected["verified_next"]
        assert len(result.rounds) >= len(case[name])
        assert result.output_ids[:64] == case["greedy"]


@pytest.mark.parametrize("name", TRACES)
def test_the_evaluation_command_reproduces_the_reference(golden, traces, tmp_path, name):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "result.json"
    prompts.write_text("".join(json.dumps({"prompt_ids": case["prompt"]}) + "\n" for case in traces))
    folder, gate = golden / "mtp_gemma4", TRACES[name]
    flags = {
        **{"model": folder / "target", "draft-model": folder / "assistant", "dataset": prompts, "output": out},
        **{"loop-gate": gate.threshold, "max-new-tokens": 64 + 8 * 6, "stop-token-ids": "none"},
        **{"dtype": "float32", "device": "cpu", "warmup-runs": 0},
    }
    if gate.max_extra_stages:
        flags["max-extra-stages"] = gate.max_extra_stages
    benchmark.main([word for flag, value in flags.items() for word in (f"--{flag}", str(value))])
    for case, response in zip(traces, json.loads(out.read_text())["responses"], strict=True):
        rounds = case[name]
        assert response["output_ids"][:64] == case["greedy"]
        assert response["acceptance_lengths"][: len(rounds)] == [found["accepted"] + 1 for found in rounds]
        assert response["extra_stages"][: len(rounds)] == [found["stages"] - 1 for found in rounds]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_ids_equal_the_targets_own_with_one_forward_a_round(pair, traces, gate):
    model, host = pair
    forwards = []
    handle = model.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
    try:
        for case in traces:
            forwards.clear()
            result = decode(model, host, case["prompt"], gate)
            assert result.output_ids == case["greedy"]
            assert len(forwards) == 1 + len(result.rounds)
            if gate.threshold == -math.inf:
                assert len(result.rounds[0].segments) == 8
    finally:
        handle.remove()


@pytest.mark.parametrize("window", [3, 5, 8])
def test_windows_smaller_than_prompt_and_draft_block_are_lossless(golden, traces, tmp_path, window):
    folder = tmp_path / "pair"
    shutil.copytree(golden / "mtp_gemma4", folder)
    for part in ("target", "assistant"):
        config = json.loads((folder / part / "config.json").read_text())
        config["text_config"]["sliding_window"] = window
        (folder / part / "config.json").write_text(json.dumps(config))
    model, host = load(folder)
    accepted = 0
    for case in traces[:3]:
        expected = greedy(model, case["prompt"])
        for gate in GATES.values():
            result = decode(model, host, case["prompt"], gate)
            assert result.output_ids == expected
            accepted += sum(r.acceptance_length - 1 for r in result.rounds)
    assert accepted, "no draft was ever accepted: the rollback was not put to the test"


def test_one_read_of_the_device_a_stage(pair, traces, monkeypatch):
    model, host = pair
    target = Target(model, host.taps)
    drafter = host.drafter(model, cache=target.cache)
    with torch.inference_mode():
        target.reset(64)
        root, features = target.prefill(traces[0]["prompt"])
        drafter.begin(features, [root])
        reads = []
        for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy"):
            read = getattr(torch.Tensor, name)
            monkeypatch.setattr(
                torch.Tensor, name, lambda self, *a, _r=read, _n=name: (reads.append(_n), _r(self, *a))[1]
            )
        drafter.first_stage()
        assert reads == ["tolist"]
        drafter.next_stage()
        assert reads == ["tolist"] * 2


@pytest.fixture(scope="module")
def small_pair(tmp_path_factory):
    """A `gemma4` target whose last layers share keys and values and have per-layer inputs, as E2B, and an assistant
    with ordered embeddings; random weights, the assistant's table made to repeat what the target says."""
    from transformers import (
        Gemma4AssistantConfig,
        Gemma4AssistantForCausalLM,
        Gemma4ForCausalLM,
        Gemma4TextConfig,
    )

    def text(**more):
        sizes = {"vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
        kinds = {"sliding_window": 6, "global_head_dim": 16, "num_global_key_value_heads": 2}
        none = {"enable_moe_block": False, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 0}
        return Gemma4TextConfig(**({"hidden_size_per_layer_input": 0} | sizes | kinds | none | more))

    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(5)
    layers = ["sliding_attention", "full_attention"] * 2
    target = Gemma4ForCausalLM(
        text(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            layer_types=layers,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=4,
            vocab_size_per_layer_input=96,
            initializer_range=0.3,
        )
    )
    target.save_pretrained(folder / "target")
    assistant = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(
            text_config=text(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                layer_types=layers[:2],
                num_kv_shared_layers=2,
                initializer_range=0.3,
            ),
            backbone_hidden_size=32,
            use_ordered_embeddings=True,
            num_centroids=8,
            centroid_intermediate_top_k=3,
        )
    )
    assistant.masked_embedding.token_ordering.copy_(torch.randperm(96))
    assistant.save_pretrained(folder / "assistant")
    return folder


def test_small_assistants_with_ordered_embeddings_on_targets_that_share_keys(small_pair):
    model, host = load(small_pair)
    assert host.network.masked_embedding is not None
    for seed in range(3):
        prompt = torch.randint(3, 96, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        expected = greedy(model, prompt, 40)
        for gate in GATES.values():
            assert decode(model, host, prompt, gate, 40).output_ids == expected


def test_a_small_assistant_trains_as_it_drafts(small_pair):
    """`gemma4_assistant` is another class of the library than the golden `gemma4_unified_assistant`."""
    model, host = load(small_pair)
    objective = host.objective(model, ObjectiveOptions(ttt_length_dist=(2,)))
    ids = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids, torch.ones_like(ids), torch.ones_like(ids), 0, (0,))
    outputs = FrozenTarget(model, objective.taps)(batch, [12])
    loss = objective(batch, outputs, 0)
    loss.total.backward()
    assert all(p.grad is not None for p in host.network.parameters() if p.requires_grad)
    rows = objective.start(batch, outputs)
    with torch.no_grad():
        hidden, _ = objective.advance(rows.hidden_BSD, batch.input_ids.roll(-1), torch.arange(12)[None], rows.memory)
        target = Target(model, host.taps)
        target.reset(16)
        _, features = target.prefill(ids[0, :9].tolist())
        drafter = host.drafter(model, cache=target.cache)
        drafter.stage_length = 1
        drafter.begin(features, [int(ids[0, 9])])
        drafter.first_stage()
        target.close()
    torch.testing.assert_close(drafter._hidden_11D[0, 0], hidden[0, 8, :32], atol=1e-4, rtol=1e-4)


def test_gate_numbers_of_an_ordered_head_are_over_the_filled_distribution(small_pair):
    model, host = load(small_pair)
    result = decode(model, host, [5, 6, 7, 8], Gate(), 8)
    target = Target(model, host.taps)
    with torch.inference_mode():
        target.reset(8)
        root, features = target.prefill([5, 6, 7, 8])
        peer = host.network(
            inputs_embeds=torch.cat((model.get_input_embeddings()(torch.tensor([[root]])), features[None, -1:]), -1),
            position_ids=torch.tensor([[4]]),
            shared_kv_states=target.cache.shared_kv(),
        ).logits[0, 0]
    best, token = peer.log_softmax(-1).max(-1)
    segment = result.rounds[0].segments[0]
    assert segment.chain[0] == int(token)
    assert segment.log_probs[0] == pytest.approx(float(best), abs=1e-5)
    assert int((peer == peer.min()).sum()) > 50


def test_saved_assistants_draft_for_the_library_too(golden, pair, traces, tmp_path):
    from transformers import AutoModelForCausalLM

    model, host = pair
    host.save(tmp_path, torch.float32)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for case in traces:
        ids = torch.tensor([case["prompt"]])
        answer = model.generate(ids, assistant_model=peer, do_sample=False, max_new_tokens=64, eos_token_id=None)
        assert answer[0, ids.shape[1] :].tolist() == case["greedy"]
    assert load_file(tmp_path / "model.safetensors").keys() == host_keys(golden)


def host_keys(golden):
    return load_file(golden / "mtp_gemma4/assistant/model.safetensors").keys()
