"""DSpark against reference outputs: rounds, training loss, loop stages (tests/golden/dspark)."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.hosts.host import ObjectiveOptions

from .golden_training import anchors_of, batch_of, computed_blocks, gradients, load, outputs_of


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "dspark"


@pytest.mark.parametrize("draft", ["draft", "draft_specforge"])
def test_two_rounds_equal_the_reference(folder, draft):
    reference = load_file(folder / "rounds.safetensors")
    target, host = load(folder, draft)
    drafter = host.drafter(target)
    drafter.reset(64)
    with torch.inference_mode():
        for r in range(2):
            root = int(reference[f"round{r}.block_ids"][0, 0])
            drafter.begin(reference[f"round{r}.target_hidden"][0], [root])
            segment = drafter.first_stage()
            assert segment.chain == reference[f"round{r}.draft_tokens"][0].tolist()
            hidden = drafter._bank
            torch.testing.assert_close(hidden, reference[f"round{r}.draft_hidden"][0], atol=1e-4, rtol=0)
            previous = torch.tensor([root, *segment.chain[:-1]])
            base = drafter.head(hidden)
            torch.testing.assert_close(base, reference[f"round{r}.base_logits"][0], atol=1e-4, rtol=0)
            corrected = host.network.correct(base, previous, hidden)
            torch.testing.assert_close(corrected, reference[f"round{r}.corrected_logits"][0], atol=1e-4, rtol=0)
            confidence = host.network.confidence(previous, hidden)
            torch.testing.assert_close(confidence, reference[f"round{r}.confidence_logits"][0], atol=1e-4, rtol=0)
            expected = corrected.log_softmax(-1).gather(1, torch.tensor(segment.chain)[:, None])[:, 0]
            assert segment.log_probs == pytest.approx(expected.tolist(), abs=1e-5)
            drafter.end()


def test_training_loss_and_gradients_equal_the_reference(folder):
    data = load_file(folder / "train.safetensors")
    expected = json.loads((folder / "train.json").read_text())["loss"]
    target, host = load(folder)
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=4.0, dloop_max_stage=0))
    assert objective.taps == (*host.taps, "norm")
    outputs = outputs_of(host, data, norm=data["target_last_hidden_states"])
    ((window, hidden),) = objective.stages(batch_of(data), outputs, *anchors_of(data), 0)
    counted = data["eval_mask"].bool()
    torch.testing.assert_close(objective.counted(window), counted)
    torch.testing.assert_close(window.labels_BNT[counted], data["target_ids"][counted])
    previous, _ = objective.row_inputs(window, outputs)
    logits = host.network.correct(objective.logits(hidden), previous, hidden)
    torch.testing.assert_close(logits[counted], data["draft_logits"][counted], atol=1e-4, rtol=0)
    confidence = host.network.confidence(previous, hidden)
    torch.testing.assert_close(confidence[counted], data["confidence_pred"][counted], atol=1e-4, rtol=0)
    stage = objective.stage_loss(hidden, window, outputs)
    terms = (stage.sums / stage.denominator).tolist()
    assert terms == pytest.approx([expected[name] for name in ("ce_loss", "l1_loss", "confidence_loss")], rel=1e-5)
    assert stage.correct_BNT[counted].float().mean().item() == pytest.approx(expected["accuracy"])
    total = objective.combine(stage, None, 0)
    assert total.item() == pytest.approx(expected["loss"], rel=1e-5)
    found = gradients(objective, total)
    for name, norm in expected["grad_norms"].items():
        assert float(found[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
    name = "markov_head.markov_w1.weight"
    torch.testing.assert_close(found[name], data[f"grad.{name}"], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_loop_stages_equal_the_reference(folder, k):
    data, loop = load_file(folder / "train.safetensors"), load_file(folder / "derived_loop.safetensors")
    expected = json.loads((folder / "derived_loop.json").read_text())[f"k{k}"]
    target, host = load(folder)
    objective = host.objective(target, ObjectiveOptions(loss_decay_gamma=4.0))
    outputs = outputs_of(host, data, norm=data["target_last_hidden_states"])
    stages = objective.stages(batch_of(data), outputs, *anchors_of(data), k)
    kept = loop[f"k{k}.keep"].bool()
    real = computed_blocks(stages, anchors_of(data)[0], kept)
    for s in range(1, k + 1):
        torch.testing.assert_close(stages[s][1][real], loop[f"k{k}.stage{s}.hidden"][kept], atol=1e-4, rtol=0)
    first, last = (objective.stage_loss(hidden, window, outputs) for window, hidden in (stages[0], stages[-1]))
    assert int(kept.sum()) == expected["valid_blocks"]
    assert first.denominator.item() == pytest.approx(expected["den0"], rel=1e-5)
    assert objective.combine(first, None, 0).item() == pytest.approx(expected["host_loss"], rel=1e-5)
    assert last.denominator.item() == pytest.approx(expected["denk"], rel=1e-5)
    assert objective.combine(last, None, 0).item() == pytest.approx(expected["loop_loss"], rel=1e-5)
    total = objective.combine(first, last, 0)
    assert total.item() == pytest.approx(expected["loss"], rel=1e-5)
    found = gradients(objective, total)
    for name, norm in expected["grad_norms"].items():
        assert float(found[name].norm()) == pytest.approx(norm, rel=1e-3, abs=1e-5), name
