"""The overview: what the loop adds to each host on each target, averaged over the benchmarks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from dloop.reporting import text
from dloop.reporting.collect import Collected
from dloop.reporting.labels import HOSTS, LOOPED, Row
from dloop.reporting.measurement import Measurement


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A line of the overview: what the loop adds to a host on a target. Gains are relative: 0.08 is 8 % more."""

    row: Row
    """The looped row."""
    family: str
    """The host's name, its tree and what else tells the setting apart."""
    released: Measurement
    looped: Measurement
    control: Measurement
    """Of no round without one."""

    @property
    def speedup_gain(self) -> float:
        """Gain in speedup over the released draft."""
        return self.looped.speedup / self.released.speedup - 1

    @property
    def gain_interval(self) -> tuple[float, float]:
        """The middle 95 % of that gain when the responses are resampled, the same ones on both sides."""
        return self.looped.gain_interval(self.released)

    @property
    def tau_gain(self) -> float:
        """Gain in acceptance length."""
        return self.looped.tau / self.released.tau - 1

    @property
    def modelled_gain(self) -> float:
        """Gain in the modelled speedup."""
        return self.looped.modelled_speedup / self.released.modelled_speedup - 1

    @property
    def hardly_opened(self) -> bool:
        """Whether too few rounds had an additional stage to call the gain the loop's."""
        return self.looped.hardly_opened


def pairs(found: Collected) -> list[Pair]:
    """Every looped row beside the released one and, where there is one, the control."""
    return [_pair(found, row) for row in found.rows if row.looped and not row.is_control]


def _pair(found: Collected, row: Row) -> Pair:
    family = [other for other in found.rows if (other.target, other.host) == (row.target, row.host)]
    alike = [other for other in family if other.tree == row.tree]
    control = next((other for other in alike if other.is_control and other.setting == row.setting), None)
    return Pair(
        row=row,
        family=_family_label(row, family),
        released=found.average(found.released(row)),
        looped=found.average(row),
        control=found.average(control),
    )


def _family_label(row: Row, family: list[Row]) -> str:
    name = HOSTS.get(row.host, row.host) + (f" + {row.tree}" if row.tree else "")
    twins = [other for other in family if other.setting == row.setting and not other.is_control]
    remarks = [row.variant] * bool(row.variant) + [row.draft] * (len(twins) > 1)
    return f"{name} ({', '.join(remarks)})" if remarks else name


def frame(lines: Sequence[Pair]) -> pd.DataFrame:
    """The overview for other programs."""
    columns: dict[str, Callable[[Pair], object]] = {
        "target": lambda pair: pair.row.target,
        "host": lambda pair: pair.family,
        "released_speedup": lambda pair: pair.released.speedup,
        "dloop_speedup": lambda pair: pair.looped.speedup,
        "speedup_gain": lambda pair: pair.speedup_gain,
        "speedup_gain_low": lambda pair: pair.gain_interval[0],
        "speedup_gain_high": lambda pair: pair.gain_interval[1],
        "released_tau": lambda pair: pair.released.tau,
        "dloop_tau": lambda pair: pair.looped.tau,
        "tau_gain": lambda pair: pair.tau_gain,
        "released_modelled_speedup": lambda pair: pair.released.modelled_speedup,
        "dloop_modelled_speedup": lambda pair: pair.looped.modelled_speedup,
        "modelled_speedup_gain": lambda pair: pair.modelled_gain,
        "control_speedup": lambda pair: pair.control.speedup,
        "control_tau": lambda pair: pair.control.tau,
        "control_modelled_speedup": lambda pair: pair.control.modelled_speedup,
        "dloop_extra_stages": lambda pair: pair.looped.extra_stages,
        "dloop_open_share": lambda pair: pair.looped.open_share,
    }
    return _filled(columns, lines)


def _filled(columns: dict[str, Callable[[Pair], object]], lines: Sequence[Pair]) -> pd.DataFrame:
    return pd.DataFrame({head: [show(pair) for pair in lines] for head, show in columns.items()})


def cells(found: Collected, lines: Sequence[Pair]) -> pd.DataFrame:
    """The overview's texts by head; modelled gains and controls only where there are any."""
    columns: dict[str, Callable[[Pair], object]] = {
        "Target": lambda pair: pair.row.target,
        "Host": lambda pair: pair.family,
        "Released": lambda pair: _both(pair.released),
        LOOPED: lambda pair: _both(pair.looped),
        "Gain in speedup": _speedup_gain,
        "Gain in τ": lambda pair: _unless_shut(pair, text.gain(pair.tau_gain)),
    }
    if found.costs:
        columns["Gain, modelled"] = lambda pair: _unless_shut(pair, text.gain(pair.modelled_gain))
    if any(pair.control.rounds for pair in lines):
        columns["+ control"] = lambda pair: _both(pair.control)
    return _filled(columns, lines)


def sentence(pair: Pair) -> str:
    """A line of the overview in words."""
    parts = [f"{LOOPED} {_both(pair.looped)} against {_both(pair.released)}"]
    if pair.hardly_opened:
        parts.append("the gate hardly opened, so no gain is stated")
    else:
        parts += [f"speedup {_speedup_gain(pair, '95 %: ')}", f"τ {text.gain(pair.tau_gain)}"]
        parts += [f"modelled speedup {text.gain(pair.modelled_gain)}"] * (not math.isnan(pair.modelled_gain))
    parts += [f"+ control {_both(pair.control)}"] if pair.control.rounds else []
    return f"{pair.row.target}, {pair.family}: {'; '.join(parts)}"


def _both(numbers: Measurement) -> str:
    return f"{text.ratio(numbers.speedup)} / {text.length(numbers.tau)}"


def _speedup_gain(pair: Pair, lead: str = "") -> str:
    if pair.hardly_opened:
        return "gate hardly opened"
    bounds = text.spread(pair.gain_interval, "{:+.1f}", 100)
    return text.gain(pair.speedup_gain) + ("" if math.isnan(pair.speedup_gain) else f" ({lead}{bounds})")


def _unless_shut(pair: Pair, gain: str) -> str:
    return text.MISSING if pair.hardly_opened else gain
