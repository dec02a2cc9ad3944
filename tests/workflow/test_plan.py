"""What Snakemake plans from the configurations in the repository, and what it refuses before any job."""

import pytest
from snakemake.utils import update_config

from dloop.config import Configuration

PAPER = {"conditions": 4, "baseline": 32, "evaluate": 256, "tables": 1}


def test_the_paper_run_is_planned_from_a_fresh_clone(project):
    assert project.planned("all_tables") == PAPER
    assert project.planned() == PAPER


def test_the_cluster_profile_plans_the_same(project):
    pytest.importorskip("snakemake_executor_plugin_slurm")
    assert project.planned("all_tables", "--profile", "slurm") == PAPER


def test_the_other_targets(project):
    assert project.planned("all_baselines") == {"baseline": 32}
    assert project.planned("all_training") == {"prompts": 1, "regenerate": 32, "merge": 4, "train": 10}


def test_trained_drafts_and_their_controls_pull_in_the_whole_chain(project):
    planned = project.planned("--config", "loop_draft=trained", "control=True")
    assert planned == {
        "prompts": 1,
        "regenerate": 32,
        "merge": 4,
        "train": 20,
        "conditions": 4,
        "baseline": 32,
        "evaluate": 336,
        "tables": 1,
    }


def test_the_demo_is_one_job_a_setting(project):
    planned = project.planned("--configfile", "config/demo.yaml")
    rows = Configuration(project.configuration("demo.yaml")).experiments
    assert planned["evaluate"] == len(rows)
    assert planned["baseline"] == 1
    assert planned["train"] == 3
    assert planned["tiny_target"] == planned["corpus"] == planned["tokenizer"] == 1


def test_every_host_is_laid_over_the_demo(project):
    planned = project.planned("--configfile", "config/demo.yaml", "config/demo-all.yaml")
    values = project.configuration("demo.yaml")
    update_config(values, project.configuration("demo-all.yaml"))
    everything = Configuration(values)
    assert planned["evaluate"] == len(everything.experiments)
    assert planned["train"] == 2 * len(everything.pairs)
    assert planned["corpus"] == planned["tokenizer"] == 1
    assert values["hosts"].keys() == project.configuration()["hosts"].keys()


def test_one_result_by_its_path(project):
    path = "results/eval/h100-80gb/qwen3-4b/dflash/dloop/published/gsm8k.json"
    assert project.planned(path) == {"conditions": 1, "baseline": 1, "evaluate": 1}


@pytest.mark.parametrize(
    "path",
    [
        "results/eval/h100-80gb/qwen3-4b/dflash/dloop/published/gsm9k.json",
        "results/eval/h100-80gb/qwen3-4/dflash/dloop/published/gsm8k.json",
        "results/eval/h200/qwen3-4b/dflash/dloop/published/gsm8k.json",
    ],
)
def test_a_misspelt_path_has_no_rule(project, path):
    run = project.snakemake(path, "--dry-run")
    assert run.returncode != 0
    assert f"No rule to produce {path}" in run.stdout


def test_a_misspelt_key_is_refused_with_a_sentence(project):
    run = project.snakemake("--dry-run", "--config", "loop_drafts=trained")
    assert run.returncode != 0
    assert "'loop_drafts' is not a key of the top level: did you mean 'loop_draft'?" in run.stdout
    assert "Traceback" not in run.stdout
