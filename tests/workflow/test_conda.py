"""Where a `conda` is found, each rule runs in the environment it names; where there is none, everything still works."""

import sys
from pathlib import Path

import pytest

from tests.workflow.stand_in_conda import stand_in_conda
from tests.workflow.test_plan import PAPER
from tests.workflow.test_reruns import stub_stages

WHICH_PYTHON = """
import sys
from pathlib import Path

words = sys.argv[1:]
for file in words[words.index("--output") + 1 :]:
    Path(file).write_text(sys.executable)
"""


def two_environments(project):
    """One benchmark's baseline on a target of each environment; what the stage writes is the Python it ran in."""
    stub_stages(project)
    (project.folder / "dloop/benchmark.py").write_text(WHICH_PYTHON)
    values = project.configuration()
    targets = {entry["environment"]: name for name, entry in values["targets"].items()}
    return {env: f"results/baseline/{values['gpu']}/{name}/gsm8k.json" for env, name in targets.items()}


def assert_each_in_its_own(project, files):
    used = {env: (project.folder / file).read_text() for env, file in files.items()}
    assert len(set(used.values())) == len(files) == 2
    assert all("/.snakemake/conda/" in python for python in used.values())
    made = {path.read_text() for path in (project.folder / ".snakemake/conda").glob("*.yaml")}
    assert made == {(project.folder / f"workflow/envs/{env}.yaml").read_text() for env in files}


@pytest.mark.slow
def test_every_target_runs_in_its_environment(project, tmp_path_factory):
    files = two_environments(project)
    path = stand_in_conda(tmp_path_factory.mktemp("conda"))
    command = ["--cores", "2", "--software-deployment-method", "conda", "--set-resources", "baseline:gpu=1"]
    run = project.snakemake(*files.values(), *command, path=path)
    assert run.returncode == 0, run.stdout + project.logs()
    assert_each_in_its_own(project, files)


def test_without_conda_the_jobs_use_the_python_of_snakemake(project):
    files = two_environments(project)
    run = project.snakemake(files["core"], "--cores", "2", "--set-resources", "baseline:gpu=1")
    assert run.returncode == 0, run.stdout + project.logs()
    used = Path((project.folder / files["core"]).read_text())
    assert used.parent.samefile(Path(sys.executable).parent)


def test_the_cluster_profile_is_planned_with_conda_on_the_path_and_without(project, tmp_path_factory):
    pytest.importorskip("snakemake_executor_plugin_slurm")
    path = stand_in_conda(tmp_path_factory.mktemp("conda"))
    with_conda = project.snakemake("--profile", "slurm", "-n", "all_tables", path=path)
    assert with_conda.returncode == 0, with_conda.stdout
    assert "will be created" in with_conda.stdout
    without = project.snakemake("--profile", "slurm", "-n", "all_tables")
    assert without.returncode == 0, without.stdout
    assert "will be created" not in without.stdout
    for run in (with_conda, without):
        assert all(f"{rule} " in run.stdout for rule in PAPER)
