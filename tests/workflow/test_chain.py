"""The whole chain, from invented conversations to tables, through Snakemake: the demo with next to no work in it."""

import json

import pytest

from dloop.config import Configuration

BENCHMARKS = ("gsm8k", "mt-bench")


def micro(values):
    """The demo's configuration with eight-step trainings, two benchmarks of one prompt, and no quality demanded."""
    values["demo"] = {
        "corpus": {"benchmark_prompts": 1, "heldout": 16, "prompts": 32, "conversations": 160},
        "tokenizer": {"conversations": 160},
        "targets": {"tiny": {"steps": 8, "batch_size": 4, "check_quality": False}},
    }
    values["regenerate"]["flags"] |= {"max_tokens": 24, "batch_size": 8}
    values["training"] |= {"max_length": 128, "batch_size": 4}
    host = values["hosts"]["dflash"]
    host["training"]["num_epochs"] = 1
    host["drafts"]["tiny"]["released"]["num_epochs"] = 1
    del host["drafts"]["tiny"]["released"]["min_accepted_prefix"]
    values["evaluation"] |= {"max_new_tokens": 16, "warmup_runs": 1}
    values["benchmarks"] = {name: values["benchmarks"][name] for name in BENCHMARKS}
    return values


@pytest.mark.slow
def test_the_whole_chain(project):
    values = micro(project.configuration("demo.yaml"))
    project.write(values)
    run = project.snakemake("--cores", "2")
    assert run.returncode == 0, run.stdout + project.logs()

    results = project.folder / "results"
    answered = [json.loads(line) for line in (results / "regen/tiny/train.jsonl").read_text().splitlines()]
    assert [row["line"] for row in answered] == sorted(row["line"] for row in answered)
    assert not list(results.glob("regen/tiny/shards/*.jsonl")), "shards are gone once they are merged"
    for row in Configuration(values).experiments:
        for benchmark in BENCHMARKS:
            path = results / "eval/cpu/tiny/dflash" / row.setting / row.draft / f"{benchmark}.json"
            result = json.loads(path.read_text())
            assert result["summary"]["identical_to_baseline"] == result["summary"]["num_responses"]
            assert result["config"]["loop_gate"] == row.flags.get("loop_gate", 1.0)
    assert "DFlash" in (results / "tables/cpu/overview.md").read_text()
    assert "DFlash" in (results / "tables/cpu/dflash.tex").read_text()
    assert "<svg" in (results / "plots/cpu/extra_stages.svg").read_text()
    assert "results/tables/cpu/overview.md" in run.stdout, "the run ends with the tables"

    assert project.planned() == {}, "a second run has nothing to do"
    values["settings"]["dflash"]["dloop"]["flags"]["loop_gate"] = -0.25
    project.write(values)
    assert project.planned() == {"evaluate": 2, "tables": 1}, "the row and its control, and the tables"
