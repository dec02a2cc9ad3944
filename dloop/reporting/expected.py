"""Refusals of a table: results made with other options than it was asked for, or under conditions that mix.

Each raises a UserError that names the file and the option.
"""

from typing import Any

from dloop.cli import UserError
from dloop.reporting.labels import Row
from dloop.results.metrics import compare_runs
from dloop.results.record import Result

WHEN_ABSENT = {"loop_gate": 1.0, "max_extra_stages": None}
"""What a row that does not mention these loop options must have been made with."""

_CONDITIONS = {
    "device": lambda result: result.env["gpu"],
    "dtype": lambda result: result.env["dtype"],
    "attention implementation": lambda result: result.env["attn"],
    "number of processes": lambda result: result.env["processes"],
    "--max-new-tokens": lambda result: result.config.get("max_new_tokens"),
    "--thinking": lambda result: result.config.get("thinking"),
}


def check_row(path: str, result: Result, row: Row) -> None:
    """Refuse a file that is not what the row asks for: a draft of its host, decoded with its options."""
    if result.host != row.host:
        raise UserError(f"{path} holds a result of host {result.host}, the row asks for {row.host}: run it again")
    flags = {name.lstrip("-").replace("-", "_"): value for name, value in row.flags.items()}
    for name, wanted in {**WHEN_ABSENT, **flags}.items():
        found = result.config.get(name)
        if _plain(found) != _plain(wanted):
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"{path} was made with {option} {found}, the row {row.target}/{row.host}/{row.setting}/{row.draft} "
                f"asks for {wanted}: run it again, or correct the configuration"
            )


def check_baseline(path: str, result: Result, baseline_path: str, baseline: Result) -> list[str]:
    """Refuse a pair that must not be compared; returns the warnings about it."""
    errors, warnings = compare_runs(result, baseline)
    if errors:
        raise UserError(f"{path} cannot be compared with {baseline_path}: {'; '.join(errors)}. Run one of them again")
    return warnings


class SameConditions:
    """Refuses a result made under other conditions than the first one of the table."""

    def __init__(self) -> None:
        self._first: tuple[str, Result] | None = None

    def check(self, path: str, result: Result) -> None:
        """Compare with the first result seen; UserError names both files and what differs."""
        first_path, first = self._first = self._first or (path, result)
        for name, get in _CONDITIONS.items():
            if get(result) != get(first):
                raise UserError(
                    f"one table cannot mix {path} ({name} {get(result)}) and {first_path} ({name} {get(first)}): "
                    "keep them in folders of their own"
                )


def _plain(value: Any) -> Any:
    """A value as both JSON and a command line can spell it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool) or value is None:
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)
