"""Other gates, replayed: acceptance length and speedup at thresholds that were never run, from stored rounds alone.

    python -m dloop.gate_sweep results/eval/cpu/tiny/dflash/dloop/trained/*.json results/baseline/cpu/tiny/*.json

A run at a low gate holds every stage that a higher one would have drafted, so only thresholds above the recorded one
can be predicted. Results of the same draft at several gates may be given together: the lowest is replayed, and the
others stand beside the prediction as measured. Decodes nothing, imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dloop.cli import UserError, parse, run

if TYPE_CHECKING:
    from dloop.reporting.gates import Study


@dataclass(frozen=True, kw_only=True)
class Options:
    """Predict acceptance length and speedup for other gates, and recommend one."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Result files of looped runs, and of their baselines (without one no speedup is known, only the gain over a
    closed gate)."""
    gates: tuple[float, ...] = ()
    """Thresholds to predict; default: from the recorded one up to 0, and a closed gate."""
    cost_table: Path | None = None
    """Seconds by rows and stages (python -m dloop.cost_table); default: the times in the results."""
    output: Path | None = None
    """CSV file for the unrounded numbers."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line, or `arguments` in its place."""
    options = parse(Options, arguments)
    if any(map(isnan, options.gates)):
        raise UserError("--gates holds something that is not a number; give thresholds such as -0.5")
    from dloop.reporting.gates import frame, show, studies
    from dloop.reporting.modelled import read_cost_table
    from dloop.reporting.sweep import THRESHOLDS
    from dloop.results.atomic import write_text
    from dloop.results.record import read_result

    table = read_cost_table(options.cost_table) if options.cost_table else None
    found = studies([(path, read_result(path)) for path in options.results], table, options.gates or THRESHOLDS)
    _refuse_what_is_unknown(found, options.gates)
    if options.output:
        write_text(options.output, frame(found).to_csv(index=False))
    show(found)


def _refuse_what_is_unknown(found: Sequence[Study], gates: Sequence[float]) -> None:
    for study in found:
        lower = [gate for gate in gates if gate < study.recorded]
        if lower:
            raise UserError(
                f"--gates asks for {lower[0]:g}, but {study.title} was recorded at {study.recorded:g}: a lower gate "
                "drafts stages that were never drafted; run python -m dloop.benchmark with that --loop-gate"
            )


if __name__ == "__main__":
    run(main)
