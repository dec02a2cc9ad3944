"""Domino against reference outputs: rounds, training loss, curriculum, loop stages (tests/golden/domino)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.hosts.host import ObjectiveOptions

from .golden_training import anchors_of, batch_of, computed_blocks, gradients, load, outputs_of


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "domino"


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
            torch.testing.assert_close(drafter._bank, reference[f"round{r}.draft_hidden"][0], atol=1e-4, rtol=0)
            base = drafter.head(drafter._bank)
            torch.testing.assert_close(base, reference[f"round{r}.base_logits"][0], atol=1e-4, rtol=0)
            read = torch.tensor([int(reference[f"round{r}.block_ids"][0, 0]), *segment.chain[:-1]])
            states = host.network.prefix_gru(drafter.embed(read)[None])[0][0]
            logits = host.network.correct(base, drafter._bank, states)
            logits[: host.network.prefix_length] = base[: host.network.prefix_length]
            torch.testing.assert_close(logits, reference[f"round{r}.corrected_logits"][0], atol=1e-4, rtol=0)
            expected = logits.log_softmax(-1).gather(1, torch.tensor(segment.chain)[:, None])[:, 0]
            assert segment.log_probs == pytest.approx(expected.tolist(), abs=1e-4)
            drafter.end()


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_training_loss_and_gradients_equal_the_reference(folder, share):
    data = load_file(folder / "train.safetensors")
    expected = json.loads((folder / "train.json").read_text())[f"lambda_{share}"]
    target, host = load(folder)
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=7.0, dloop_max_stage=0))
    outputs = outputs_of(host, data)
    ((window, hidden),) = objective.stages(batch_of(data), outputs, *anchors_of(data), 0)
    kept = data["block_keep_mask"].bool()
    torch.testing.assert_close(hidden[kept], data["output_hidden"][kept], atol=1e-4, rtol=0)
    stage = objective.stage_loss(hidden, window, outputs)
    terms = (stage.sums / stage.denominator).tolist()
    assert terms == pytest.approx([expected["final_loss"], expected["base_loss"]], rel=1e-5)
    accuracy = stage.correct_BNT[window.mask_BNT].float().mean().item()
    assert accuracy == pytest.approx(expected["accuracy"])
    base = (objective.logits(hidden).argmax(-1) == window.labels_BNT)[window.mask_BNT].float().mean().item()
    assert base == pytest.approx(expected["base_accuracy"])
    total = objective.mixed(stage, share)
    assert total.item() == pytest.approx(expected["loss"], rel=1e-5)
    found = gradients(objective, total)
    for name, norm in expected["grad_norms"].items():
        size = 0.0 if found[name] is None else float(found[name].norm())
        assert size == pytest.approx(norm, rel=1e-3, abs=1e-5), name
    if share == 0.3:
        name = "prefix_gru.weight_hh_l0"
        torch.testing.assert_close(found[name], data[f"grad.{name}"], atol=1e-5, rtol=1e-3)


def test_curriculum_equals_the_reference(folder):
    target, host = load(folder)
    for row in json.loads((folder / "train.json").read_text())["lambda_schedule"]:
        options = ObjectiveOptions(
            lambda_base_start=row["lambda_start"],
            lambda_base_decay_ratio=row["decay_ratio"],
            total_steps=row["total_steps"],
        )
        share = host.objective(target, options).base_share(row["step"])
        assert share == pytest.approx(row["lambda"])
    assert host.objective(target, ObjectiveOptions()).base_share(0) == 0.0


@pytest.mark.parametrize("k", [1, 2, 3])
def test_loop_stages_equal_the_reference(folder, k):
    data, loop = load_file(folder / "train.safetensors"), load_file(folder / "derived_loop.safetensors")
    expected = json.loads((folder / "derived_loop.json").read_text())[f"k{k}"]
    target, host = load(folder)
    # A curriculum that stands at the reference's share: 0.3 = 1 - 7 / 10.
    options = ObjectiveOptions(loss_decay_gamma=7.0, lambda_base_decay_ratio=1.0, total_steps=10)
    objective = host.objective(target, options)
    outputs = outputs_of(host, data)
    stages = objective.stages(batch_of(data), outputs, *anchors_of(data), k)
    kept = loop[f"k{k}.keep"].bool()
    real = computed_blocks(stages, anchors_of(data)[0], kept)
    for s in range(1, k + 1):
        torch.testing.assert_close(stages[s][1][real], loop[f"k{k}.stage{s}.hidden"][kept], atol=1e-4, rtol=0)
    first, last = (objective.stage_loss(hidden, window, outputs) for window, hidden in (stages[0], stages[-1]))
    assert int(kept.sum()) == expected["valid_blocks"]
    assert first.denominator.item() == pytest.approx(expected["den0"], rel=1e-5)
    assert objective.combine(first, None, 7).item() == pytest.approx(expected["host_loss"], rel=1e-5)
    assert last.denominator.item() == pytest.approx(expected["denk"], rel=1e-5)
    assert objective.combine(last, None, 7).item() == pytest.approx(expected["loop_loss"], rel=1e-5)
    total = objective.combine(first, last, 7)
    assert total.item() == pytest.approx(expected["loss"], rel=1e-5)
    found = gradients(objective, total)
    for name, norm in expected["grad_norms"].items():
        assert float(found[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
