"""DFlash against reference outputs: rounds, training loss, loop stages (tests/golden/dflash)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.data.loader import Batch
from dloop.hosts.host import ObjectiveOptions, TargetOutputs
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "dflash"


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), dtype=torch.float32, device=CPU)


@pytest.fixture
def host(folder):
    return load_host(str(folder / "draft"), dtype=torch.float32, device=CPU)


def test_two_rounds_equal_the_reference(folder, target, host):
    reference = load_file(folder / "rounds.safetensors")
    drafter = host.drafter(target)
    drafter.reset(64)
    with torch.inference_mode():
        for r in range(2):
            hidden = reference[f"round{r}.target_hidden"][0]
            root = int(reference[f"round{r}.block_ids"][0, 0])
            drafter.begin(hidden, root)
            segment = drafter.first_stage()
            assert segment.chain == reference[f"round{r}.draft_tokens"][0].tolist()
            torch.testing.assert_close(drafter._bank, reference[f"round{r}.draft_hidden"][0, 1:], atol=1e-4, rtol=0)
            drafter.end()
            rows = drafter.cache.length
            keys = reference[f"round{r}.cached_keys_layer0_after_crop"]
            values = reference[f"round{r}.cached_values_last_layer_after_crop"]
            assert rows == keys.shape[2]
            torch.testing.assert_close(drafter.cache.store[0, 0, :, :, :rows], keys, atol=1e-4, rtol=0)
            torch.testing.assert_close(drafter.cache.store[1, -1, :, :, :rows], values, atol=1e-4, rtol=0)


def _batch(data):
    mask = data["loss_mask"].long()
    return Batch(data["input_ids"], torch.ones_like(mask), mask, 0, tuple(range(len(mask))))


def _outputs(host, data):
    split = data["hidden_states"].chunk(len(host.taps), dim=-1)
    offsets = torch.zeros(len(data["input_ids"]), dtype=torch.long)
    return TargetOutputs(dict(zip(host.taps, split, strict=True)), offsets)


def _backward(objective, loss):
    objective.zero_grad()
    loss.total.backward()
    return {name: parameter.grad for name, parameter in objective.network.named_parameters()}


@pytest.mark.parametrize(("case", "gamma"), [("gamma", 4.0), ("no_decay", None)])
def test_training_loss_and_gradients_equal_the_reference(folder, target, host, case, gamma):
    data, expected = (
        load_file(folder / "train.safetensors"),
        json.loads((folder / "train.json").read_text())[case],
    )
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=gamma, dloop_max_stage=0))
    anchors, keep = data["anchor_positions"], data["block_keep_mask"].bool()
    ((window, hidden),) = objective.stages(_batch(data), _outputs(host, data), anchors, keep, 0)
    reference = data["output_hidden"][:, :, 1:]
    torch.testing.assert_close(hidden[keep], reference[keep], atol=1e-4, rtol=0)
    stage = objective.stage_loss(hidden, window)
    assert stage.numerator.item() == pytest.approx(expected["loss_numerator"], rel=1e-5)
    assert stage.denominator.item() == pytest.approx(expected["loss_denominator"], rel=1e-5)
    loss = objective.combine(stage, None)
    assert loss.total.item() == pytest.approx(expected["loss"], rel=1e-5)
    gradients = _backward(objective, loss)
    for name, norm in expected["grad_norms"].items():
        assert float(gradients[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
    if case == "gamma":
        torch.testing.assert_close(gradients["fc.weight"], data["grad.fc.weight"], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_loop_stages_equal_the_reference(folder, target, host, k):
    data, loop = load_file(folder / "train.safetensors"), load_file(folder / "derived_loop.safetensors")
    expected = json.loads((folder / "derived_loop.json").read_text())[f"k{k}"]
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=4.0))
    anchors, keep = data["anchor_positions"], data["block_keep_mask"].bool()
    stages = objective.stages(_batch(data), _outputs(host, data), anchors, keep, k)
    kept = loop[f"k{k}.keep"].bool()
    torch.testing.assert_close(stages[-1][0].keep_BN, kept)
    for s in range(1, k + 1):
        reference = loop[f"k{k}.stage{s}.hidden"][:, :, 1:]
        torch.testing.assert_close(stages[s][1][kept], reference[kept], atol=1e-4, rtol=0)
    first, last = (objective.stage_loss(hidden, window) for window, hidden in (stages[0], stages[-1]))
    assert last.numerator.item() == pytest.approx(expected["numk"], rel=1e-5)
    assert last.denominator.item() == pytest.approx(expected["denk"], rel=1e-5)
    loss = objective.combine(first, last)
    assert loss.total.item() == pytest.approx(expected["loss"], rel=1e-5)
    gradients = _backward(objective, loss)
    for name, norm in expected["grad_norms"].items():
        assert float(gradients[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
