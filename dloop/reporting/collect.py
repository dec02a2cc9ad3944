"""Read every result a table needs and keep the numbers; the files' records are dropped at once.

Speedups are computed here from the two files, never taken from a summary. A file that is missing leaves its cells
empty; a file that does not fit is refused.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from dloop.cli import UserError
from dloop.reporting.expected import SameConditions, check_baseline, check_row
from dloop.reporting.labels import Row, baseline_row
from dloop.reporting.measurement import Measurement, average, measure
from dloop.reporting.modelled import CostTable
from dloop.results.record import Result, read_result


@dataclass(kw_only=True)
class Collected:
    """All numbers of a set of tables, and under which conditions they were measured."""

    rows: list[Row]
    """A target's baseline, then its rows in the order asked for; targets in order of appearance."""
    benchmarks: list[str]
    measured: dict[tuple[Row, str], Measurement] = field(default_factory=dict)
    """By row and benchmark; what has no file is absent."""
    results: list[Result] = field(default_factory=list)
    """What was read, without its responses."""
    warnings: Counter[str] = field(default_factory=Counter)
    paths: dict[tuple[Row, str], Path] = field(default_factory=dict)
    """The files behind `measured`."""
    missing: list[str] = field(default_factory=list)
    costs: Sequence[CostTable] = ()
    rounds_beyond_costs: int = 0

    @property
    def hosts(self) -> list[str]:
        """Host families in order of appearance."""
        return list(dict.fromkeys(row.host for row in self.rows if row.host))

    @property
    def targets(self) -> list[str]:
        """Targets in order of appearance."""
        return list(dict.fromkeys(row.target for row in self.rows))

    def of(self, row: Row) -> dict[str, Measurement]:
        """A row's measurements by benchmark, in the order of the columns."""
        found = {name: self.measured.get((row, name)) for name in self.benchmarks}
        return {name: numbers for name, numbers in found.items() if numbers}

    def released(self, row: Row) -> Row | None:
        """The host as released, with the tree of `row`: what a looped row is compared with.

        `dloop-chain` is compared with `released-chain`, and where there is none with `released`.
        """
        candidates = {
            other.variant: other
            for other in self.rows
            if (other.target, other.host, other.tree) == (row.target, row.host, row.tree)
            and other.draft == "released"
            and not other.looped
        }
        return candidates.get(row.variant) or candidates.get("")

    def average(self, row: Row | None) -> Measurement:
        """A row's average over all benchmarks; unknown without a row."""
        return average(list(self.of(row).values()), len(self.benchmarks)) if row else Measurement()


def collect(
    results: Path, gpu: str, rows: Sequence[Row], benchmarks: Sequence[str], costs: Sequence[CostTable] = ()
) -> Collected:
    """Read the baselines and evaluations of `rows` below `results`, one file after the other.

    UserError when a file contradicts itself, its row, its baseline or the rest of the table, or when none exists.
    """
    names = [Path(name).stem if name.endswith(".jsonl") else name for name in benchmarks]
    if not names or len(set(names)) < len(names):
        raise UserError(f"--benchmarks is {' '.join(names) or 'empty'}: name at least one, and each column once")
    found = Collected(rows=list(_with_baselines(rows)), benchmarks=names, costs=costs)
    conditions = SameConditions()
    with tqdm(total=len(found.rows) * len(names), desc="results", unit="file", disable=None) as progress:
        for target in found.targets:
            for name in names:
                _collect_benchmark(found, results, gpu, target, name, conditions, progress)
    if not found.results:
        raise UserError(f"no result of any row below {results} for GPU {gpu}: run the evaluations first")
    return found


def _with_baselines(rows: Sequence[Row]) -> Iterator[Row]:
    if len(set(rows)) < len(rows):
        twice = next(row for row in rows if list(rows).count(row) > 1)
        raise UserError(f"row {twice.target}/{twice.host}/{twice.setting}/{twice.draft} is asked for twice: drop one")
    for target in dict.fromkeys(row.target for row in rows):
        yield baseline_row(target)
        yield from (row for row in rows if row.target == target)


def _collect_benchmark(
    found: Collected, results: Path, gpu: str, target: str, name: str, conditions: SameConditions, progress: tqdm
) -> None:
    """All rows of a target on one benchmark: one baseline is in memory, and one method beside it."""
    baseline_path = results / "baseline" / gpu / target / f"{name}.json"
    baseline = _read(found, baseline_path, conditions)
    for row in (row for row in found.rows if row.target == target):
        path = results / "eval" / gpu / target / row.host / row.setting / row.draft / f"{name}.json"
        result = _read(found, path, conditions) if row.host else baseline
        progress.update()
        if result is None:
            continue
        if row.host:
            check_row(str(path), result, row)
            if baseline:
                found.warnings.update(check_baseline(str(path), result, str(baseline_path), baseline))
        found.paths[row, name] = path if row.host else baseline_path
        found.measured[row, name] = measure(result, baseline, _costs_of(found, str(path), result))
    for result in found.results:
        result.responses = []


def _read(found: Collected, path: Path, conditions: SameConditions) -> Result | None:
    if not path.exists():
        found.missing.append(str(path))
        return None
    result = read_result(path)
    conditions.check(str(path), result)
    found.results.append(result)
    return result


def _costs_of(found: Collected, path: str, result: Result) -> CostTable | None:
    """The cost table of a result's target and host, if one was given; it must be of the same machine."""
    costs = next((table for table in found.costs if table.fits(result)), None)
    if costs is None:
        return None
    for key in ("gpu", "dtype"):
        if key in costs.env and costs.env[key] != result.env[key]:
            raise UserError(
                f"the cost table was timed with {key} {costs.env[key]}, {path} with {result.env[key]}: "
                "run python -m dloop.cost_table where the results were measured"
            )
    found.rounds_beyond_costs += costs.beyond(result.responses)
    return costs


def read_rows(raw: Any) -> list[Row]:
    """Rows from a parsed `--experiments` list; UserError for another shape."""
    keys = {"target", "host", "setting", "draft", "flags"}
    if not isinstance(raw, list) or not raw:
        raise UserError("--experiments must be a JSON list of objects with target, host, setting, draft and flags")
    for entry in raw:
        if not isinstance(entry, dict) or entry.keys() != keys or not isinstance(entry["flags"], dict):
            raise UserError(f"--experiments holds {str(entry)[:80]}: an entry has exactly {', '.join(sorted(keys))}")
    return [Row(**entry) for entry in raw]
