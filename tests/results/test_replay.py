"""Replaying a gate: by hand, and against rounds that a simulated draft really makes at the stricter gate."""

import math
import random

import pytest

from dloop.cli import UserError
from dloop.results.replay import CLOSED, replay
from tests.results.fabricate import invented, response

STAGE = 7


def test_the_recorded_gate_gives_the_recorded_rounds():
    made = invented("gsm8k", host="dflash", openness=0.4)
    for part in made.responses:
        # What opened was above the gate, what closed a round was not.
        part.gate_sums = [[-0.1] * extra + [-2.0] for extra in part.extra_stages]
    again = replay(made.responses, -0.5)
    assert again.tau == pytest.approx(made.summary["tau"])
    assert again.extra_stages == pytest.approx(made.summary["mean_extra_stages"])
    assert again.rounds.total() == made.summary["verify_calls"]


def three_stages(**changes):
    """One round of three stages of 3 tokens: 3 + 3 + 1 accepted."""
    rounds = {
        "acceptance_lengths": [8],
        "extra_stages": [2],
        "verified_tokens": [10],
        "gate_sums": [[-0.3, -0.6, -2.0]],
        "stage_lengths": [[3, 3, 3]],
        "stage_rows": [[3, 3, 3]],
        "stage_accepted": [[3, 3, 1]],
    }
    return response(**{**rounds, **changes})


@pytest.mark.parametrize("old", [False, True], ids=["recorded", "from chains"])
@pytest.mark.parametrize(
    ("gate", "rounds", "mean"),
    [
        (-1.0, {(2, 10): 1}, 8.0),
        (-0.5, {(1, 7): 1, (0, 4): 1}, 4.0),
        (-0.1, {(0, 4): 3}, 8 / 3),
    ],
)
def test_a_round_is_cut_behind_the_stage_that_no_longer_opens(gate, rounds, mean, old):
    record = three_stages(**({"stage_rows": [], "stage_accepted": []} if old else {}))
    again = replay([record], gate)
    assert dict(again.rounds) == rounds
    assert again.tau == pytest.approx(mean)


def test_stages_of_which_nothing_was_accepted_leave_no_round_behind():
    record = three_stages(acceptance_lengths=[4], stage_accepted=[[3, 0, 0]])
    assert dict(replay([record], CLOSED).rounds) == {(0, 4): 1}


def test_a_cap_hides_what_the_gate_would_have_done():
    record = three_stages(gate_sums=[[-0.1, -0.2, -0.3]])
    assert replay([record], -0.5, cap=2).unknown == 1
    assert replay([record], -0.5).unknown == replay([record], -0.25, cap=2).unknown == 0


def test_old_records_of_trees_are_refused():
    record = three_stages(verified_tokens=[40], stage_rows=[], stage_accepted=[])
    with pytest.raises(UserError, match="before stage_rows were recorded"):
        replay([record], CLOSED)


def decode(seed, gate, *, length=3000, tokens_lost=0.0):
    """Rounds of a draft that is wrong at fixed places of the text, and less sure near them."""
    noise = random.Random(seed)
    wrong = [noise.random() < 0.12 for _ in range(length + 200)]
    sure = [(-1.2 if bad else -0.03) * noise.uniform(0.2, 1.8) for bad in wrong]
    rounds = {name: [] for name in three_stages().__dict__ if name in BY_ROUND}
    place = 0
    while place < length:
        sums, accepted, alive, at = [], [], True, place
        while True:
            span = range(at + 1, at + 1 + STAGE)
            right = next((n for n, spot in enumerate(span) if wrong[spot]), STAGE)
            sums.append(sum(sure[spot] for spot in span))
            accepted.append(right if alive else 0)
            alive, at = alive and right == STAGE, at + STAGE
            if sums[-1] <= gate:
                break
        stages = len(sums)
        rounds["acceptance_lengths"].append(1 + sum(accepted))
        rounds["extra_stages"].append(stages - 1)
        rounds["verified_tokens"].append(1 + STAGE * stages)
        rounds["gate_sums"].append(sums)
        rounds["stage_lengths"].append([STAGE] * stages)
        rounds["stage_rows"].append([STAGE] * stages)
        rounds["stage_accepted"].append(accepted)
        place += 1 + sum(accepted)
    return response(**rounds)


BY_ROUND = (
    *("acceptance_lengths", "extra_stages", "verified_tokens", "gate_sums"),
    *("stage_lengths", "stage_rows", "stage_accepted"),
)


@pytest.mark.parametrize("gate", [-1.0, -0.5, -0.3, CLOSED])
def test_predictions_agree_with_rounds_really_decoded_at_that_gate(gate):
    recorded = [decode(seed, -2.0) for seed in range(8)]
    real = [decode(seed, gate) for seed in range(8)]
    again, truth = replay(recorded, gate), replay(real, gate)
    # Cut stages reach one token less far than a fresh one: never more than a few percent too low, never above.
    assert 0.96 * truth.tau < again.tau < 1.005 * truth.tau
    assert again.extra_stages == pytest.approx(truth.extra_stages, abs=0.02)
    assert math.isfinite(again.tau)
