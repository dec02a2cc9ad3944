"""Shared fixtures: one thread, golden checkpoints."""

import os
from pathlib import Path

import pytest
import torch

GOLDEN = Path(__file__).parent / "golden"


def pytest_configure(config):
    # Two cores and several workers: more threads only fight each other.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def golden():
    return GOLDEN


def pytest_terminal_summary(terminalreporter):
    """How long the tests on a real SLURM took, or why they did not run: its daemons are not everywhere."""
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "test_slurm.py" in report.nodeid and report.when == "call":
                why = f": {report.longrepr[2]}" if outcome == "skipped" else ""
                test = report.nodeid.split("::")[-1]
                terminalreporter.write_line(f"on SLURM, {test} {outcome} after {report.duration:.0f} s{why}")


@pytest.fixture(params=["library", "lean"])
def runtime(request, monkeypatch):
    """Every target of the test that names no runtime has this one."""
    from dloop.decoding.target import Target

    monkeypatch.setattr(Target.__init__, "__defaults__", ((), request.param))
    return request.param
