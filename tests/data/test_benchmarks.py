"""Prompts and selections of the eight benchmarks, and files of one's own in their place."""

import hashlib
import json
import logging
import os
import re
from pathlib import Path

import datasets
import pytest

from dloop.cli import UserError
from dloop.data import benchmarks
from dloop.data.benchmarks import BENCHMARKS, BOXED, load_benchmark, selected_rows

GOLDEN = Path(__file__).parents[1] / "golden" / "benchmarks"
SELECTION = json.loads((GOLDEN / "selection_seed0.json").read_text("utf-8"))
SUMS = json.loads((GOLDEN / "prompt_sha256.json").read_text("utf-8"))
REAL = os.environ.get("DLOOP_BENCHMARK_DIR")

needs_files = pytest.mark.skipif(not REAL, reason="DLOOP_BENCHMARK_DIR names no folder with the real prompts")


def sum_of(turns):
    return hashlib.sha256("\x1e".join(turns).encode()).hexdigest()


def prompts_of(folder, name):
    text = (Path(folder) / f"{name}.jsonl").read_bytes().decode("utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def raw_row(name, turns):
    """The data set's fields behind a prompt, found by taking the frame off by pattern."""
    (text, *more) = turns
    if name == "mt-bench":
        return {"prompt": [text, *more]}
    if name == "mbpp":
        return {"prompt": text}
    if name == "humaneval":
        return {"prompt": re.fullmatch(r".*?tests:\n```python\n(.*)\n```", text, re.DOTALL)[1]}
    if name == "livecodebench":
        question, form = re.fullmatch(
            r".*?\n\n### Question:\n(.*)\n\n### Format: (.*)\n\n### Answer: .*", text, re.DOTALL
        ).groups()
        code = re.fullmatch(r".*?:\n```python\n(.*)\n```", form, re.DOTALL)[1]
        empty = form.startswith("Write your code")
        return {"question_content": question, "starter_code": "" if empty else code}
    assert text.endswith(BOXED)
    return {"question" if name == "gsm8k" else "problem": text[: -len(BOXED)]}


class Hub:
    """A hub that has every data set, with `rows` made on demand, and remembers what it was asked for."""

    def __init__(self, monkeypatch, rows):
        self.rows = rows
        monkeypatch.setattr(benchmarks, "load_hub_rows", self.load)

    def load(self, hub_id, **asked):
        self.asked = {"hub_id": hub_id} | asked
        return self.rows, "f" * 40


def test_the_eight_benchmarks_in_the_order_of_the_tables():
    assert list(BENCHMARKS) == [
        "gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca",
    ]  # fmt: skip


@pytest.mark.parametrize("name", BENCHMARKS)
def test_selection(name):
    source, golden = BENCHMARKS[name], SELECTION[name]
    assert source.total_rows == golden["total_rows"]
    rows = selected_rows(source.total_rows, source.evaluated)
    assert rows == golden["rows"]
    assert len(rows) == golden["selected"] == source.evaluated
    assert (rows != sorted(rows)) == golden["shuffled"]


@pytest.mark.parametrize(("total", "wanted"), [(7, 3), (500, 128), (30, 30), (5, 9)])
def test_selection_is_the_librarys_shuffle(total, wanted):
    rows = datasets.Dataset.from_dict({"row": list(range(total))})
    chosen = rows.shuffle(seed=0).select(range(wanted)) if total > wanted else rows
    assert selected_rows(total, wanted) == chosen["row"]


def test_fewer_samples_are_a_prefix():
    assert selected_rows(1319, 8) == selected_rows(1319, 128)[:8]


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.jsonl")), ids=lambda path: path.stem)
def test_templates_make_the_published_prompts(path):
    for prompt in prompts_of(GOLDEN, path.stem):
        assert sum_of(prompt["turns"]) == SUMS[path.stem][str(prompt["row"])]
        assert BENCHMARKS[path.stem].turns(raw_row(path.stem, prompt["turns"])) == prompt["turns"]


def test_humaneval_frame():
    (prompt,) = BENCHMARKS["humaneval"].turns({"prompt": 'def one():\n    """1"""\n'})
    assert prompt == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        '```python\ndef one():\n    """1"""\n\n```'
    )


@pytest.mark.parametrize(("name", "field"), [("gsm8k", "question"), ("math500", "problem"), ("aime25", "problem")])
def test_mathematics_frame(name, field):
    (prompt,) = BENCHMARKS[name].turns({field: " What is $1+1$? "})
    assert prompt == (" What is $1+1$? \nPlease reason step by step, and put your final answer within \\boxed{}.")


@pytest.mark.parametrize(
    ("starter", "form"),
    [
        ("", "### Format: Write your code in the following format:\n```python\n# YOUR CODE HERE\n```"),
        (
            "class Solution:\n    pass",
            "### Format: Use the following code structure:\n```python\nclass Solution:\n    pass\n```",
        ),
    ],
)
def test_livecodebench_frame(starter, form):
    (prompt,) = BENCHMARKS["livecodebench"].turns({"question_content": "Add.\r\nNow.", "starter_code": starter})
    head, *parts = prompt.split("\n\n")
    assert head.startswith("You are an expert Python programmer. You will be given a question (problem")
    assert head.endswith("You will NOT return anything except for the program")
    answer = "### Answer: (use the provided format with backticks)"
    assert parts == ["### Question:\nAdd.\r\nNow.", form, answer]


def test_alpaca_frame():
    turns = BENCHMARKS["alpaca"].turns
    assert turns({"instruction": "Add.", "input": ""}) == ["Add."]
    assert turns({"instruction": "Add.", "input": "1 2"}) == ["Add.\n\nInput:\n1 2"]


def test_from_the_hub(monkeypatch):
    hub = Hub(monkeypatch, [{"question": f"Question {row}"} for row in range(1319)])
    benchmark = load_benchmark("gsm8k")
    assert hub.asked == {
        "hub_id": "openai/gsm8k", "config": "main", "split": "test", "revision": None, "files": None,
    }  # fmt: skip
    assert (benchmark.name, benchmark.hub_id, benchmark.config) == ("gsm8k", "openai/gsm8k", "main")
    assert (benchmark.split, benchmark.revision, benchmark.total_rows) == ("test", "f" * 40, 1319)
    assert [prompt.row for prompt in benchmark.prompts] == SELECTION["gsm8k"]["rows"]
    assert benchmark.prompts[0].turns == ["Question 264" + BOXED]
    assert benchmark.prompts[0].prompt_ids is None
    assert [p.row for p in load_benchmark("gsm8k", max_samples=3).prompts] == [264, 725, 996]
    load_benchmark("gsm8k", revision="v1")
    assert hub.asked["revision"] == "v1"


def test_short_hub_data_set_is_warned_about(monkeypatch, caplog):
    Hub(monkeypatch, [{"prompt": "Sort."}] * 5)
    with caplog.at_level(logging.WARNING):
        assert len(load_benchmark("mbpp").prompts) == 5
    assert "has 5 rows, 257 were expected" in caplog.text


def test_hub_rows_of_another_shape_are_refused(monkeypatch):
    Hub(monkeypatch, [{"text": "Sort."}] * 257)
    with pytest.raises(UserError, match=r"row 252 of google-research-datasets/mbpp .*'prompt'"):
        load_benchmark("mbpp")


def test_livecodebench_reads_its_six_files_in_order(tmp_path, monkeypatch):
    folder = tmp_path / "livecodebench" / "code_generation_lite"
    folder.mkdir(parents=True)
    for place, name in enumerate(["test", "test2", "test3", "test4", "test5", "test6"]):
        rows = [{"question_content": f"Problem {2 * place + part}", "starter_code": ""} for part in (0, 1)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("DLOOP_HUB_MIRROR", str(tmp_path))
    benchmark = load_benchmark("livecodebench")
    assert [re.search(r"Problem \d+", p.turns[0])[0] for p in benchmark.prompts] == [
        f"Problem {row}" for row in range(12)
    ]


def test_from_a_file(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"turns": ["a", "b"]}\n\n{"prompt_ids": [3, 0], "row": 9}\n{"turns": ["\u2028"]}\n', "utf-8")
    benchmark = load_benchmark(str(path))
    assert [(p.row, p.turns, p.prompt_ids) for p in benchmark.prompts] == [
        (0, ["a", "b"], None),
        (9, None, [3, 0]),
        (2, ["\u2028"], None),
    ]
    assert (benchmark.name, benchmark.hub_id, benchmark.total_rows) == ("mine", None, 3)
    assert benchmark.revision == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert [p.row for p in load_benchmark(str(path), max_samples=2).prompts] == [0, 9]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not a prompt (not_json)"),
        ("7", "is not a prompt (not_object)"),
        ("{}", "must have exactly one of"),
        ('{"turns": ["a"], "prompt_ids": [1]}', "must have exactly one of"),
        ('{"turns": "a"}', "not a list of texts"),
        ('{"turns": []}', "not a list of texts"),
        ('{"turns": ["a", 1]}', "not a list of texts"),
        ('{"prompt_ids": []}', "not a list of token ids"),
        ('{"prompt_ids": [1.5]}', "not a list of token ids"),
        ('{"prompt_ids": [true]}', "not a list of token ids"),
        ('{"prompt_ids": [-1]}', "not a list of token ids"),
        ('{"turns": ["a"], "row": "x"}', "has the row 'x'"),
    ],
)
def test_malformed_lines_are_refused_with_their_place(tmp_path, line, complaint):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'\n{{"turns": ["a"]}}\n{line}\n')
    with pytest.raises(UserError, match=re.escape(f"{path}:3 ") + ".*" + re.escape(complaint)):
        load_benchmark(str(path))


def test_what_cannot_be_a_benchmark(tmp_path):
    empty, array = tmp_path / "empty.jsonl", tmp_path / "array.jsonl"
    empty.write_text("\n")
    array.write_text("[]")
    for name, complaint in [
        ("gsm9k", "neither a benchmark nor a file: use one of gsm8k, math500"),
        (str(tmp_path), "neither a benchmark nor a file"),
        (str(empty), "holds no prompts"),
        (str(array), "JSON array"),
    ]:
        with pytest.raises(UserError, match=complaint):
            load_benchmark(name)
    with pytest.raises(UserError, match="at least 1"):
        load_benchmark("gsm8k", max_samples=0)
    with pytest.raises(UserError, match="has no revision"):
        load_benchmark(str(GOLDEN / "gsm8k.jsonl"), revision="v1")


@needs_files
@pytest.mark.parametrize("name", BENCHMARKS)
def test_real_files_have_the_known_sums(name):
    prompts = prompts_of(REAL, name)
    assert {str(prompt["row"]): sum_of(prompt["turns"]) for prompt in prompts} == SUMS[name]


@needs_files
@pytest.mark.parametrize("name", BENCHMARKS)
def test_templates_make_every_real_prompt(name):
    for prompt in prompts_of(REAL, name):
        row = prompt if name == "alpaca" else raw_row(name, prompt["turns"])
        assert BENCHMARKS[name].turns(row) == prompt["turns"]


@needs_files
@pytest.mark.parametrize("name", sorted(set(BENCHMARKS) - {"alpaca"}))
def test_real_files_give_the_papers_selection_by_path(name):
    path = str(Path(REAL) / f"{name}.jsonl")
    benchmark = load_benchmark(path, max_samples=BENCHMARKS[name].evaluated)
    assert [prompt.row for prompt in benchmark.prompts] == SELECTION[name]["rows"]
    assert [sum_of(p.turns) for p in benchmark.prompts] == [SUMS[name][str(p.row)] for p in benchmark.prompts]
