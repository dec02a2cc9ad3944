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
