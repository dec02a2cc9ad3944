"""The counts of the checking command, with and without a tokenizer, and its output."""

import json
import sys
from pathlib import Path

import pytest

from dloop.cli import UserError
from dloop.data import check
from dloop.data.check import Options, check_file
from tests.toy_tokenizer import toy_tokenizer

CASES = Path(__file__).parents[1] / "golden" / "cases"


def turns(*roles):
    return {"conversations": [{"role": role, "content": f"the {role}"} for role in roles]}


@pytest.fixture
def rows_file(tmp_path):
    rows = [
        turns("user", "assistant"),
        turns("assistant", "user", "assistant"),
        turns("user", "assistant", "assistant"),
        turns("user"),
        {"conversations": [{"role": "user", "content": "x " * 200}, {"role": "assistant", "content": "y"}]},
        {"conversations": []},
        turns("assistant"),
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"conv', "utf-8")
    return path


@pytest.mark.filterwarnings("ignore:(messages|conversations) .*:UserWarning")
def test_counts_with_tokenizer(rows_file):
    options = Options(file=rows_file, tokenizer="toy", max_length=100, min_loss_tokens=4, show=2)
    report = check_file(options, toy_tokenizer())
    assert report.rows == 8
    assert report.bad == {"empty_conversations": 1, "no_user": 1, "not_json": 1}
    assert report.first_bad[-1] == f"{rows_file}:8: not_json"
    assert (report.leading_dropped, report.truncated) == (1, 1)
    assert (report.over_length, report.zero_loss, report.few_loss) == (1, 2, 2)
    assert report.tokens > report.supervised > 3 * 4
    assert len(report.examples) == 2
    assert "  loss | <think>\\n\\n</think>\\n\\nthe assistant<|im_end|>\\n" in report.examples[0]


def test_counts_without_tokenizer(rows_file):
    report = check_file(Options(file=rows_file), None)
    assert (report.rows, report.bad.total(), report.truncated) == (8, 3, 1)
    assert report.tokens == 0
    assert not any("token" in label for label, _ in report.counts(Options(file=rows_file)))


def test_case_files_are_counted():
    for path in CASES.glob("*.jsonl"):
        expected = json.loads(path.with_suffix(".expected.json").read_text("utf-8"))
        report = check_file(Options(file=path), None)
        if "lines" in expected:
            bad = [line["train"]["reason"] for line in expected["lines"] if line["train"]["status"] == "bad_row"]
            assert sorted(report.bad.elements()) == sorted(bad)
            assert report.rows == len(expected["lines"])
        else:
            assert report.rows - report.bad.total() == expected["rows"]


def test_command_prints_counts_and_an_example(rows_file, tmp_path, capsys, monkeypatch):
    toy_tokenizer().save_pretrained(tmp_path / "tokenizer")
    command = ["check", str(rows_file), "--tokenizer", str(tmp_path / "tokenizer"), "--max-length", "100"]
    monkeypatch.setattr(sys, "argv", command)
    before = sorted(tmp_path.iterdir())
    check.main()
    out = capsys.readouterr().out
    assert "             8  rows\n" in out
    assert "             1    not_json\n" in out
    assert "             1  rows over 100 tokens (cut there)\n" in out
    assert out.count("example:") == 1
    assert sorted(tmp_path.iterdir()) == before


def test_what_is_refused(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        check_file(Options(file=tmp_path / "missing.jsonl"), None)
    (tmp_path / "array.jsonl").write_text("[]")
    with pytest.raises(UserError, match="JSON array"):
        check_file(Options(file=tmp_path / "array.jsonl"), None)
    with pytest.raises(UserError, match="no chat template"):
        check_file(Options(file=tmp_path / "array.jsonl", chat_template="x"), None)
    with pytest.raises(UserError, match=r"tokenizer .* cannot be loaded"):
        check._load_tokenizer(str(tmp_path / "nothing"))
