import pytest

from dloop.cli import UserError
from dloop.reporting.collect import collect, read_rows
from dloop.reporting.modelled import read_cost_table
from dloop.results.record import read_result, write_result
from tests.reporting.tree import build, cost_table

SETS = ["gsm8k", "mt-bench"]


def gather(root, listed, sets=SETS, **more):
    return collect(root, "cpu", read_rows(listed), sets, **more)


def change(root, path, edit):
    """Rewrite one stored result after `edit`."""
    result = read_result(root / path)
    edit(result)
    write_result(root / path, result)
    return root / path


@pytest.fixture
def tree(tmp_path):
    return tmp_path, build(tmp_path, benchmarks=SETS, prompts=3)


METHOD = "eval/cpu/tiny/dflash/dloop/trained/gsm8k.json"
BASELINE = "baseline/cpu/tiny/gsm8k.json"


def test_rows_stand_behind_their_target_s_baseline(tmp_path):
    listed = build(tmp_path, targets=("a", "b"), benchmarks=["gsm8k"], prompts=2)
    found = gather(tmp_path, listed[::-1], ["gsm8k"])
    assert [(row.target, row.setting, row.draft) for row in found.rows] == [
        *[("b", "baseline", ""), ("b", "dloop", "control"), ("b", "dloop", "trained"), ("b", "released", "released")],
        *[("a", "baseline", ""), ("a", "dloop", "control"), ("a", "dloop", "trained"), ("a", "released", "released")],
    ]


def test_speedups_come_from_both_files_and_not_from_summaries(tree):
    root, listed = tree

    def twice_as_fast(result):
        for part in result.responses:
            part.decode_time, part.tpot = part.decode_time / 2, part.tpot / 2

    before = gather(root, listed)
    change(root, METHOD, twice_as_fast)
    after = gather(root, listed)
    key = next(key for key in after.measured if key[0].draft == "trained" and key[1] == "gsm8k")
    assert after.measured[key].speedup == pytest.approx(2 * before.measured[key].speedup)


def test_records_are_not_kept(tree):
    root, listed = tree
    assert all(result.responses == [] for result in gather(root, listed).results)


def test_paths_of_benchmarks_are_columns_by_their_stem(tree):
    root, listed = tree
    assert gather(root, listed, ["some/where/gsm8k.jsonl"]).benchmarks == ["gsm8k"]


@pytest.mark.parametrize("sets", [[], ["gsm8k", "elsewhere/gsm8k.jsonl"]])
def test_columns_are_named_once(sets, tree):
    root, listed = tree
    with pytest.raises(UserError, match="--benchmarks"):
        gather(root, listed, sets)


def test_missing_files_are_remembered(tree):
    root, listed = tree
    (root / METHOD).unlink()
    (root / "baseline/cpu/tiny/mt-bench.json").unlink()
    found = gather(root, listed)
    assert [path.removeprefix(str(root)) for path in found.missing] == [
        "/" + METHOD,
        "/baseline/cpu/tiny/mt-bench.json",
    ]
    assert len(found.measured) == 6


def test_without_any_result_there_is_no_table(tmp_path):
    listed = build(tmp_path, benchmarks=["gsm8k"], prompts=1)
    with pytest.raises(UserError, match="run the evaluations first"):
        gather(tmp_path / "elsewhere", listed)


@pytest.mark.parametrize(
    ("flag", "wanted", "sentence"),
    [
        ("loop_gate", -1.0, r"was made with --loop-gate -0\.5, the row tiny/dflash/dloop/trained asks for -1\.0"),
        ("--loop-gate", "-1", "--loop-gate"),
        ("max_new_tokens", 2048, "--max-new-tokens 256"),
        ("tree_budget", 256, "--tree-budget None"),
        ("stop_token_ids", "1,2", "--stop-token-ids None"),
    ],
)
def test_a_result_made_with_other_options_is_refused_by_file_and_flag(flag, wanted, sentence, tree):
    root, listed = tree
    flags = {key: value for key, value in listed[1]["flags"].items() if key != flag.strip("-").replace("-", "_")}
    listed[1]["flags"] = {**flags, flag: wanted}
    with pytest.raises(UserError, match=sentence) as error:
        gather(root, listed)
    assert METHOD in str(error.value)


def test_loop_options_the_row_does_not_mention_must_be_off(tree):
    root, listed = tree
    change(root, METHOD, lambda result: result.config.update(max_extra_stages=2))
    with pytest.raises(UserError, match="--max-extra-stages 2"):
        gather(root, listed)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (-0.5, "-0.5"),
        (float("-inf"), "-inf"),
        ([1, 2], "1,2"),
        ([], "none"),
        (256, 256.0),
        (None, None),
        (False, False),
    ],
)
def test_spellings_of_one_value_are_equal(stored, wanted, tree):
    root, listed = tree
    for entry, path in ((listed[1], METHOD), (listed[1], METHOD.replace("gsm8k", "mt-bench"))):
        entry["flags"]["something"] = wanted
        change(root, path, lambda result: result.config.update(something=stored))
    gather(root, listed)


def test_a_result_of_another_host_is_refused(tree):
    root, listed = tree
    change(root, METHOD, lambda result: setattr(result, "host", "dspark"))
    with pytest.raises(UserError, match="holds a result of host dspark, the row asks for dflash"):
        gather(root, listed)


def test_a_baseline_of_another_selection_is_refused_with_both_names(tree):
    root, listed = tree
    change(root, BASELINE, lambda result: setattr(result.dataset, "total_rows", 99))
    with pytest.raises(UserError, match="the number of benchmark rows is 3 here and 99 in the baseline") as error:
        gather(root, listed)
    assert BASELINE in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("gpu", "NVIDIA H200"), ("dtype", "bfloat16"), ("processes", 2)])
def test_a_table_does_not_mix_conditions(key, value, tree):
    root, listed = tree
    for path in root.rglob("mt-bench.json"):
        change(root, path.relative_to(root), lambda result: result.env.update({key: value}))
    with pytest.raises(UserError, match="one table cannot mix") as error:
        gather(root, listed)
    assert "gsm8k.json" in str(error.value)
    assert "mt-bench.json" in str(error.value)


def test_other_software_is_counted_as_a_warning(tree):
    root, listed = tree
    change(root, BASELINE, lambda result: result.env.update(torch="2.9.1"))
    assert dict(gather(root, listed).warnings) == {
        "the torch version is '2.13.0+cpu' in a result and '2.9.1' in its baseline": 3
    }


def test_a_row_asked_for_twice_is_refused(tree):
    root, listed = tree
    with pytest.raises(UserError, match="tiny/dflash/released/released is asked for twice"):
        gather(root, [*listed, listed[0]])


def test_a_variant_is_compared_with_its_own_released_row(tmp_path):
    rows = {
        (setting, draft): {"skill": 0.0, "openness": 0.2, "gate": gate}
        for setting, draft, gate in (
            ("released", "released", 1.0),
            ("released-chain", "released", 1.0),
            ("dloop-chain", "trained", -0.5),
            ("dloop-eager", "trained", -1.0),
        )
    }
    found = gather(tmp_path, build(tmp_path, rows=rows, benchmarks=SETS, prompts=2))
    compared = {row.setting: found.released(row).setting for row in found.rows if row.looped}
    assert compared == {"dloop-chain": "released-chain", "dloop-eager": "released"}


def test_a_cost_table_fills_the_modelled_speedup(tree):
    root, listed = tree
    found = gather(root, listed, costs=[read_cost_table(cost_table(root / "c.json", rows=16))])
    trained = next(numbers for (row, _), numbers in found.measured.items() if row.draft == "trained")
    assert trained.modelled_speedup == pytest.approx(trained.speedup, rel=0.2)
    assert found.rounds_beyond_costs > 0


def test_a_cost_table_of_another_machine_is_refused(tree):
    root, listed = tree
    with pytest.raises(UserError, match="timed with gpu CPU: Model 8"):
        gather(root, listed, costs=[read_cost_table(cost_table(root / "c.json", gpu="CPU: Model 8"))])


def test_a_cost_table_belongs_to_one_target(tmp_path):
    listed = build(tmp_path, targets=("tiny", "other"), benchmarks=["gsm8k"], prompts=1)
    found = gather(tmp_path, listed, ["gsm8k"], costs=[read_cost_table(cost_table(tmp_path / "c.json"))])
    modelled = {row.target for (row, _), numbers in found.measured.items() if numbers.modelled_speedup > 0}
    assert modelled == {"tiny"}


def test_a_row_with_a_tree_has_no_modelled_speedup(tree):
    root, _ = tree
    costs = read_cost_table(cost_table(root / "c.json"))
    assert costs.fits(read_result(root / METHOD))
    change(root, METHOD, lambda result: result.config.update(tree_budget=16))
    assert not costs.fits(read_result(root / METHOD))


@pytest.mark.parametrize("raw", [{}, [], [1], [{"target": "t"}], [{**dict.fromkeys("abcd"), "flags": {}}]])
def test_experiments_of_another_shape_are_refused(raw):
    with pytest.raises(UserError, match="--experiments"):
        read_rows(raw)
