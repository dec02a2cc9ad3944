"""DFlash against reference outputs: rounds, training loss, loop stages (tests/golden/dflash)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.hosts.host import ObjectiveOptions

from .golden_training import anchors_of, batch_of, computed_blocks, gradients, load, outputs_of


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "dflash"


def test_two_rounds_equal_the_reference(folder):
    reference = load_file(folder / "rounds.safetensors")
    target, host = load(folder)
    drafter = host.drafter(target)
    drafter.reset(64)
    with torch.inference_mode():
        for r in range(2):
            drafter.begin(reference[f"round{r}.target_hidden"][0], [int(reference[f"round{r}.block_ids"][0, 0])])
            segment = drafter.first_stage()
            assert segment.chain == reference[f"round{r}.draft_tokens"][0].tolist()
            torch.testing.assert_close(drafter._bank, reference[f"round{r}.draft_hidden"][0, 1:], atol=1e-4, rtol=0)
            logits = drafter.head(drafter._bank)
            torch.testing.assert_close(logits, reference[f"round{r}.draft_logits"][0], atol=1e-4, rtol=0)
            drafter.end()
            rows = drafter.cache.length
            keys = reference[f"round{r}.cached_keys_layer0_after_crop"]
            values = reference[f"round{r}.cached_values_last_layer_after_crop"]
            assert rows == keys.shape[2]
            torch.testing.assert_close(drafter.cache.store[0, 0, :, :, :rows], keys, atol=1e-4, rtol=0)
            torch.testing.assert_close(drafter.cache.store[1, -1, :, :, :rows], values, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("case", "gamma"), [("gamma", 4.0), ("no_decay", None)])
def test_training_loss_and_gradients_equal_the_reference(folder, case, gamma):
    data, expected = load_file(folder / "train.safetensors"), json.loads((folder / "train.json").read_text())[case]
    target, host = load(folder)
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=gamma, dloop_max_stage=0))
    outputs = outputs_of(host, data)
    ((window, hidden),) = objective.stages(batch_of(data), outputs, *anchors_of(data), 0)
    kept = data["block_keep_mask"].bool()
    torch.testing.assert_close(hidden[kept], data["output_hidden"][:, :, 1:][kept], atol=1e-4, rtol=0)
    stage = objective.stage_loss(hidden, window, outputs)
    assert stage.sums.item() == pytest.approx(expected["loss_numerator"], rel=1e-5)
    assert stage.denominator.item() == pytest.approx(expected["loss_denominator"], rel=1e-5)
    assert stage.correct_BNT[window.mask_BNT].float().mean().item() == pytest.approx(expected["accuracy"])
    total = objective.combine(stage, None, 0)
    assert total.item() == pytest.approx(expected["loss"], rel=1e-5)
    found = gradients(objective, total)
    for name, norm in expected["grad_norms"].items():
        assert float(found[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
    if case == "gamma":
        torch.testing.assert_close(found["fc.weight"], data["grad.fc.weight"], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_loop_stages_equal_the_reference(folder, k):
    data, loop = load_file(folder / "train.safetensors"), load_file(folder / "derived_loop.safetensors")
    expected = json.loads((folder / "derived_loop.json").read_text())[f"k{k}"]
    target, host = load(folder)
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=4.0))
    outputs = outputs_of(host, data)
    stages = objective.stages(batch_of(data), outputs, *anchors_of(data), k)
    kept = loop[f"k{k}.keep"].bool()
    real = computed_blocks(stages, anchors_of(data)[0], kept)
    for s in range(1, k + 1):
        reference = loop[f"k{k}.stage{s}.hidden"][:, :, 1:]
        torch.testing.assert_close(stages[s][1][real], reference[kept], atol=1e-4, rtol=0)
    first, last = (objective.stage_loss(hidden, window, outputs) for window, hidden in (stages[0], stages[-1]))
    assert int(kept.sum()) == expected["valid_blocks"]
    assert first.sums.item() == pytest.approx(expected["num0"], rel=1e-5)
    assert first.denominator.item() == pytest.approx(expected["den0"], rel=1e-5)
    assert last.sums.item() == pytest.approx(expected["numk"], rel=1e-5)
    assert last.denominator.item() == pytest.approx(expected["denk"], rel=1e-5)
    total = objective.combine(first, last, 0)
    assert total.item() == pytest.approx(expected["loss"], rel=1e-5)
    found = gradients(objective, total)
    for name, norm in expected["grad_norms"].items():
        assert float(found[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
