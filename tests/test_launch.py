"""What the launcher starts, by the environment it finds; a real SLURM runs it in tests/workflow/test_slurm.py."""

import os
import stat
import subprocess
import sys

import pytest

from dloop import launch
from dloop.cli import UserError
from dloop.launch import Options, command

MODULE = ["dloop.train", "--max-steps", "2"]
JOB = (
    "JobId=23 JobName=x ReqNodeList=(null) ExcNodeList=n9 NodeList=n[1-2] BatchHost=n1 NumNodes=2 NumCPUs=8 "
    "CPUs/Task=4 TRES=cpu=8,gres/gpu=4"
)


@pytest.fixture
def scontrol(monkeypatch):
    """Answers of `scontrol` for a job on two nodes."""
    answers = {"job": JOB, "hostnames": "n1\nn2\n"}
    monkeypatch.setattr(launch, "_scontrol", lambda show, what, *rest: answers[what])
    return answers


@pytest.mark.parametrize("gpus", [0, 1])
def test_one_process_needs_no_torchrun(gpus):
    assert command(Options(gpus_per_node=gpus), MODULE, {}) == [sys.executable, "-m", *MODULE]


@pytest.mark.parametrize("environment", [{}, {"NNODES": "1", "NODE_RANK": "0"}, {"SLURM_JOB_ID": "23"}])
def test_one_node_is_torchrun_alone(environment):
    started = command(Options(gpus_per_node=8), MODULE, environment)
    assert started[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=8", "-m", *MODULE]


def test_nodes_by_hand_are_told_apart_by_variables():
    environment = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node1"}
    started = command(Options(gpus_per_node=4), MODULE, environment)
    assert started[3:7] == ["--nnodes=2", "--node_rank=1", "--master_addr=node1", "--master_port=29500"]
    assert started[7:] == ["--nproc_per_node=4", "-m", *MODULE]
    chosen = command(Options(gpus_per_node=4), MODULE, environment | {"MASTER_PORT": "1234"})
    assert "--master_port=1234" in chosen


def test_one_process_a_node_still_is_a_run_of_several():
    environment = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a"}
    assert "--nproc_per_node=1" in command(Options(gpus_per_node=0), MODULE, environment)


def test_a_slurm_job_starts_a_launcher_on_each_of_its_nodes(scontrol):
    started = command(Options(nodes=2, gpus_per_node=2), MODULE, {"SLURM_JOB_ID": "23"})
    program, *flags = started[: started.index(sys.executable)]
    assert program == "srun"
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--cpus-per-task=4"} <= set(flags)
    exported = next(flag for flag in flags if flag.startswith("--export=ALL,")).split(",")[1:]
    inner = started[started.index(sys.executable) :]
    assert inner[1:] == ["-m", "dloop.launch", "--gpus-per-node=2", "--", *MODULE]
    # What srun starts on the second node.
    variables = dict(pair.split("=") for pair in exported) | {"SLURM_NODEID": "1", "SLURM_JOB_ID": "23"}
    second = command(Options(gpus_per_node=2), MODULE, variables)
    assert second[3:7] == ["--nnodes=2", "--node_rank=1", "--master_addr=n1", "--master_port=20023"]


def test_a_job_with_other_nodes_than_asked_for_is_refused(scontrol):
    scontrol["hostnames"] = "n1\n"
    with pytest.raises(UserError, match=r"--nodes is 2, but job 23 has 1 \(n1\)"):
        command(Options(nodes=2), MODULE, {"SLURM_JOB_ID": "23"})


@pytest.mark.parametrize(
    ("options", "environment", "sentence"),
    [
        ({"nodes": 2}, {}, "no SLURM job"),
        ({"nodes": 0}, {}, "no such machines"),
        ({"gpus_per_node": -1}, {}, "no such machines"),
        ({}, {"NNODES": "2"}, "NODE_RANK and MASTER_ADDR is not set"),
        ({}, {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "from 0 to 1"),
        ({}, {"NNODES": "two"}, "whole number"),
    ],
)
def test_what_cannot_be_started_is_said(options, environment, sentence):
    with pytest.raises(UserError, match=sentence):
        command(Options(**options), MODULE, environment)
    with pytest.raises(UserError, match="nothing to start"):
        command(Options(), [], {})


def test_the_started_program_replaces_the_launcher(tmp_path):
    (tmp_path / "stage.py").write_text("import os, sys; print(os.getpid(), sys.argv[1:]); sys.exit(3)")
    words = [sys.executable, "-m", "dloop.launch", "--gpus-per-node", "0", "--", "stage", "--flag", "--", "two words"]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 3
    assert printed.strip() == f"{process.pid} ['--flag', '--', 'two words']"


def test_scontrol_is_asked_and_its_failures_are_told(tmp_path, monkeypatch):
    fake = tmp_path / "scontrol"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no `scontrol` here"):
        launch._scontrol("show", "job", "23")
    fake.write_text("#!/bin/sh\necho no such job >&2\nexit 1\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UserError, match="scontrol show job 23 failed: no such job"):
        launch._scontrol("show", "job", "23")
