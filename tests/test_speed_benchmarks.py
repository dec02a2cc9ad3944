"""The benchmarks of training steps and of draft trees, on tiny models: they finish, and what they write adds up."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import train
import trees


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Runs a benchmark; what it wrote."""

    def measure(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__name__, *arguments, "--device", "cpu", "--output", str(tmp_path)])
        module.main()
        return json.loads((tmp_path / f"{module.__name__}.json").read_text())

    return measure


def test_training_steps_of_every_host(found):
    sizes = ["--shape", "tiny", "--length", "48", "--anchors", "2", "--repeats", "1", "--no-memory"]
    rows = {row["name"]: row for row in found(train, *sizes)["rows"]}
    assert len(rows) == 2 * len(train.Options().hosts)
    assert set(rows["dspark, K = 3"]["by_draw"]) == {"1", "2", "3"}
    assert set(rows["mtp-gemma4, unroll 6, 12, 18"]["by_draw"]) == {"6", "12", "18"}
    for row in rows.values():
        assert all(milliseconds >= 0 for milliseconds in row["parts_ms"].values())
        assert row["tokens_per_second"] == pytest.approx(48_000 / row["step_ms"])


def test_memory_of_a_step_is_measured(found):
    sizes = ["--shape", "tiny", "--length", "48", "--anchors", "2", "--repeats", "1", "--quick", "--hosts", "dflash"]
    entries = found(train, *sizes)["memory"]
    assert [(entry["length"], entry["anchors"]) for entry in entries] == [(48, 2), (96, 2), (48, 4)]
    assert all(entry["peak_mib"] > 0 for entry in entries)


def test_draft_trees_of_every_block_drafter(found):
    rows = found(trees, "--shape", "tiny", "--budgets", "4", "24", "--repeats", "3")["rows"]
    assert [(row["host"], row["budget"]) for row in rows] == [
        (host, budget) for host in ("dflash", "dspark", "domino") for budget in (4, 24)
    ]
    for row in rows:
        assert 0 < row["nodes"] <= row["budget"]
        assert row["corrections"] == (0 if row["host"] == "dflash" else 16)
        assert all(milliseconds >= 0 for milliseconds in row["parts_ms"].values())
