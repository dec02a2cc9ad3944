"""The evaluation command with an EAGLE-3 draft: reference generations, its tree flags, losslessness by the audit."""

import json

import pytest

from dloop.cli import UserError
from tests.test_benchmark import records, run


@pytest.fixture(scope="module")
def cases(golden):
    return json.loads((golden / "eagle3/generation.json").read_text())


@pytest.fixture(scope="module")
def common(golden, cases, tmp_path_factory):
    prompts = tmp_path_factory.mktemp("prompts") / "ids.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": case["prompt"]}) + "\n" for case in cases))
    (limit,) = {case["max_new_tokens"] for case in cases}
    (stop,) = {case["eos"] for case in cases}
    return [
        *("--model", golden / "eagle3/target", "--dataset", prompts, "--dtype", "float32", "--device", "cpu"),
        *("--warmup-runs", 0, "--max-new-tokens", limit, "--stop-token-ids", stop),
    ]


@pytest.fixture(scope="module")
def baseline(common, tmp_path_factory):
    path = tmp_path_factory.mktemp("baseline") / "baseline.json"
    run(*common, "--baseline", "--output", path)
    return path


@pytest.fixture(scope="module")
def draft(golden):
    return ["--draft-model", golden / "eagle3/draft"]


@pytest.mark.parametrize(
    ("shape", "flags"),
    [
        ("60/7/10", []),
        ("16/3/4", ["--tree-budget", 16, "--tree-depth", 3, "--topk-k", 4]),
        ("8/1/3", ["--tree-budget", 8, "--tree-depth", 1, "--topk-k", 3]),
    ],
)
def test_reference_generations_through_the_command(common, draft, cases, tmp_path, shape, flags):
    out = tmp_path / "result.json"
    run(*common, *draft, *flags, "--output", out)
    for response, case in zip(records(out), cases, strict=True):
        expected = case["tree"][shape]["acceptance_lengths"]
        assert response["output_ids"] == case["greedy_ids"]
        assert response["acceptance_lengths"][: len(expected)] == expected
    config = json.loads(out.read_text())["config"]
    recorded = "/".join(str(config[name]) for name in ("tree_budget", "tree_depth", "topk_k"))
    assert recorded == shape
    assert config["stage_tree_budget"] == 48


@pytest.mark.parametrize("flags", [[], ["--stage-tree-budget", 96], ["--tree-budget", 0], ["--tree-budget", 1]])
def test_loops_are_lossless_through_the_command(common, draft, baseline, tmp_path, flags):
    out = tmp_path / "result.json"
    loop = ["--loop-gate", -0.9, "--baseline-result", baseline, "--require-lossless"]
    run(*common, *draft, *loop, *flags, "--output", out)
    result = json.loads(out.read_text())
    assert result["host"] == "eagle3"
    assert any(any(response["extra_stages"]) for response in result["responses"])


def test_a_chain_has_a_depth_too(common, draft, tmp_path):
    out = tmp_path / "result.json"
    run(*common, *draft, "--tree-budget", 0, "--tree-depth", 4, "--output", out)
    assert {length for response in records(out) for stages in response["stage_lengths"] for length in stages} == {5}
    config = json.loads(out.read_text())["config"]
    assert (config["tree_budget"], config["tree_depth"], config["topk_k"]) == (0, 4, None)
    run(*common, *draft, "--tree-budget", 0, "--tree-depth", 4, "--output", out)
    with pytest.raises(UserError, match="tree_depth = 4"):
        run(*common, *draft, "--tree-budget", 0, "--tree-depth", 5, "--output", out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tree-width", 4], "--tree-width has no effect on eagle3"),
        (["--tree-budget", 0, "--topk-k", 4], "no effect without a tree"),
        (["--tree-depth", 0], "at least 1"),
    ],
)
def test_flags_without_effect_are_refused(common, draft, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run(*common, *draft, *flags, "--output", tmp_path / "result.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-extra-stages", -1], "--max-extra-stages is -1"),
        (["--warmup-runs", -1], "--warmup-runs is -1"),
        (["--seed", 1 << 32], "below 2"),
        (["--device", "mps"], "only CPUs and CUDA"),
        (["--device", "toaster"], "knows no such device"),
        (["--output", "/dev/null/o.json"], "cannot be written"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_measured(common, draft, tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        run(*common, *draft, "--output", tmp_path / "o.json", *flags)
    assert not (tmp_path / "o.json").exists()


def test_a_result_of_other_prompts_is_never_taken_for_this_one(golden, tmp_path):
    prompts, out = tmp_path / "p.jsonl", tmp_path / "o.json"
    command = [
        *("--model", golden / "eagle3/target", "--baseline", "--dataset", prompts, "--output", out, "--device", "cpu"),
        *("--max-new-tokens", 2, "--warmup-runs", 0, "--stop-token-ids", "none"),
    ]
    prompts.write_text('{"prompt_ids": [5]}\n')
    run(*command)
    before = out.read_bytes()
    prompts.write_text('{"prompt_ids": [6]}\n')
    with pytest.raises(UserError, match="measured on other prompts"):
        run(*command)
    assert out.read_bytes() == before
    prompts.write_text('{"prompt_ids": [320]}\n')
    with pytest.raises(UserError, match="knows 0 to 319"):
        run(*command, "--overwrite")
    with pytest.raises(UserError, match="two results"):
        run(*command[:5], prompts, *command[5:7], out, *command[7:])
    assert out.read_bytes() == before
