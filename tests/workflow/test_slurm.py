"""The workflow through a real SLURM: `sbatch`, two nodes, a job that fails, a run that is cancelled."""

import hashlib
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from dloop.config import Configuration, command_line
from tests.workflow.slurm_cluster import cluster, queue
from tests.workflow.stand_in_conda import stand_in_conda
from tests.workflow.test_chain import micro
from tests.workflow.test_conda import assert_each_in_its_own, two_environments

SECONDS = 600
"""A chain that takes longer has hung; on two free cores it needs about a quarter of this."""
TRAINED = "results/train/tiny/dflash/trained"

FAIL_ONCE = "test -e tried || {{ touch tried; echo this node is broken > {log}; false; }}; "


def use_small_nodes(project):
    """The repository's profile with a site's part for the test: trainings take one GPU on each of two nodes."""
    path = project.folder / "slurm/profile.v9+.yaml"
    profile = yaml.safe_load(path.read_text(encoding="utf-8"))
    small = {"mem_mb": 1000, "cpus_per_task": 1, "runtime": 5}
    several = {"nodes": 2, "gpu": 2, "mpi": "srun", "tasks": 2, "tasks_per_gpu": 0}
    several |= {"slurm_extra": "--gpus-per-node=h100:1", "gpu_model": "h100"}
    rules = {rule: {"gpu": 1, "gpu_model": "h100", **small} for rule in profile["set-resources"]}
    profile["set-resources"] = rules | {"train": several | small}
    profile["default-resources"] = {"mem_mb": 1000, "disk_mb": 100, "runtime": 5}
    profile |= {"slurm-init-seconds-before-status-checks": 2, "seconds-between-status-checks": 2}
    path.write_text(yaml.safe_dump(profile), encoding="utf-8")


def release_a_draft(project):
    """A draft of the demo's shape with random weights, as if somebody had published it."""
    import torch

    from dloop.hosts.registry import new_host

    folder = project.folder / "released"
    folder.mkdir()
    config = str(project.folder / "config/demo-drafts/dflash.json")
    new_host(config, seed=0, dtype=torch.float32, device=torch.device("cpu")).save(folder, torch.float32)
    return folder


def let_the_prompts_fail_once(project):
    """Put a stumbling block before the command of the copied rule."""
    rule = project.folder / "workflow/rules/prompts.smk"
    command = '"python -m dloop.prompts'
    text = rule.read_text(encoding="utf-8")
    assert command in text
    rule.write_text(text.replace(command, f'"{FAIL_ONCE}"\n        {command}'), encoding="utf-8")


def hear_interrupts():
    """Whoever starts the tests in the background makes their children deaf to Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """Snakemake on the cluster, in the background."""

    def __init__(self, project, *arguments, environment=None):
        self._output = project.folder / "snakemake.out"
        command = [sys.executable, "-m", "snakemake", "--profile", "slurm", *arguments]
        with open(self._output, "w") as output:
            self._process = subprocess.Popen(
                command,
                cwd=project.folder,
                env=os.environ | (environment or {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=hear_interrupts,
            )

    @property
    def output(self):
        return self._output.read_text()

    def interrupt_once(self, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self._process.poll() is None, self.output
            assert time.monotonic() < deadline, self.output
            time.sleep(0.1)
        self._process.send_signal(signal.SIGINT)
        return self.wait()

    def wait(self):
        try:
            return self._process.wait(timeout=SECONDS)
        finally:
            self._process.kill()


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def train_here(project, values, folder):
    """The same training as two processes of this machine, without SLURM and without Snakemake."""
    flags = command_line(Configuration(values).training_flags("tiny", "dflash", "trained"))
    command = f"{sys.executable} -m dloop.launch --gpus-per-node 2 -- dloop.train"
    command += f" --train-data-path results/regen/tiny/train.jsonl {flags} --output-dir {folder}"
    done = subprocess.run(command, shell=True, cwd=project.folder, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    return project.folder / folder / "final"


@pytest.mark.slow
def test_the_chain_through_sbatch(project, tmp_path_factory):
    values = micro(project.configuration("demo.yaml")) | {"control": False, "tables": {}}
    values["settings"]["dflash"] = {name: values["settings"]["dflash"][name] for name in ("released", "dloop")}
    released = release_a_draft(project)
    values["hosts"]["dflash"]["drafts"]["tiny"]["released"] = str(released)
    project.write(values)
    use_small_nodes(project)
    let_the_prompts_fail_once(project)
    with cluster(tmp_path_factory.mktemp("slurm")):
        log = project.folder / "logs/train/tiny/dflash/trained.log"
        cancelled = Run(project, "all_tables")
        assert cancelled.interrupt_once(log.exists) == 1
        deadline = time.monotonic() + 60
        while queue():
            assert time.monotonic() < deadline, "a cancelled run leaves jobs behind"
            time.sleep(0.2)
        assert (project.folder / "tried").exists()
        assert "this node is broken" in cancelled.output, "a failed job's log is shown"
        assert (project.folder / "results/prompts/demo.jsonl").exists(), "and the job is submitted again"
        assert not (project.folder / TRAINED / "manifest.json").exists()

        finished = Run(project, "all_tables")
        assert finished.wait() == 0, finished.output + project.logs()
        assert "tiny_target" not in finished.output, "what was finished is not made again"
        assert log.read_text().count("--output-dir") == 1, "of two processes one speaks"
    assert "DFlash" in (project.folder / "results/tables/cpu/overview.md").read_text()
    trained = digest(project.folder / TRAINED / "final")
    assert trained != digest(released)
    assert trained == digest(train_here(project, values, "trained_here"))


@pytest.mark.slow
def test_jobs_run_in_the_environment_of_their_rule(project, tmp_path_factory):
    use_small_nodes(project)
    files = two_environments(project)
    path = stand_in_conda(tmp_path_factory.mktemp("conda"))
    with cluster(tmp_path_factory.mktemp("slurm")):
        run = Run(project, *files.values(), environment={"PATH": path})
        assert run.wait() == 0, run.output + project.logs()
    assert_each_in_its_own(project, files)
