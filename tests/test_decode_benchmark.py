"""The decoding benchmark: steered acceptance, probes that see what they should, and one small comparison."""

import json
import sys
from pathlib import Path
from statistics import fmean

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import decode
from probes import OperatorCount, Stopwatch
from steering import right_rows


@pytest.mark.parametrize("tau", [2.0, 6.4, 12.0])
def test_steered_stages_have_the_wanted_mean(tau):
    lengths = right_rows(tau, 15)
    assert fmean(lengths) == pytest.approx(tau - 1, rel=0.02)
    assert fmean(lengths[:20]) == pytest.approx(tau - 1, rel=0.2)
    assert max(lengths) <= 15


def test_only_the_outermost_watched_call_counts_and_everything_is_put_back():
    inner = torch.nn.Linear(2, 2)
    outer = torch.nn.Sequential(inner)
    ticks = iter(range(100))
    watch = Stopwatch(lambda: next(ticks))
    with watch.watching("network", [(inner, "forward"), (outer, "forward")]):
        outer(torch.zeros(1, 2))
        inner(torch.zeros(1, 2))
    assert watch.calls == {"network": [(0, 1), (2, 3)]}
    assert not {"forward"} & (vars(inner).keys() | vars(outer).keys())


def test_views_are_no_operators():
    x = torch.ones(2, 3)
    with OperatorCount() as counter:
        (x.t().reshape(6) + 1).view(2, 3)[0].mul(2)
    # The transposed rows are copied, added to, multiplied.
    assert counter.count == 3


def test_a_small_comparison_writes_what_it_found(tmp_path, monkeypatch, capsys):
    sizes = ["--shape", "tiny", "--tokens", "40", "--repeats", "1", "--gemma", "None", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["decode.py", *sizes, "--output", str(tmp_path)])
    decode.main()
    assert "says something else" not in capsys.readouterr().out
    (group,) = json.loads((tmp_path / "decode.json").read_text())["groups"]
    rows = {row["name"]: row for row in group["rows"]}
    theirs, ours = rows["transformers DFlash"], rows["ours, DFlash"]
    # Both accept the same drafts; the library cuts its last round at the limit.
    assert theirs["tau"] == pytest.approx(ours["tau"], rel=0.2)
    assert ours["operators"] < theirs["operators"]
    assert rows["ours, DFlash + DLoop"]["extra_stages"] > 0
    assert 0 < ours["host_ms"] < ours["round_ms"]
    assert (tmp_path / "decode.png").stat().st_size > 0
