"""EAGLE-3's training: loss, accuracy and gradients of the reference; what an unroll may depend on."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.cli import UserError
from dloop.data.loader import Batch
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.unroll import loss as loss_module
from dloop.hosts.unroll.attention import OWN_ROW_ATTENTION
from tests.hosts.golden_training import load


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "eagle3"


@pytest.fixture(scope="module")
def pair(folder):
    return load(folder)


@pytest.fixture(scope="module")
def data(folder):
    return load_file(folder / "ttt_inputs.safetensors")


@pytest.fixture(scope="module")
def batch(data):
    return Batch(data["input_ids"], data["attention_mask"], data["loss_mask"], 0, (0, 1))


@pytest.fixture(scope="module")
def outputs(pair, data, batch):
    """The target's states of the golden batch; the reference's features and logits come from them."""
    from dloop.training.target_pass import FrozenTarget

    target, host = pair
    host.check_target(target)
    found = FrozenTarget(target, (*host.taps, "norm"))(batch, batch.attention_mask.sum(1).tolist())
    valid = batch.attention_mask.bool()
    features = torch.cat([found.states[tap] for tap in host.taps], -1)
    torch.testing.assert_close(features[valid], data["target_features"][valid], atol=1e-4, rtol=0)
    logits = target.lm_head(found.states["norm"])
    torch.testing.assert_close(logits[valid], data["target_logits"][valid], atol=1e-4, rtol=0)
    return found


def objective_of(pair, *lengths, **options):
    target, host = pair
    return host.objective(target, ObjectiveOptions(ttt_length_dist=lengths or None, **options))


def run(pair, batch, outputs, *lengths):
    objective = objective_of(pair, *lengths)
    objective.zero_grad()
    loss = objective(batch, outputs, 0)
    loss.total.backward()
    gradients = {name: parameter.grad for name, parameter in objective.network.named_parameters()}
    return loss, gradients


@pytest.mark.parametrize("length", [1, 3, 7])
def test_loss_and_gradients_equal_the_reference(pair, folder, data, batch, outputs, length):
    expected = json.loads((folder / "ttt.json").read_text())[str(length)]
    loss, gradients = run(pair, batch, outputs, length)
    assert loss.total.item() == pytest.approx(expected["loss"], rel=1e-5)
    for place in range(length):
        assert loss.ratios[f"unroll/cross_entropy/{place + 1}"][0].item() == pytest.approx(
            expected["plosses"][place], rel=1e-5
        )
        right, counted = loss.ratios[f"unroll/accuracy/{place + 1}"]
        assert right / counted == pytest.approx(expected["acc"][place], abs=1e-6)
    for name, norm in expected["grad_norms"].items():
        assert float(gradients[name].norm()) == pytest.approx(norm, rel=1e-4), name
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    assert float(total) == pytest.approx(expected["grad_norm_total"], rel=1e-4)
    if length == 3:
        for name, key in (("fc.weight", "fc_grad"), ("midlayer.self_attn.q_proj.weight", "q_proj_grad")):
            torch.testing.assert_close(gradients[name], data[key], atol=1e-5, rtol=1e-3)


def test_chunks_change_nothing(pair, batch, outputs, monkeypatch):
    whole, expected = run(pair, batch, outputs, 3)
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 5)
    chunked, found = run(pair, batch, outputs, 3)
    torch.testing.assert_close(chunked.total, whole.total)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-4)


def test_a_row_equals_the_drafter_s_chain_on_the_same_tokens(pair, batch, outputs):
    """Row j at step i is the drafter behind j + 1 committed tokens, fed the text's next i tokens."""
    target, host = pair
    objective = objective_of(pair, 4)
    features = torch.cat([outputs.states[tap] for tap in host.taps], -1)[0]
    ids, row = batch.input_ids[0], 9
    states = []
    rows = objective.start(batch, outputs)
    hidden, memory = rows.hidden_BSD, []
    with torch.inference_mode():
        for place in range(4):
            shifted = torch.nn.functional.pad(batch.input_ids[:, place + 1 :], (0, place + 1))
            positions = torch.arange(place, place + len(ids)).expand_as(shifted)
            hidden, left = objective.advance(hidden, shifted, positions, memory)
            memory.append(left)
            states.append(hidden[0, row])
        drafter = host.drafter(target)
        drafter.reset(len(ids))
        drafter.begin(features[: row + 1], ids[1 : row + 2].tolist())
        torch.testing.assert_close(drafter._state_1D[0], states[0], atol=1e-5, rtol=1e-4)
        for place in range(1, 4):
            drafter._extend(drafter._state_1D, [int(ids[row + 1 + place])])
            torch.testing.assert_close(drafter._state_1D[0], states[place], atol=1e-5, rtol=1e-4)


def test_one_length_a_step_from_the_list(pair, batch, outputs):
    objective = objective_of(pair, 1, 2, 4)
    with torch.no_grad():
        steps = [sum("accuracy" in name for name in objective(batch, outputs, step).ratios) for step in range(40)]
        assert set(steps) == {1, 2, 4}
        assert steps == [
            sum("accuracy" in name for name in objective(batch, outputs, step).ratios) for step in range(40)
        ]


def test_offsets_move_every_rotary_position_and_change_no_attention_score(pair, batch, outputs):
    """Rotary scores depend on differences alone."""
    moved = TargetOutputs(outputs.states, torch.tensor([100, 700]))
    with torch.no_grad():
        here, there = (objective_of(pair, 3)(batch, states, 0).total for states in (outputs, moved))
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-5)


def test_memory_of_an_unroll_is_a_state_and_a_pair_of_keys_and_values_a_step(pair, batch, outputs, monkeypatch):
    """What autograd keeps for the backward pass: no logits, no attention weights, the same for every step."""

    def kept(length):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
            objective_of(pair, length)(batch, outputs, 0)
        return sum(sizes)

    config = pair[1].network.config
    rows = batch.input_ids.numel()
    one, four, seven = (kept(length) for length in (1, 4, 7))
    assert (four - one) / 3 == pytest.approx((seven - four) / 3, rel=0.1)
    assert (seven - four) / 3 < rows * (config.hidden_size + 2 * config.kv_heads * config.head_dim)


def test_nothing_to_learn_is_a_loss_of_zero_connected_to_every_parameter(pair, batch, outputs):
    silent = Batch(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.loss_mask), 0, (0, 1))
    loss, gradients = run(pair, silent, outputs, 2)
    assert loss.total.item() == 0.0
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("option", [{"num_anchors": 4}, {"dloop_max_stage": 0}, {"dloop_loss_weight": 0.5}])
def test_options_of_block_drafters_are_refused(pair, option):
    with pytest.raises(UserError, match="has no effect on eagle3"):
        objective_of(pair, **option)


def test_block_drafters_refuse_an_unroll(golden):
    target, host = load(golden / "dflash")
    with pytest.raises(UserError, match=r"--ttt-length-dist \(7, 14\) has no effect on dflash"):
        host.objective(target, ObjectiveOptions(ttt_length_dist=(7, 14)))


def test_both_attentions_give_one_loss(pair, batch, outputs, monkeypatch):
    with torch.inference_mode():
        dense = objective_of(pair, 3)(batch, outputs, 0).total
        assert "flex_attention" in OWN_ROW_ATTENTION
        flexible = objective_of(pair, 3, attention_backend="flex_attention")
        # Outside inference mode parameters want gradients, which flex_attention refuses on a CPU.
        torch.testing.assert_close(flexible(batch, outputs, 0).total, dense, rtol=1e-5, atol=1e-6)
