"""The gate sweep for people: one table and one recommendation for each draft, measured gates beside predicted ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dloop.cli import UserError
from dloop.reporting import text
from dloop.reporting.labels import HOSTS
from dloop.reporting.modelled import CostTable
from dloop.reporting.sweep import Point, mean, sweep
from dloop.results.metrics import compare_runs, speedup, tau
from dloop.results.record import Result
from dloop.results.replay import CLOSED

NOTICEABLE = 0.005
"""Relative gain below which a recommendation calls the gate not worth it."""
_DRAFT = (
    *("model", "draft_model", "max_new_tokens", "max_extra_stages", "dtype", "thinking"),
    *("tree_budget", "stage_tree_budget", "topk_k", "tree_width", "tree_beta", "tree_depth", "mtp_k"),
)
"""Options that two runs share when they differ in the gate alone."""


@dataclass
class Study:
    """One draft under one setting: predictions, and what was measured at other gates."""

    title: str
    recorded: float
    benchmarks: list[str]
    points: list[Point]
    """Means over the benchmarks, ascending by threshold."""
    measured: dict[float, tuple[float, float]] = field(default_factory=dict)
    """(acceptance length, speedup) by gate, of runs over the same benchmarks."""

    @property
    def best(self) -> Point:
        """The fastest of the predictions."""
        return max(self.points, key=lambda point: (point.gain, point.threshold))


def studies(
    results: Sequence[tuple[Path, Result]], table: CostTable | None, thresholds: Sequence[float]
) -> list[Study]:
    """Group results by draft, replay the lowest gate of each group; UserError when nothing can be replayed."""
    baselines = [result for _, result in results if result.kind == "baseline"]
    groups: dict[tuple[str, ...], dict[float, dict[str, Result]]] = {}
    for path, result in results:
        if result.kind == "speculative":
            key = (str(result.host), *(str(result.config.get(name)) for name in _DRAFT))
            runs = groups.setdefault(key, {}).setdefault(float(result.config.get("loop_gate", CLOSED)), {})
            if result.dataset.name in runs:
                raise UserError(f"{path} is the second result of {result.dataset.name} at one gate: give one of them")
            runs[result.dataset.name] = result
    found = [_study(runs, baselines, table, thresholds) for runs in groups.values() if min(runs) < 0]
    if not found:
        raise UserError(
            "no result of a looped run is among the files: record one with python -m dloop.benchmark --loop-gate -1"
        )
    return found


def _study(
    runs: dict[float, dict[str, Result]],
    baselines: Sequence[Result],
    table: CostTable | None,
    thresholds: Sequence[float],
) -> Study:
    recorded = min(runs)
    own = runs[recorded]
    against = {name: _baseline(result, baselines) for name, result in own.items()}
    parts = [sweep(result, against[name], table, thresholds) for name, result in own.items()]
    study = Study(_title(next(iter(own.values()))), recorded, list(own), mean([part for part in parts if part]))
    if not study.points:
        raise UserError(f"the results of {study.title} hold no round: nothing can be replayed")
    for gate, results in sorted(runs.items()):
        if results.keys() >= own.keys():
            study.measured[gate] = (
                _mean(tau(results[name].responses) for name in own),
                _mean(_speedup(results[name], against[name]) for name in own),
            )
    return study


def _title(result: Result) -> str:
    config = result.config
    tree = f", tree of {config['tree_budget']}" if config.get("tree_budget") else ""
    return f"{HOSTS.get(str(result.host), result.host)} on {config.get('model')}{tree} ({config.get('draft_model')})"


def _baseline(result: Result, baselines: Sequence[Result]) -> Result | None:
    return next((baseline for baseline in baselines if not compare_runs(result, baseline)[0]), None)


def _speedup(result: Result, baseline: Result | None) -> float | None:
    return speedup(result.responses, baseline.responses) if baseline else None


def _mean(values: Iterable[float | None]) -> float:
    numbers = [math.nan if value is None else value for value in values]
    return sum(numbers) / len(numbers)


def recommendation(study: Study) -> str:
    """One sentence: which gate, what it is predicted to bring, and whether a lower one should be tried."""
    best = study.best
    if best.threshold >= 0 or best.gain < NOTICEABLE:
        return f"{study.title}: leave the gate closed; no recorded threshold is predicted to gain 0.5 %"
    rate = "" if math.isnan(best.speedup) else f"{text.ratio(best.speedup)}, "
    rate += f"τ {best.tau:.2f}, {text.gain(best.gain)} over a closed gate"
    words = f"{study.title}: --loop-gate {best.threshold:g} ({rate})"
    if best.threshold == study.recorded:
        words += "; it is the lowest recorded one, so a lower one may be better still: record a run there"
    return words


def unknowns(study: Study) -> list[str]:
    """What the records cannot tell."""
    lines = [f"Gates below {study.recorded:g} would draft stages that were never drafted: nothing is known of them."]
    capped = study.points[0].unknown
    if capped:
        lines.append(
            f"{capped} rounds ended at --max-extra-stages with the gate open: their next stage was never drafted, so "
            "every prediction keeps that cap."
        )
    return lines


def frame(found: Sequence[Study]) -> pd.DataFrame:
    """Every prediction for other programs, unrounded."""
    lines = []
    for study in found:
        for point in study.points:
            measured_tau, measured_speedup = study.measured.get(point.threshold, (math.nan, math.nan))
            numbers = {**vars(point), "measured_tau": measured_tau, "measured_speedup": measured_speedup}
            lines.append({"draft": study.title, "recorded_gate": study.recorded, **numbers})
    return pd.DataFrame(lines)


def show(found: Sequence[Study]) -> None:
    """Print a table for each draft, what cannot be known, and the recommendations last."""
    console = Console(width=None if Console().is_terminal else 100)
    for study in found:
        console.print(escape(f"{study.title}, mean of {len(study.benchmarks)} benchmarks"), highlight=False)
        console.print(_table(study))
        for line in unknowns(study):
            console.print(line, style="dim", highlight=False)
    for study in found:
        console.print(escape(recommendation(study)), style="bold", highlight=False, soft_wrap=True)


def _table(study: Study) -> Table:
    table = Table()
    for head in ("gate", "τ", "extra stages", "speedup", "over closed", "measured τ", "measured speedup"):
        table.add_column(head, justify="right")
    for point in study.points:
        measured_tau, measured_speedup = study.measured.get(point.threshold, (math.nan, math.nan))
        table.add_row(
            "closed" if point.threshold >= 0 else f"{point.threshold:g}",
            text.length(point.tau),
            text.length(point.extra_stages),
            text.ratio(point.speedup),
            text.gain(point.gain),
            text.length(measured_tau),
            text.ratio(measured_speedup),
            style="bold" if point == study.best else "",
        )
    return table
