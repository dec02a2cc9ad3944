"""A configuration that was edited while jobs waited: they measure with the new values, and no table takes them."""

from dloop.config import Configuration
from tests.results.fabricate import compare, invented, write

DEVICE = {"gpu": "NVIDIA H100 80GB HBM3", "dtype": "bfloat16"}


def one_host(project):
    """The paper's configuration, reduced to DFlash on one target and one benchmark."""
    values = project.configuration()
    values["hosts"] = {"dflash": values["hosts"]["dflash"]}
    values["settings"] = {"dflash": values["settings"]["dflash"]}
    values["targets"] = {"qwen3-4b": values["targets"]["qwen3-4b"]}
    del values["hosts"]["dflash"]["drafts"]["qwen3-8b"]
    values["benchmarks"] = {"gsm8k": {}}
    return values


def measured(project, values):
    """Results as the jobs of `values` would leave them."""
    root, gpu = project.folder / "results", values["gpu"]
    plan = Configuration(values)
    conditions = root / f"baseline/{gpu}/qwen3-4b/conditions.txt"
    conditions.parent.mkdir(parents=True)
    conditions.touch()
    baseline = invented("gsm8k", config=plan.baseline_flags("qwen3-4b"), env=DEVICE)
    path = write(root, f"baseline/{gpu}/qwen3-4b/gsm8k.json", baseline)
    for row in plan.experiments:
        made = invented("gsm8k", host="dflash", openness=0.1, config=row.flags, env=DEVICE, seed=row.setting)
        place = f"eval/{gpu}/{row.target}/{row.host}/{row.setting}/{row.draft}/gsm8k.json"
        write(root, place, compare(made, baseline, str(path)))


def test_a_result_of_another_configuration_stops_the_tables_by_file_and_flag(project):
    values = one_host(project)
    project.write(values)
    measured(project, values)
    tables = "results/tables/h100-80gb/overview.md"
    run = project.snakemake("--cores", "1", tables)
    assert run.returncode == 0, run.stdout + project.logs()

    # Snakemake knows nothing of these results' parameters, just as it believes the old ones after such an edit.
    values["settings"]["dflash"]["dloop"]["flags"]["loop_gate"] = -0.75
    project.write(values)
    run = project.snakemake("--cores", "1", "--show-failed-logs", tables)
    assert run.returncode != 0
    assert "eval/h100-80gb/qwen3-4b/dflash/dloop/published/gsm8k.json was made with --loop-gate -0.5" in run.stdout
    assert "asks for -0.75" in run.stdout
