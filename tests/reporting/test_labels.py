import pytest

from dloop.reporting.labels import Row, baseline_row, benchmark_label, labels


def row(setting, draft="released", host="dflash", target="tiny"):
    return Row(target=target, host=host, setting=setting, draft=draft)


@pytest.mark.parametrize(
    ("made", "label"),
    [
        (row("released"), "DFlash"),
        (row("dloop", "published"), "+ DLoop"),
        (row("dloop", "trained"), "+ DLoop"),
        (row("dloop-eager", "trained"), "+ DLoop (eager)"),
        (row("released-ddtree"), "DFlash + DDTree"),
        (row("dloop-ddtree", "trained"), "DLoop + DDTree"),
        (row("dloop-dartree-wide", "trained", host="domino"), "DLoop + DARTree (wide)"),
        (row("dloop", "control"), "+ control"),
        (row("released", "control"), "+ control, one stage"),
        (row("released", host="eagle3"), "EAGLE-3"),
        (row("released", host="newhost"), "newhost"),
    ],
)
def test_a_row_is_named_after_host_setting_and_draft(made, label):
    assert labels([baseline_row("tiny"), made]) == ["Autoregressive", label]


def test_rows_that_would_read_alike_are_told_apart_by_their_draft():
    rows = [row("dloop", "published"), row("dloop", "trained"), row("dloop", "trained", target="other")]
    assert labels(rows) == ["+ DLoop (published)", "+ DLoop (trained)", "+ DLoop"]


def test_unknown_benchmarks_keep_their_name():
    assert [benchmark_label(name) for name in ("math500", "my_set")] == ["MATH-500", "my_set"]


def test_flags_do_not_make_another_row():
    same = Row(target="tiny", host="dflash", setting="dloop", draft="trained", flags={"loop_gate": -1})
    assert {row("dloop", "trained"), same} == {same}
