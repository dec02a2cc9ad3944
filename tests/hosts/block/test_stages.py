"""The layout that trains a stage equals the loop that decodes it, row by row; and the objective's edges."""

import math

import pytest
import torch
from safetensors.torch import load_file

from dloop.data.loader import Batch
from dloop.hosts.block.network import LoopState
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import Taps, load_target

from ..logit_rows import LogitRows, saved_shapes

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["dflash", "dspark", "domino"])
def folder(request, golden):
    return golden / request.param


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), dtype=torch.float32, device=CPU)


@pytest.fixture
def host(folder):
    return load_host(str(folder / "draft"), dtype=torch.float32, device=CPU)


def random_ids(rows, count, seed):
    return torch.randint(0, 130, (rows, count), generator=torch.Generator().manual_seed(seed))


def batch_of(ids, mask=None, places=(0,)):
    ids = torch.as_tensor(ids)
    mask = torch.ones_like(ids) if mask is None else torch.as_tensor(mask)
    return Batch(ids, torch.ones_like(ids), mask, 0, tuple(places))


def outputs_of(target, host, batch, offset=0):
    positions = torch.arange(batch.input_ids.shape[1])[None] + offset
    with torch.no_grad(), Taps(target, (*host.taps, "norm")) as taps:
        target.model(input_ids=batch.input_ids, position_ids=positions.expand_as(batch.input_ids), use_cache=False)
        states = taps.take()
    return TargetOutputs(states, torch.full((len(batch.input_ids),), offset))


def test_the_targets_states_of_the_golden_batch(folder, target, host):
    data = load_file(folder / "train.safetensors")
    states = outputs_of(target, host, batch_of(data["input_ids"])).states
    features = torch.cat([states[tap] for tap in host.taps], dim=-1)
    torch.testing.assert_close(features, data["hidden_states"], atol=1e-4, rtol=0)
    if folder.name == "dspark":
        torch.testing.assert_close(states["norm"], data["target_last_hidden_states"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("loop_state", LoopState, ids=lambda state: state.name)
def test_packed_stages_equal_cached_stages(target, host, loop_state):
    host.network.loop_state = loop_state
    ids = random_ids(1, 60, seed=0)
    batch = batch_of(ids)
    outputs = outputs_of(target, host, batch)
    objective = host.objective(target, ObjectiveOptions())
    anchors = torch.tensor([[2, 11, 25, 30]])
    with torch.no_grad():
        stages = objective.stages(batch, outputs, anchors, torch.ones_like(anchors).bool(), 3)
    features = torch.cat([outputs.states[tap] for tap in host.taps], dim=-1)[0]
    with torch.inference_mode():
        for n, anchor in enumerate(anchors[0].tolist()):
            drafter = host.drafter(target)
            drafter.reset(64)
            drafter.begin(features[:anchor], [int(ids[0, anchor])])
            for stage, (_, hidden) in enumerate(stages):
                _ = drafter.first_stage() if stage == 0 else drafter.next_stage()
                rows = drafter._bank[-drafter.stage_length :]
                rows = rows if loop_state.after_norm else host.network.norm(rows)
                torch.testing.assert_close(rows, hidden[0, n], atol=1e-5, rtol=1e-5)
                # Teacher tokens: what the decoder conditions on next is the truth, not its own guess.
                o = (stage + 1) * drafter.stage_length
                drafter._chain = ids[0, anchor : anchor + o + 1].tolist()


def test_cache_after_rounds_equals_a_fresh_prefill(target, host):
    ids = random_ids(1, 50, seed=1)
    outputs = outputs_of(target, host, batch_of(ids))
    features = torch.cat([outputs.states[tap] for tap in host.taps], dim=-1)[0]
    with torch.inference_mode():
        stepwise = host.drafter(target)
        stepwise.reset(8)  # too small on purpose: the cache has to grow
        for start, end in ((0, 7), (7, 8), (8, 20), (20, 41)):
            stepwise.begin(features[start:end], [int(ids[0, end])])
            last = stepwise.first_stage()
            if end != 41:
                stepwise.next_stage()
                stepwise.next_stage()
                stepwise.end()
        fresh = host.drafter(target)
        fresh.reset(64)
        fresh.begin(features[:41], [int(ids[0, 41])])
        expected = fresh.first_stage()
    assert last.chain == expected.chain
    assert last.log_probs == pytest.approx(expected.log_probs, abs=1e-4)
    torch.testing.assert_close(stepwise._bank, fresh._bank, atol=1e-5, rtol=1e-5)


def test_a_constant_position_offset_changes_nothing_but_rounding(target, host):
    ids = random_ids(1, 40, seed=2)
    objective = host.objective(target, ObjectiveOptions())
    losses = []
    for offset in (0, 500):
        outputs = outputs_of(target, host, batch_of(ids), offset)
        losses.append(objective(batch_of(ids), outputs, 0).total.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_batch_without_supervised_tokens_gives_zero_connected_to_every_parameter(target, host):
    batch = batch_of([[5, 6, 7, 8]], [[0, 0, 0, 0]])
    objective = host.objective(target, ObjectiveOptions())
    loss = objective(batch, outputs_of(target, host, batch), 0)
    assert loss.total.item() == 0.0
    loss.total.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_trainable_parameters_are_the_drafts_alone(target, host):
    objective = host.objective(target, ObjectiveOptions())
    assert {f"network.{name}" for name in host.network.state_dict()} == set(objective.state_dict())


def test_loop_stage_is_uniform_and_a_function_of_the_step(target, host):
    objective = host.objective(target, ObjectiveOptions(dloop_max_stage=3))
    draws = [objective.draw_stage(step) for step in range(600)]
    assert draws == [objective.draw_stage(step) for step in range(600)]
    assert all(abs(draws.count(k) - 200) < 60 for k in (1, 2, 3))
    assert host.objective(target, ObjectiveOptions(dloop_max_stage=0)).draw_stage(5) == 0


def test_chunked_loss_equals_the_unchunked_one(target, host, monkeypatch):
    ids = random_ids(2, 40, seed=3)
    batch = batch_of(ids, places=(0, 1))
    outputs = outputs_of(target, host, batch)
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=4.0))
    gradients = []
    for rows in (10_000, 5):
        monkeypatch.setattr("dloop.hosts.block.objective._CHUNK_ROWS", rows)
        objective.zero_grad()
        objective(batch, outputs, 0).total.backward()
        gradients.append([parameter.grad.clone() for parameter in objective.parameters()])
    for whole, chunked in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [4, 16])
def test_logits_exist_for_one_chunk_of_rows_whatever_the_anchors(target, host, monkeypatch, count):
    monkeypatch.setattr("dloop.hosts.block.objective._CHUNK_ROWS", 8)
    batch = batch_of(random_ids(1, 90, seed=6))
    objective = host.objective(target, ObjectiveOptions())
    outputs = outputs_of(target, host, batch)
    anchors = torch.arange(count)[None] * 4
    window, hidden = objective.stages(batch, outputs, anchors, torch.ones_like(anchors).bool(), 0)[0]
    size = target.config.vocab_size
    with LogitRows(size) as forward, saved_shapes() as saved:
        loss = objective.stage_loss(hidden, window, outputs).sums.sum()
    with LogitRows(size) as backward:
        loss.backward()
    assert (forward.most, backward.most) == (8, 8)
    assert len(saved) > count
    assert all(shape[-1:] != (size,) for shape in saved)


def test_ratios_report_accuracy_and_prefix_of_both_stages(target, host):
    ids = random_ids(1, 40, seed=4)
    batch = batch_of(ids)
    ratios = host.objective(target, ObjectiveOptions())(batch, outputs_of(target, host, batch), 0).ratios
    objective = host.objective(target, ObjectiveOptions())
    per_stage = [*objective.terms, "accepted_prefix", *(f"accuracy/{t + 1}" for t in range(objective.stage_length))]
    assert set(ratios) == {f"{stage}/{name}" for stage in ("host", "loop") for name in per_stage}
    for numerator, denominator in ratios.values():
        assert not numerator.requires_grad
        assert math.isfinite(numerator.item() / max(denominator.item(), 1))
