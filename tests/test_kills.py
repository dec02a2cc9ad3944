"""A stage that is killed at any moment and called again ends as if nothing had happened."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = os.environ.get("DLOOP_KILLS", "2")
"""For each stage; `python -m tests.kill_stages` does twenty and takes some minutes."""


@pytest.mark.slow
def test_kills_at_random_moments_change_no_outcome():
    done = subprocess.run(
        [sys.executable, "-m", "tests.kill_stages", "--kills", KILLS],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("every outcome the same") == 5
