"""Qwen3.5's head against reference outputs: forward, chain, every round of released and looped traces, the unroll."""

import json
import math
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from dloop.data.loader import Batch
from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.target import Target
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.registry import load_host, new_host
from dloop.hosts.target_model import load_target
from dloop.results.metrics import first_divergence
from dloop.training.target_pass import FrozenTarget
from tests.decoding.test_loop import greedy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "mtp_qwen35"


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "checkpoint"), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def host(folder):
    return load_host(str(folder / "checkpoint"), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def forward(folder):
    return load_file(folder / "head_forward.safetensors")


@pytest.fixture(scope="module")
def traces(folder):
    return json.loads((folder / "traces.json").read_text())


def close(found, wanted):
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_targets_states_and_logits_equal_the_reference(target, forward):
    output = target(forward["input_ids"][None], output_hidden_states=True, use_cache=False)
    close(output.hidden_states[-1][0], forward["target_hidden"])
    close(output.logits[0], forward["target_logits"])


@torch.no_grad()
def test_teacher_forced_rows_equal_the_reference(host, target, forward):
    ids, states = forward["input_ids"].tolist(), forward["target_hidden"]
    drafter = host.drafter(target)
    drafter.reset(len(ids))
    inner = {}
    hooks = [
        host.network.fc.register_forward_hook(lambda m, i, out: inner.update(fused=out)),
        host.network.norm.register_forward_hook(lambda m, i, out: inner.update(prenorm=i[0])),
    ]
    drafter.begin(states[:-1], ids[1:])
    hidden = drafter._run()
    for hook in hooks:
        hook.remove()
    close(inner["fused"][0], forward["tf_fused"])
    close(inner["prenorm"][0], forward["tf_prenorm"])
    close(hidden, forward["tf_hidden"])
    close(drafter.head(hidden), forward["tf_logits"])


@torch.no_grad()
@pytest.mark.parametrize("pieces", [1, 3, 13])
def test_a_chain_and_its_cache_equal_the_reference_however_the_rows_arrived(host, target, forward, pieces):
    anchor = int(forward["chain_anchor"])
    ids, states = forward["input_ids"].tolist(), forward["target_hidden"]
    drafter = host.drafter(target)
    drafter.reset(64)
    said, head = [], drafter.head
    drafter.head = lambda hidden: (said.append((hidden[0], head(hidden)[0])), said[-1][1][None])[1]
    bounds = [round(piece * (anchor + 1) / pieces) for piece in range(pieces + 1)]
    for first, behind in pairwise(bounds):
        drafter.begin(states[first:behind], ids[first + 1 : behind + 1])
        chain = drafter.first_stage().chain + drafter.next_stage().chain + drafter.next_stage().chain
        if behind < anchor + 1:
            drafter.end()
            assert drafter.cache.length == behind
    assert chain == forward["chain_tokens"].tolist()
    keys, values = drafter.cache.store[:, 0, 0, :, : drafter.cache.length]
    close(keys, forward["chain_kv_k"])
    close(values, forward["chain_kv_v"])
    hidden, logits = (torch.stack(part) for part in zip(*said[-9:], strict=True))
    close(hidden, forward["chain_hidden"])
    close(logits, forward["chain_logits"])


@pytest.mark.parametrize("run", ["released_k3", "loop_k3_g-0.5", "loop_k3_g-0.2639"])
@pytest.mark.parametrize("number", range(6))
def test_every_round_equals_the_reference(host, target, traces, run, number):
    gate = Gate() if run.startswith("released") else Gate(float(run.partition("_g")[2]), max_extra_stages=7)
    prompt, expected = traces[number]["prompt"], traces[number][run]
    decoder = Target(target, host.taps)
    # The reference drafts past the token limit, so ask for more and compare the rounds it lists.
    result = generate(decoder, host.drafter(target), prompt, Settings(110, frozenset(), gate), Clock(CPU))
    decoder.close()
    assert result.output_ids[:72] == traces[number]["greedy"]
    length = len(prompt) + 1
    for ours, theirs in zip(result.rounds[: len(expected)], expected, strict=True):
        assert length == theirs["start_len"]
        assert result.output_ids[length - len(prompt) - 1] == theirs["bonus_in"]
        length += ours.acceptance_length
        assert result.output_ids[length - len(prompt) - 1] == theirs["verified_next"]
        assert len(ours.segments) == theirs["stages"]
        assert [token for segment in ours.segments for token in segment.chain] == theirs["drafts"]
        assert ours.acceptance_length == theirs["accepted"] + 1
        found = [value for segment in ours.segments for value in segment.log_probs]
        assert found == pytest.approx(theirs["draft_logprob"], abs=1e-3)
        assert [segment.gate_sum for segment in ours.segments] == pytest.approx(theirs["stage_sums"], abs=2e-3)


@pytest.mark.parametrize("gate", [Gate(-math.inf, 7), Gate(-0.5, 7), Gate(1.0)], ids=str)
def test_ids_are_the_targets_own_with_one_forward_a_round(host, target, traces, gate):
    forwards = []
    handle = target.register_forward_hook(lambda *_: forwards.append(1))
    decoder = Target(target, host.taps)
    for trace in traces:
        forwards.clear()
        result = generate(decoder, host.drafter(target), trace["prompt"], Settings(72, frozenset(), gate), Clock(CPU))
        assert result.output_ids == trace["greedy"]
        assert len(forwards) == 1 + len(result.rounds)
    decoder.close()
    handle.remove()


def test_a_tied_target_whose_every_second_layer_is_full_is_lossless_too(tmp_path):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = {"vocab_size": 14, "hidden_size": 24, "intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 4}
    changes = {"full_attention_interval": 2, "tie_word_embeddings": True, "num_key_value_heads": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "linear_num_key_heads": 1, "linear_num_value_heads": 4}
    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "initializer_range": 0.3}
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(sizes | heads | linear | changes))).save_pretrained(tmp_path)
    target = load_target(str(tmp_path), dtype=torch.float32, device=CPU)
    host = new_host(str(tmp_path), seed=1, dtype=torch.float32, device=CPU)
    for gate in (Gate(-math.inf, 3), Gate()):
        decoder = Target(target, host.taps)
        result = generate(decoder, host.drafter(target), [5, 1, 7], Settings(24, frozenset(), gate), Clock(CPU))
        decoder.close()
        assert result.output_ids == greedy(target, [5, 1, 7], 24)


def test_the_unroll_equals_the_reference(host, target, forward):
    ids = forward["input_ids"][None]
    batch = Batch(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        loss_mask=forward["loss_mask"][None].long(),
        epoch=0,
        places=(0,),
    )
    outputs = TargetOutputs({"norm": forward["target_hidden"][None]}, torch.zeros(1, dtype=torch.long))
    objective = host.objective(target, ObjectiveOptions(ttt_length_dist=(6,)))
    logits, inner = [], objective.network.forward

    def watched(*arguments):
        hidden = inner(*arguments)
        if len(logits) < 6:
            logits.append(objective.draft_logits(hidden).detach()[0])
        return hidden

    objective.network.forward = watched
    try:
        loss = objective(batch, outputs, 0)
    finally:
        del objective.network.forward
    length = ids.shape[1]
    for step, found in enumerate(logits):
        valid = length - 1 - step
        close(found[:valid], forward["ttt_logits"][step, :valid])
        cross_entropy = loss.ratios[f"unroll/cross_entropy/{step + 1}"][0]
        assert float(cross_entropy) == pytest.approx(float(forward["ttt_ce_sum_over_T"][step]), abs=1e-4)
    assert float(loss.total) == pytest.approx(float(forward["ttt_loss_decay0.8"]), abs=1e-4)


def test_bfloat16_differs_from_plain_decoding_only_at_near_ties(folder, traces):
    checkpoint = str(folder / "checkpoint")
    target = load_target(checkpoint, dtype=torch.bfloat16, device=CPU)
    host = load_host(checkpoint, dtype=torch.bfloat16, device=CPU)
    decoder = Target(target, host.taps)
    same = 0
    for trace in traces[:2]:
        settings = Settings(40, frozenset(), Gate(-0.5, 7))
        plain = generate(decoder, SilentDrafter(), trace["prompt"], settings, Clock(CPU)).output_ids
        looped = generate(decoder, host.drafter(target), trace["prompt"], settings, Clock(CPU)).output_ids
        place = first_divergence(looped, plain)
        same += 40 if place is None else place
        if place is not None:
            decoder.reset(128)
            with torch.inference_mode():
                assert decoder.top_margin(trace["prompt"] + plain[:place]) < 0.1
    decoder.close()
    assert same > 20


def test_padding_on_the_right_and_a_shift_leave_the_targets_states_alone(target, traces):
    rows = [
        torch.tensor(trace["prompt"] + trace["greedy"][:length])
        for trace, length in zip(traces, (40, 72), strict=False)
    ]
    lengths = [len(row) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    batch = Batch(ids, mask, mask, 0, (0, 1))
    frozen = FrozenTarget(target, ("norm",), position_offset_max=300)
    outputs = frozen(batch, lengths)
    frozen.taps.close()
    assert outputs.position_offset_B.min() > 0
    for row, state in zip(rows, outputs.states["norm"], strict=True):
        with torch.no_grad():
            alone = target.model(input_ids=row[None], use_cache=False).last_hidden_state[0]
        torch.testing.assert_close(state[: len(row)], alone, atol=1e-4, rtol=1e-4)
