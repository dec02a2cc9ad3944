import math

import pytest

from dloop.reporting import text
from dloop.reporting.labels import Row, baseline_row


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.ratio(2.906), "2.91x"),
        (text.length(10.0), "10.00"),
        (text.whole(212.6), "213"),
        (text.percent(0.0823), "8.2 %"),
        (text.gain(0.0823), "+8.2 %"),
        (text.gain(-0.01), "-1.0 %"),
        (text.spread((2.7, 3.123)), "2.70 to 3.12"),
        (text.spread((-0.03, 0.2), "{:+.1f}", 100), "-3.0 to +20.0"),
    ],
)
def test_numbers_are_rounded_for_reading(shown, expected):
    assert shown == expected


@pytest.mark.parametrize("show", [text.ratio, text.length, text.whole, text.percent, text.gain])
def test_what_is_not_known_is_two_dashes(show):
    assert show(math.nan) == "--"
    assert text.spread((1.0, math.nan)) == "--"


@pytest.mark.parametrize(
    ("setting", "flags", "shown"),
    [("released", {"loop_gate": 1.0}, "closed"), ("dloop", {"loop_gate": "-inf"}, "-inf"), ("dloop", {}, "closed")],
)
def test_a_gate_is_shown_where_stages_are_asked_for(setting, flags, shown):
    assert text.gate(Row(target="t", host="dflash", setting=setting, draft="d", flags=flags)) == shown
    assert text.gate(baseline_row("t")) == ""
