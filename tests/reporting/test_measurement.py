import math
from collections import Counter

import numpy as np
import pytest

from dloop.reporting.measurement import Measurement, average, measure
from dloop.reporting.noise import interval, resampled_speedups
from dloop.results.metrics import Audit
from tests.results.fabricate import invented, response


def test_a_baseline_measured_against_itself_is_one():
    baseline = invented("gsm8k")
    numbers = measure(baseline, baseline)
    assert (numbers.speedup, numbers.tau, numbers.open_share, numbers.audit) == (1.0, 1.0, 0.0, None)
    assert numbers.tokens_per_second == numbers.baseline_tokens_per_second


def test_without_a_baseline_only_lengths_and_rates_are_known():
    numbers = measure(invented("gsm8k", host="dflash"), None)
    assert math.isnan(numbers.speedup)
    assert math.isnan(numbers.speedup_interval[0])
    assert numbers.audit is None
    assert numbers.tau > 1


def test_an_average_takes_means_of_ratios_and_pools_rounds():
    first = Measurement(
        speedup=1.0,
        tau=2.0,
        responses=3,
        stages=Counter({0: 3, 1: 1}),
        audit=Audit(identical=3),
        draws=np.array([1.0, 2.0]),
    )
    second = Measurement(
        speedup=3.0, tau=3.0, responses=1, stages=Counter({0: 2, 2: 2}), audit=Audit(tie=1), draws=np.array([3.0, 5.0])
    )
    mean = average([first, second], wanted=2)
    assert (mean.speedup, mean.tau, mean.responses) == (2.0, 2.5, 4)
    assert (mean.rounds, mean.extra_stages, mean.open_share) == (8, 5 / 8, 3 / 8)
    assert mean.audit == Audit(identical=3, tie=1)
    assert mean.draws.tolist() == [2.0, 3.5]


def test_an_average_over_too_few_benchmarks_is_unknown_but_its_rounds_are_not():
    mean = average([Measurement(speedup=2.0, stages=Counter({0: 1, 1: 1}))], wanted=2)
    assert math.isnan(mean.speedup)
    assert mean.open_share == 0.5
    assert math.isnan(average([], wanted=2).open_share)


def test_resampling_surrounds_the_speedup_and_repeats_itself():
    method, baseline = invented("gsm8k", host="dflash", prompts=30), invented("gsm8k", prompts=30)
    draws = resampled_speedups(method.responses, baseline.responses, "gsm8k")
    low, high = interval(draws)
    assert low < measure(method, baseline).speedup < high
    assert np.array_equal(draws, resampled_speedups(method.responses, baseline.responses, "gsm8k"))


def test_rows_of_a_benchmark_are_resampled_alike():
    baseline = invented("gsm8k", prompts=8)
    slower = [response(index=r.index, row=r.row, tpot=2 * r.tpot) for r in baseline.responses]
    assert np.allclose(resampled_speedups(baseline.responses, slower, "gsm8k"), 2.0)


def test_without_common_responses_resampling_knows_nothing():
    assert np.isnan(resampled_speedups([response()], [], "gsm8k")).all()
    assert math.isnan(interval(resampled_speedups([], [response()], "gsm8k"))[0])


@pytest.mark.parametrize("bounds", [interval(np.array([2.0])), interval(np.full(10, 2.0))])
def test_an_interval_of_one_number_is_that_number(bounds):
    assert bounds == (2.0, 2.0)
