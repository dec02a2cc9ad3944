"""The Gemma 4 assistant against reference outputs (tests/golden/mtp_gemma4)."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from dloop.data.loader import Batch
from dloop.hosts.host import ObjectiveOptions
from dloop.hosts.mtp.gemma4_network import LAYER_TYPES, _ordered_logits, advance, logits
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import embedding, load_target
from dloop.hosts.unroll.loss import shift_left
from dloop.training.target_pass import FrozenTarget

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(golden):
    return golden / "mtp_gemma4"


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def host(folder):
    return load_host(str(folder / "assistant"), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def reference(folder):
    return load_file(folder / "assistant_forward.safetensors")


def shared(reference, end, window=16):
    """Keys and values a cropped cache holds of the first `end` positions."""
    start = {"full_attention": 0, "sliding_attention": max(0, end - window + 1)}
    return {
        kind: tuple(reference[f"kv.{kind}.{part}"][:, :, start[kind] : end] for part in "kv") for kind in LAYER_TYPES
    }


def test_embeddings_are_the_targets_scaled_ones(target, reference):
    torch.testing.assert_close(embedding(target)(reference["input_ids"]), reference["scaled_embeds"])


def test_self_fed_chain_equals_the_reference(target, host, reference):
    anchor = int(reference["chain_anchor"])
    cache = SimpleNamespace(length=anchor + 1, shared_kv=lambda: shared(reference, anchor + 1))
    drafter = host.drafter(target, cache=cache)
    with torch.inference_mode():
        drafter.begin(reference["target_hidden"][: anchor + 1], reference["input_ids"][1 : anchor + 2].tolist())
        segments = [drafter.first_stage(), drafter.next_stage(), drafter.next_stage()]
    assert [token for segment in segments for token in segment.chain] == reference["chain_tokens"].tolist()
    expected = reference["chain_logits"].log_softmax(-1).max(-1).values
    found = torch.tensor([number for segment in segments for number in segment.log_probs])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(drafter._hidden_11D[0, 0], reference["chain_hidden"][-1], atol=1e-4, rtol=0)


def test_every_step_of_the_chain_equals_the_reference(target, host, reference):
    anchor = int(reference["chain_anchor"])
    hidden = reference["target_hidden"][anchor]
    tokens = [int(reference["input_ids"][anchor + 1]), *reference["chain_tokens"].tolist()]
    with torch.inference_mode():
        for step in range(18):
            embeds = embedding(target)(torch.tensor([[tokens[step]]]))
            states, hidden = advance(
                host.network,
                embeds,
                hidden.view(1, 1, -1),
                torch.tensor([[anchor + 1]]),
                shared(reference, anchor + 1),
                dict.fromkeys(LAYER_TYPES),
            )
            torch.testing.assert_close(hidden[0, 0], reference["chain_hidden"][step], atol=1e-4, rtol=0)
            scores = logits(host.network, states[0])
            torch.testing.assert_close(scores[0], reference["chain_logits"][step], atol=1e-4, rtol=0)


def test_ordered_head_equals_the_reference(reference):
    centroids = torch.nn.Linear(32, 8, bias=False)
    centroids.weight.data = reference["centroid.weight"]
    order = SimpleNamespace(
        centroids=centroids,
        centroid_intermediate_top_k=3,
        num_centroids=8,
        token_ordering=reference["centroid.token_ordering"],
    )
    found = _ordered_logits(order, reference["centroid.hidden"], reference["centroid.lm_head"])
    # The reference fills all rows of a call with one number, ours each row with its own: the lowest of ours is that.
    filling = found.amin(-1, keepdim=True)
    found = torch.where(found == filling, filling.min(), found)
    torch.testing.assert_close(found, reference["centroid.logits"], atol=1e-4, rtol=0)


def training_batch(reference):
    mask = reference["loss_mask"][None].long()
    return Batch(reference["input_ids"][None], torch.ones_like(mask), mask, 0, (0,))


def test_the_frozen_pass_gives_the_reference_states_and_shared_keys_and_values(target, host, reference):
    objective = host.objective(target, ObjectiveOptions())
    batch = training_batch(reference)
    for remember in (False, True):
        states = FrozenTarget(target, objective.taps, remember=remember)(batch, [43]).states
        torch.testing.assert_close(states["norm"][0], reference["target_hidden"], atol=1e-4, rtol=0)
        for kind in LAYER_TYPES:
            for part, name in (("keys", "k"), ("values", "v")):
                found = states[f"shared_kv.{kind}.{part}"].transpose(1, 2)
                torch.testing.assert_close(found, reference[f"kv.{kind}.{name}"], atol=1e-4, rtol=0)


@pytest.fixture
def unrolled(target, host, reference):
    objective = host.objective(target, ObjectiveOptions(ttt_length_dist=(6,)))
    batch = training_batch(reference)
    return objective, batch, FrozenTarget(target, objective.taps)(batch, [43])


def test_every_unrolled_step_equals_the_reference(unrolled, reference):
    objective, batch, outputs = unrolled
    rows = objective.start(batch, outputs)
    hidden, memory = rows.hidden_BSD, list(rows.memory)
    with torch.no_grad():
        for step in range(6):
            positions = torch.arange(step, step + 43)[None]
            hidden, left = objective.advance(hidden, shift_left(batch.input_ids, step + 1), positions, memory)
            memory.append(left)
            # Rows whose token lies behind the end are fed what no loss looks at.
            fed = slice(0, 43 - 1 - step)
            found, scores = hidden[0, fed, :48], objective.draft_logits(hidden[0, fed])
            torch.testing.assert_close(found, reference["ttt_hidden"][step, fed], atol=1e-4, rtol=0)
            torch.testing.assert_close(scores, reference["ttt_logits"][step, fed], atol=1e-4, rtol=0)


def test_unrolled_loss_equals_the_reference(unrolled, reference):
    objective, batch, outputs = unrolled
    logits = objective.teacher_logits(reference["target_hidden"])
    torch.testing.assert_close(logits, reference["target_logits"], atol=1e-4, rtol=0)
    loss = objective(batch, outputs, 0)
    torch.testing.assert_close(loss.total, reference["ttt_loss_decay0.8"], atol=1e-4, rtol=0)
    steps = torch.stack([loss.ratios[f"unroll/cross_entropy/{step + 1}"][0] for step in range(6)])
    torch.testing.assert_close(steps, reference["ttt_ce_sum_over_T"], atol=1e-4, rtol=0)
