"""Means over steps with different metrics, seconds by part, and the lines of the log."""

import json
import math

import pytest
import torch

from dloop.training import metrics_log
from dloop.training.distributed import World
from dloop.training.metrics_log import Interval, MetricsLog, PartClock, RatioSums, RecentRatio

ALONE = World(device=torch.device("cpu"))


def ratio(numerator: float, denominator: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(numerator), torch.tensor(denominator)


class TestRatioSums:
    def test_means_are_sums_over_sums(self):
        sums = RatioSums()
        sums.add({"a": ratio(1.0, 2.0), "b": ratio(5.0, 1.0)})
        sums.add({"a": ratio(5.0, 1.0), "b": ratio(1.0, 1.0)})
        assert sums.pop(ALONE) == {"a": 2.0, "b": 3.0}
        assert sums.pop(ALONE) == {}

    def test_steps_may_bring_different_metrics(self):
        sums = RatioSums()
        sums.add({"host": ratio(1.0, 1.0), "loop": ratio(3.0, 1.0)})
        sums.add({"host": ratio(3.0, 1.0)})
        assert sums.pop(ALONE) == {"host": 2.0, "loop": 3.0}

    def test_counts_and_losses_mix(self):
        sums = RatioSums()
        sums.add({"loss": ratio(1.5, 3.0), "right": (torch.tensor(2), torch.tensor(4))})
        assert sums.pop(ALONE) == {"loss": 0.5, "right": 0.5}

    def test_nothing_counted_is_not_a_number(self):
        sums = RatioSums()
        sums.add({"a": ratio(0.0, 0.0)})
        assert math.isnan(sums.pop(ALONE)["a"])


class TestRecentRatio:
    def test_forgets_what_is_older_than_its_steps(self):
        recent = RecentRatio(2)
        for numerator in (100.0, 1.0, 3.0):
            recent.add([ratio(numerator, 1.0)])
        assert recent.mean(ALONE) == 2.0

    def test_a_step_is_all_its_micro_steps(self):
        recent = RecentRatio(1)
        recent.add([ratio(1.0, 1.0), ratio(2.0, 5.0)])
        assert recent.mean(ALONE) == 0.5

    def test_its_state_is_restored_on_the_main_process_alone(self):
        recent = RecentRatio(3)
        recent.add([ratio(1.0, 4.0)])
        restored, other = RecentRatio(3), RecentRatio(3)
        restored.load_state(recent.state(ALONE), ALONE)
        other.load_state(recent.state(ALONE), World(device=torch.device("cpu"), rank=1))
        assert restored.mean(ALONE) == 0.25
        assert other.state(ALONE).tolist() == [[0.0, 0.0]]


class TestPartClock:
    def test_sums_each_part(self, monkeypatch):
        times = iter([0.0, 1.0, 3.0, 10.0, 11.0, 15.0])
        monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: next(times))
        clock = PartClock(torch.device("cpu"))
        for part in ("data", "target", None, "data"):
            clock.start(part)
        assert clock.pop() == {"data": 2.0, "target": 2.0}
        clock.start("data")
        monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: 16.0)
        assert clock.pop() == {"data": 1.0}


class TestInterval:
    def test_rates_and_restart(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: now[0])
        interval = Interval(ALONE)
        interval.count([30, 10])
        interval.count([20])
        now[0] = 102.0
        line = interval.pop()
        assert (line["tokens_per_second"], line["samples_per_second"]) == (30.0, 1.5)
        now[0] = 104.0
        assert interval.pop()["tokens_per_second"] == 0.0


class TestMetricsLog:
    def test_appends_json_lines_without_nan(self, tmp_path):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.write({"step": 1, "loss": math.nan, "seconds": {"data": 0.5}})
        log.write({"step": 2, "loss": 0.25})
        lines = [json.loads(line) for line in log.path.read_text().splitlines()]
        assert lines == [{"step": 1, "loss": None, "seconds": {"data": 0.5}}, {"step": 2, "loss": 0.25}]

    def test_a_resume_drops_later_lines_and_a_torn_one(self, tmp_path):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.truncate(3)
        for step in (1, 3, 4):
            log.write({"step": step})
        with log.path.open("a") as file:
            file.write('{"step": 2, "lo')
        log.truncate(3)
        assert log.path.read_text() == '{"step": 1}\n{"step": 3}\n'

    @pytest.mark.parametrize("step", [0, 10])
    def test_truncating_keeps_exactly_what_was_reached(self, tmp_path, step):
        log = MetricsLog(tmp_path / "metrics.jsonl")
        log.write({"step": 5})
        log.truncate(step)
        assert log.path.read_text() == ('{"step": 5}\n' if step else "")
