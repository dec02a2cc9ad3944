"""Numbers as a table prints them: rounded, with `--` for what is not known."""

import math

from dloop.reporting.labels import Row

MISSING = "--"


def ratio(value: float) -> str:
    """A speedup: `2.91x`."""
    return MISSING if math.isnan(value) else f"{value:.2f}x"


def length(value: float) -> str:
    """An acceptance length: `5.40`."""
    return MISSING if math.isnan(value) else f"{value:.2f}"


def whole(value: float) -> str:
    """A rate without decimals: `213`."""
    return MISSING if math.isnan(value) else f"{value:.0f}"


def percent(value: float) -> str:
    """A share: `8.2 %`."""
    return MISSING if math.isnan(value) else f"{100 * value:.1f} %"


def gain(value: float) -> str:
    """A relative difference: `+8.2 %`."""
    return MISSING if math.isnan(value) else f"{100 * value:+.1f} %"


def spread(bounds: tuple[float, float], show: str = "{:.2f}", scale: float = 1.0) -> str:
    """An interval: `2.70 to 3.12`."""
    if any(map(math.isnan, bounds)):
        return MISSING
    return " to ".join(show.format(scale * bound) for bound in bounds)


def gate(row: Row) -> str:
    """The threshold of a row: `closed` where no additional stage is asked for."""
    if not row.host:
        return ""
    return f"{float(row.flags['loop_gate']):g}" if row.looped and "loop_gate" in row.flags else "closed"
