"""The unroll against one step at a time, and what it trains."""

import pytest
import torch
from safetensors.torch import load_file

from dloop.cli import UserError
from dloop.data.loader import Batch
from dloop.hosts.host import ObjectiveOptions
from dloop.hosts.mtp.gemma4_network import LAYER_TYPES, advance, logits
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import embedding, load_target
from dloop.training.target_pass import FrozenTarget

CPU = torch.device("cpu")
LENGTHS = [40, 29]


@pytest.fixture(scope="module")
def target(golden):
    return load_target(str(golden / "mtp_gemma4/target"), dtype=torch.float32, device=CPU)


@pytest.fixture
def host(golden):
    return load_host(str(golden / "mtp_gemma4/assistant"), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def batch(golden):
    text = load_file(golden / "mtp_gemma4/assistant_forward.safetensors")["input_ids"]
    ids = torch.stack([text[:40], text[3:].roll(7)])
    present = (torch.arange(40) < torch.tensor(LENGTHS)[:, None]).long()
    supervised = present * (torch.arange(40) >= torch.tensor([12, 20])[:, None])
    return Batch(ids * present, present, supervised, 0, (0, 1))


def options(lengths=(6,), **more):
    return ObjectiveOptions(ttt_length_dist=lengths, **more)


def loss_of(objective, target, batch):
    return objective(batch, FrozenTarget(target, objective.taps)(batch, LENGTHS), 0)


def one_by_one(host, target, batch, steps):
    """The same loss from single-row calls over keys cut as a decoding cache would hold them."""
    total = 0.0
    for ids, mask, length in zip(batch.input_ids, batch.loss_mask, LENGTHS, strict=True):
        with torch.no_grad():
            output = target(input_ids=ids[None, :length], output_hidden_states=True, return_shared_kv_states=True)
        for t in range(length):
            hidden = output.hidden_states[-1][:, t : t + 1]
            start = {"full_attention": 0, "sliding_attention": max(0, t + 2 - 16)}
            kv = {
                kind: tuple(part[:, :, start[kind] : t + 1] for part in output.shared_kv_states[kind])
                for kind in LAYER_TYPES
            }
            for s in range(min(steps, length - t - 2)):
                states, hidden = advance(
                    host.network,
                    embedding(target)(ids[None, t + 1 + s : t + 2 + s]),
                    hidden,
                    torch.tensor([[t + 1]]),
                    kv,
                    dict.fromkeys(LAYER_TYPES),
                )
                teacher = output.logits[0, t + 1 + s].softmax(-1)
                loss = -(teacher * logits(host.network, states[0])[0].log_softmax(-1)).sum()
                total = total + 0.8**s * mask[t + 2 + s] * loss
    return total / batch.input_ids.numel()


def test_the_unroll_equals_single_steps_in_value_and_gradient(host, target, batch):
    objective = host.objective(target, options())
    expected = one_by_one(host, target, batch, 6)
    expected.backward()
    trained = {name: p for name, p in host.network.named_parameters() if p.requires_grad}
    gradients = {name: parameter.grad.clone() for name, parameter in trained.items()}
    host.network.zero_grad()
    loss = loss_of(objective, target, batch)
    torch.testing.assert_close(loss.total, expected)
    loss.total.backward()
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=2e-6, rtol=1e-4)


def test_an_offset_of_the_positions_changes_nothing_but_rounding(host, target, batch):
    objective = host.objective(target, options())
    still = loss_of(objective, target, batch)
    moved = objective(batch, FrozenTarget(target, objective.taps, position_offset_max=300)(batch, LENGTHS), 0)
    torch.testing.assert_close(moved.total, still.total, atol=1e-3, rtol=1e-3)


def test_a_batch_without_an_answer_is_a_loss_of_zero_connected_to_every_parameter(host, target, batch):
    objective = host.objective(target, options())
    silent = Batch(batch.input_ids, batch.attention_mask, torch.zeros_like(batch.loss_mask), 0, (0, 1))
    loss = loss_of(objective, target, silent)
    assert loss.total.item() == 0
    loss.total.backward()
    assert all(p.grad is not None for p in objective.parameters() if p.requires_grad)


def test_table_and_layer_scales_of_a_released_assistant_stay(host, target):
    host.objective(target, options())
    frozen = {name for name, p in host.network.named_parameters() if not p.requires_grad}
    assert frozen == {"model.embed_tokens.weight"}
    assert all("layer_scalar" not in name for name, _ in host.network.named_parameters())
    host.objective(target, options(from_scratch=True))
    assert all(parameter.requires_grad for parameter in host.network.parameters())


def test_nothing_of_the_target_is_part_of_the_objective(host, target):
    objective = host.objective(target, options())
    ours = {id(parameter) for parameter in host.network.parameters()}
    assert {id(parameter) for parameter in objective.parameters()} == ours


def test_masks_show_what_a_cropped_cache_holds(host, target):
    masks = host.objective(target, options()).masks(40, CPU)
    rows = (3, 14, 15, 39)
    seen = {kind: [mask[0, 0, t].nonzero().flatten().tolist() for t in rows] for kind, mask in masks.items()}
    assert seen["full_attention"] == [list(range(t + 1)) for t in rows]
    assert seen["sliding_attention"] == [list(range(4)), list(range(15)), list(range(1, 16)), list(range(25, 40))]


def test_options_of_blocks_are_refused(host, target):
    with pytest.raises(UserError, match="--num-anchors 12 has no effect on mtp"):
        host.objective(target, options(num_anchors=12))
