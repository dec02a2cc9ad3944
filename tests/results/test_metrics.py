import pytest
from hypothesis import given
from hypothesis import strategies as st

from dloop.results import metrics
from dloop.results.metrics import Audit, audit, compare_runs, first_divergence, summarise
from tests.results.fabricate import invented, response, result


def rounds(lengths, *, tokens=None, seconds=1.0, **changes):
    """A response with these acceptance lengths."""
    produced = tokens or 1 + sum(lengths)
    return response(
        acceptance_lengths=lengths,
        extra_stages=changes.pop("extra_stages", [0] * len(lengths)),
        num_output_tokens=produced,
        decode_time=seconds,
        tpot=seconds / produced,
        **changes,
    )


EMPTY = rounds([], tokens=1, seconds=0.0)


def test_tau_is_the_mean_of_response_means_and_tau_micro_of_rounds():
    records = [rounds([4, 2]), rounds([1]), EMPTY]
    assert metrics.tau(records) == 2.0
    assert metrics.tau_micro(records) == pytest.approx(7 / 3)


def test_without_any_round_nothing_is_known():
    assert metrics.tau([EMPTY]) is metrics.tau_micro([EMPTY]) is metrics.speedup([EMPTY], [EMPTY]) is None
    assert summarise([])["throughput"] is None


def test_speedup_is_the_ratio_of_mean_times_per_token():
    baseline = [rounds([1], tokens=2, seconds=4.0), rounds([1] * 9, tokens=10, seconds=10.0)]
    method = [rounds([1], tokens=2, seconds=1.0), rounds([9], tokens=10, seconds=10.0)]
    assert metrics.speedup(method, baseline) == (2.0 + 1.0) / (0.5 + 1.0)
    assert metrics.speedup_micro(method, baseline) == pytest.approx(14 / 11)
    assert metrics.throughput(method) == pytest.approx(1 / 0.75)


def test_extra_stages_are_averaged_over_rounds():
    records = [rounds([1, 1, 1], extra_stages=[0, 2, 0]), rounds([1], extra_stages=[1])]
    assert metrics.mean_extra_stages(records) == 0.75
    assert metrics.open_share(records) == 0.5
    assert metrics.extra_stage_histogram(records) == {0: 2, 1: 1, 2: 1}


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), min_size=1))
def test_both_averages_lie_within_the_lengths_and_the_histogram_counts_every_round(lengths):
    records = [rounds(part) for part in lengths]
    flat = [n for part in lengths for n in part]
    assert min(flat) <= metrics.tau(records) <= max(flat)
    assert metrics.tau_micro(records) == pytest.approx(sum(flat) / len(flat))
    assert sum(metrics.histogram(records).values()) == len(flat) == summarise(records)["verify_calls"]


def test_the_summary_holds_exactly_the_schema_s_keys():
    method, baseline = invented("gsm8k", host="dflash"), invented("gsm8k")
    summary = summarise(method.responses, baseline, "baseline.json")
    assert list(summary) == [
        *("num_responses", "tokens", "mean_tpot", "throughput", "tau", "tau_micro"),
        *("mean_extra_stages", "verify_calls", "histogram"),
        *("baseline_path", "speedup", "speedup_micro", "identical_to_baseline"),
    ]
    assert summary["identical_to_baseline"] == 6
    assert summary["speedup"] > 1
    alone = summarise(method.responses)
    assert alone["speedup"] is alone["baseline_path"] is alone["identical_to_baseline"] is None


@pytest.mark.parametrize(
    ("ids", "reference", "position"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2], [1], 1), ([], [], None)],
)
def test_the_first_divergence_is_the_first_token_unlike(ids, reference, position):
    assert first_divergence(ids, reference) == position


def answer(ids, *, index=0, turn=0, divergence=None, margin=None):
    return response(output_ids=ids, index=index, turn=turn, first_divergence=divergence, divergence_margin=margin)


def test_the_audit_tells_ties_from_divergence():
    baseline = [answer([1, 2, 3], index=index) for index in range(6)]
    method = [
        answer([1, 2, 3], index=0),
        answer([1, 9, 3], index=1, divergence=1, margin=0.25),
        answer([1, 9, 3], index=2, divergence=1, margin=0.75),
        answer([1, 9, 3], index=3, divergence=1),
        answer([1, 9, 3], index=4, divergence=2, margin=0.0),
    ]
    found = audit(method, baseline, dtype="bfloat16")
    assert found == Audit(identical=1, tie=1, divergent=3)
    assert audit(method, baseline, dtype="float32") == Audit(identical=1, divergent=4)
    assert (found + found).total == 10


def test_a_turn_behind_another_answer_has_another_prompt():
    baseline = [
        answer([1, 2], turn=0),
        answer([3], turn=1),
        answer([4], index=1),
        answer([5], index=1, turn=1),
    ]
    method = [
        answer([1, 9], turn=0, divergence=1, margin=0.0),
        answer([3], turn=1),
        answer([4], index=1),
        answer([5], index=1, turn=1),
    ]
    assert audit(method, baseline, dtype="float32") == Audit(identical=2, tie=1, other_prompt=1)


def test_equal_runs_may_be_compared():
    assert compare_runs(invented("gsm8k", host="dflash"), invented("gsm8k")) == ([], [])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"config": {"model": "models/other"}}, "the target"),
        ({"config": {"max_new_tokens": 128}}, "--max-new-tokens is 256 here and 128 in the baseline"),
        ({"config": {"thinking": True}}, "--thinking"),
        ({"config": {"target_runtime": "lean"}}, "--target-runtime is None here and 'lean'"),
        ({"config": {"runtime": "graphs"}}, "--runtime is 'eager' here and 'graphs'"),
        ({"env": {"gpu": "NVIDIA H200"}}, "the device is 'CPU: Model 7' here and 'NVIDIA H200'"),
        ({"env": {"processes": 2}}, "the number of processes"),
        ({"env": {"dtype": "bfloat16"}}, "the dtype"),
        ({"env": {"attn": "eager"}}, "the attention implementation"),
        ({"prompts": 5}, "the selection of rows"),
    ],
)
def test_runs_under_other_conditions_may_not_be_compared(changes, sentence):
    errors, _ = compare_runs(invented("gsm8k", host="dflash"), invented("gsm8k", **changes))
    assert sentence in "; ".join(errors)


def test_the_same_target_under_another_spelling_is_the_same():
    method = invented("gsm8k", host="dflash", config={"model": "./models/tiny/"})
    assert compare_runs(method, invented("gsm8k")) == ([], [])


def test_other_benchmarks_and_other_prompts_may_not_be_compared():
    method = invented("gsm8k", host="dflash")
    assert "the benchmark is 'gsm8k' here and 'mbpp'" in compare_runs(method, invented("mbpp"))[0][0]
    method.responses[2].num_input_tokens += 1
    assert compare_runs(method, invented("gsm8k"))[0] == ["prompt 2 has another length than in the baseline"]
    del method.responses[2]
    assert "other rows or turns" in compare_runs(method, invented("gsm8k"))[0][0]


def test_a_later_turn_may_have_another_length():
    method = invented("mt-bench", host="dflash", turns=2)
    method.responses[1].num_input_tokens += 7
    assert compare_runs(method, invented("mt-bench", turns=2)) == ([], [])


def test_a_speculative_result_is_no_baseline():
    method = invented("gsm8k", host="dflash")
    assert compare_runs(method, method)[0] == ["the baseline is a speculative result"]


@pytest.mark.parametrize("key", ["torch", "transformers", "code", "hostname_hash", "torch_threads"])
def test_other_software_is_a_warning(key):
    errors, warnings = compare_runs(invented("gsm8k", host="dflash"), invented("gsm8k", env={key: "other"}))
    assert not errors
    assert len(warnings) == 1
    assert "'other' in its baseline" in warnings[0]


def test_invented_results_are_what_the_schema_allows():
    made = result([response(), response(index=1, row=1)])
    assert made.summary["tau"] == 3.0
