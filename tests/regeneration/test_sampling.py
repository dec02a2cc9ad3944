"""Batched sampling against simple oracles: one row at a time without a cache, and the library's own filters."""

import json

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dloop.hosts.target_model import load_target
from dloop.regeneration import sampling
from dloop.regeneration.sampling import BatchSampler, Sampling, draw
from tests.regeneration.tiny_target import tiny_model

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [20, 21], [5, 6, 7, 8], [30]]
GREEDY = Sampling(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def greedy_alone(model, prompt, stops, limit):
    """Greedy tokens of one prompt, the whole text read again for each."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit and (len(ids) == len(prompt) or ids[-1] not in stops):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_greedy_answers_of_a_batch_equal_those_of_single_prompts(model):
    free = [greedy_alone(model, prompt, (), 12) for prompt in PROMPTS]
    # Stops from the middle of some answers make the rows end at different times.
    stops = {free[0][3], free[2][6], free[5][0]}
    wanted = [greedy_alone(model, prompt, stops, 12) for prompt in PROMPTS]
    assert len({len(answer) for answer in wanted}) > 2
    assert BatchSampler(model, stops, GREEDY).answers(PROMPTS, generator()) == wanted


@pytest.mark.parametrize("target", ["mtp_qwen35/checkpoint", "mtp_gemma4/target"])
def test_targets_with_linear_or_sliding_layers_answer_in_batches(golden, target):
    model = load_target(str(golden / target), dtype=torch.float32, device=torch.device("cpu"))
    traces = json.loads((golden / target.split("/")[0] / "traces.json").read_text())
    sampler = BatchSampler(model, (), Sampling(temperature=0, max_tokens=40))
    answers = sampler.answers([trace["prompt"] for trace in traces], generator())
    assert answers == [trace["greedy"][:40] for trace in traces]
    # A stop ends the rows at different times, and what has ended leaves the batch.
    stop = traces[0]["greedy"][7]
    sampler = BatchSampler(model, (stop,), Sampling(temperature=0, max_tokens=40))
    answers = sampler.answers([trace["prompt"] for trace in traces], generator())
    cut = [[*trace["greedy"][:40], stop] for trace in traces]
    assert answers == [ids[: min(ids.index(stop) + 1, 40)] for ids in cut]
    assert len({len(answer) for answer in answers}) > 2


def test_packing_the_batch_changes_nothing(model, monkeypatch):
    stops = range(0, 512, 8)
    answers = {}
    for share in (0, 0.75, 1):
        monkeypatch.setattr(sampling, "SHRINK_AT", share)
        answers[share] = BatchSampler(model, stops, GREEDY).answers(PROMPTS * 4, generator())
    assert answers[0] == answers[0.75] == answers[1]


def test_the_same_random_state_gives_the_same_answers(model):
    sampler = BatchSampler(model, range(0, 512, 16), Sampling(temperature=1, max_tokens=20, top_p=0.9, top_k=50))
    first, again, other = (sampler.answers(PROMPTS, generator(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert all(len(answer) == 20 or answer[-1] % 16 == 0 for answer in first)


def test_answers_end_at_the_context():
    model = tiny_model(context=10)
    sampler = BatchSampler(model, (), GREEDY)
    assert [len(answer) for answer in sampler.answers(PROMPTS[:3], generator())] == [7, 9, 2]
    assert sampler.room(range(10)) == 0


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, 20, 0.8), (1.0, 64, 0.95), (0.7, None, 0.5), (0.5, 3, None), (1.0, None, None)],
)
def test_tokens_are_drawn_from_the_distribution_of_the_librarys_filters(temperature, top_k, top_p):
    logits = torch.randn(1, 40, generator=generator(3)) * 2
    filters = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        filters.append(TopKLogitsWarper(top_k))
    if top_p:
        filters.append(TopPLogitsWarper(top_p))
    wanted = filters(None, logits.clone()).softmax(-1)[0]
    settings = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=1)
    drawn = draw(logits.expand(40_000, -1), settings, generator())
    found = torch.bincount(drawn, minlength=40) / len(drawn)
    assert found[wanted == 0].sum() == 0
    # Four standard deviations of the share of the likeliest token.
    assert (found - wanted).abs().max() < 4 * (0.25 / len(drawn)) ** 0.5
