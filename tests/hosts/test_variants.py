"""Block drafters whose configuration differs from the golden ones: lossless, and trained as they decode."""

import json
import math

import pytest
import torch

from dloop.cli import UserError
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings
from dloop.hosts.host import ObjectiveOptions
from dloop.hosts.registry import load_host, new_host
from dloop.hosts.target_model import load_target
from tests.decoding.test_loop import greedy
from tests.decoding.test_trees import decode

from .block.test_stages import batch_of, outputs_of, random_ids

CPU = torch.device("cpu")
VARIANTS = {
    "domino without shift": ("domino", {"shift_label": False}),
    "domino without prefix": ("domino", {"pure_draft_prefix_len": 0}),
    "domino with a long prefix, no shift": ("domino", {"pure_draft_prefix_len": 3, "shift_label": False}),
    "dspark gated": ("dspark", {"markov_head_type": "gated"}),
    "dspark without heads": ("dspark", {"markov_rank": 0, "enable_confidence_head": False}),
    "dspark, confidence from the row alone": ("dspark", {"confidence_head_with_markov": False}),
    "dspark gated, one key head": (
        "dspark",
        {"markov_head_type": "gated", "enable_confidence_head": False},
        {"num_key_value_heads": 1},
    ),
    "domino with a long prefix, as many key heads as heads": (
        "domino",
        {"pure_draft_prefix_len": 2, "emb_dim": None},
        {"num_key_value_heads": 4},
    ),
    "dflash with biases, taps out of order": (
        "dflash",
        {"target_layer_ids": [3, 0, 3]},
        {"attention_bias": True, "num_key_value_heads": 4, "head_dim": None},
    ),
    "dflash, a block longer than the answer": ("dflash", {}, {"block_size": 31, "num_key_value_heads": 1}),
}


@pytest.fixture(scope="module", params=VARIANTS.items(), ids=lambda item: item[0])
def pair(request, golden, tmp_path_factory):
    name, fields, *outer = request.param[1]
    draft = "draft_specforge" if name == "dspark" else "draft"
    config = json.loads((golden / name / draft / "config.json").read_text())
    config["dflash_config"] |= fields
    path = tmp_path_factory.mktemp("variant") / "config.json"
    path.write_text(json.dumps(config | {"initializer_range": 0.4} | dict(*outer)))
    target = load_target(str(golden / name / "target"), dtype=torch.float32, device=CPU)
    host = new_host(str(path), seed=3, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        for name, parameter in host.network.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return target, host


@pytest.mark.parametrize("budget", [0, 20])
def test_ids_equal_plain_greedy(pair, budget):
    target, host = pair
    expected = greedy(target, [7, 8, 9], 24)
    for gate in (Gate(), Gate(-math.inf, 2)):
        settings = Settings(24, frozenset(), gate, budget, budget // 2)
        assert decode(target, host, [7, 8, 9], settings).output_ids == expected


def test_teacher_forced_rows_equal_decoded_rows(pair):
    target, host = pair
    ids = random_ids(1, 60, seed=0)
    batch = batch_of(ids)
    outputs = outputs_of(target, host, batch)
    objective = host.objective(target, ObjectiveOptions())
    anchors = torch.tensor([[4, 23]])
    with torch.inference_mode():
        (window, hidden), *_ = objective.stages(batch, outputs, anchors, torch.ones_like(anchors).bool(), 0)
        features = torch.cat([outputs.states[tap] for tap in host.taps], dim=-1)[0]
        drafter = host.drafter(target)
        for n, anchor in enumerate(anchors[0].tolist()):
            drafter.reset(64)
            drafter.begin(features[:anchor], [int(ids[0, anchor])])
            segment = drafter.first_stage()
            torch.testing.assert_close(drafter._bank, hidden[0, n], atol=1e-5, rtol=1e-4)
            # With the drafts themselves as teacher tokens, each row's greedy choice is the next draft.
            own = torch.tensor(segment.chain)
            taught = window.__class__(
                position_BN=window.position_BN[:, n : n + 1],
                keep_BN=window.keep_BN[:, n : n + 1],
                anchor_BN=window.anchor_BN[:, n : n + 1],
                labels_BNT=own[None, None],
                mask_BNT=torch.ones_like(own).bool()[None, None],
            )
            stage = objective.stage_loss(hidden[:, n : n + 1], taught, outputs)
            assert stage.correct_BNT.all()


def test_what_is_saved_is_what_loads(pair, tmp_path):
    _, host = pair
    host.save(tmp_path, torch.float32)
    again = load_host(str(tmp_path), dtype=torch.float32, device=CPU)
    assert type(again) is type(host)
    assert again.network.config == host.network.config
    state = again.network.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in host.network.state_dict().items())


def test_gradients_reach_every_parameter(pair):
    target, host = pair
    batch = batch_of(random_ids(2, 60, seed=1), places=(0, 1))
    options = ObjectiveOptions(loss_decay_gamma=4.0, total_steps=10, lambda_base_start=0.5)
    if host.name != "domino":
        options = ObjectiveOptions(loss_decay_gamma=4.0)
    objective = host.objective(target, options)
    objective(batch, outputs_of(target, host, batch), 0).total.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_an_unknown_markov_head_is_refused(golden, tmp_path):
    config = json.loads((golden / "dspark/draft_specforge/config.json").read_text())
    config["dflash_config"]["markov_head_type"] = "rnn"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="'rnn'; supported are 'vanilla' and 'gated'"):
        new_host(str(tmp_path), seed=0, dtype=torch.float32, device=CPU)


def test_a_curriculum_flag_on_another_host_is_refused(golden):
    target = load_target(str(golden / "dspark/target"), dtype=torch.float32, device=CPU)
    host = new_host(str(golden / "dspark/draft_specforge"), seed=0, dtype=torch.float32, device=CPU)
    with pytest.raises(UserError, match="--lambda-base-start"):
        host.objective(target, ObjectiveOptions(lambda_base_start=0.5))
