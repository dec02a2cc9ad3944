"""One conversation being answered: the collected cases, the history of requests, and which answers are refused."""

import json
from pathlib import Path

import pytest

from dloop.data.conversations import RowError, iter_lines
from dloop.regeneration.dialogue import Answer, Rejected, judged, open_dialogue, skipped, split_reasoning

CASES = Path(__file__).parent.parent / "golden" / "cases"


def expectations():
    for file in sorted(CASES.glob("*.expected.json")):
        name = file.name.removesuffix(".expected.json")
        lines = list(iter_lines(CASES / f"{name}.jsonl"))
        for expected in json.loads(file.read_text("utf-8")).get("lines", ()):
            number, raw = lines[expected["line"] - 1]
            yield pytest.param(number, raw, expected["regenerate"], id=f"{name}-{expected['line']}")


def roles_of_requests(dialogue):
    """The roles sent in each request; answers received before are called `generated`."""
    requests = []
    while (messages := dialogue.request()) is not None:
        requests.append(["generated" if turn["role"] == "assistant" else turn["role"] for turn in messages])
        dialogue.add(Answer(f"new {len(requests)}", finish="stop"))
    return requests


@pytest.mark.parametrize(("line", "raw", "expected"), list(expectations()))
def test_collected_cases(line, raw, expected):
    if expected["status"] == "request":
        assert roles_of_requests(open_dialogue(line, raw, "disable")) == expected["requests"]
        return
    with pytest.raises(RowError) as caught:
        open_dialogue(line, raw, "disable")
    row = skipped(line, raw, caught.value).row
    assert (row["status"], row["line"], row["error"]) == ("skipped", line, expected["reason"])
    assert row.get("position") == expected.get("position")


def test_there_are_enough_cases():
    assert len(list(expectations())) == 44


def test_later_requests_hold_the_targets_answers_and_other_fields_pass_through():
    source = {
        "id": 7,
        "topic": "prime",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "One?"},
            {"from": "gpt", "value": "old"},
            {"from": "human", "value": "Two?"},
        ],
    }
    dialogue = open_dialogue(3, json.dumps(source).encode(), "disable")
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}]
    assert dialogue.request() == first
    assert dialogue.request() == first
    dialogue.add(Answer("new one", finish="stop"))
    second = [*first, {"role": "assistant", "content": "new one"}, {"role": "user", "content": "Two?"}]
    assert dialogue.request() == second
    dialogue.add(Answer("new two", finish="length"))
    assert dialogue.request() is None
    assert dialogue.finished().row == {
        "id": 7,
        "topic": "prime",
        "conversations": [*second, {"role": "assistant", "content": "new two"}],
        "finish_reasons": ["stop", "length"],
        "status": "success",
        "line": 3,
    }


def test_a_failed_row_keeps_its_source_conversation():
    source = {"conversations": [{"role": "user", "content": "Hi"}]}
    dialogue = open_dialogue(0, json.dumps(source).encode(), "disable")
    dialogue.request()
    row = dialogue.failed("error", "HTTP 400", "bad answer").row
    assert row == source | {"status": "error", "line": 0, "error": "HTTP 400", "answer": "bad answer"}


def test_saved_reasoning_is_stored_but_not_sent():
    source = {"conversations": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}
    source["conversations"].insert(1, {"role": "assistant", "content": ""})
    dialogue = open_dialogue(0, json.dumps(source).encode(), "save")
    dialogue.request()
    dialogue.add(Answer("answer", "thought", "stop"))
    assert dialogue.request()[1] == {"role": "assistant", "content": "answer"}
    dialogue.add(Answer("<think>\nhm\n</think>\n\nanswer", None, "stop"))
    kept = [turn for turn in dialogue.finished().row["conversations"] if turn["role"] == "assistant"]
    assert kept == [
        {"role": "assistant", "content": "answer", "reasoning_content": "thought"},
        {"role": "assistant", "content": "answer", "reasoning_content": "hm"},
    ]


@pytest.mark.parametrize(
    ("answer", "reasoning", "status", "reason"),
    [
        (Answer(None), "disable", "skipped", "empty_answer"),
        (Answer(" \n"), "none", "skipped", "empty_answer"),
        (Answer("<think>\nadd them\n</think>\n\n4"), "disable", "skipped", "think_marker"),
        (Answer("<think>\nnever closed 4"), "none", "skipped", "think_marker"),
        (Answer("<THINK>\n\n</Think>\n\n6"), "disable", "skipped", "think_marker"),
        (Answer("4", None), "save", "error", "empty_answer"),
        (Answer("", "thought"), "save", "error", "empty_answer"),
        (Answer("4</think>", "thought"), "save", "skipped", "think_marker"),
        (Answer("4", "a <think> b"), "save", "skipped", "think_marker"),
    ],
)
def test_answers_that_are_refused(answer, reasoning, status, reason):
    with pytest.raises(Rejected) as caught:
        judged(answer, reasoning)
    assert (caught.value.status, caught.value.reason) == (status, reason)


@pytest.mark.parametrize("text", ["<think>\na\nb\n</think>\n\nc", "a\nb\n</think>\n\nc"])
def test_a_think_block_is_split_with_and_without_its_opening(text):
    assert split_reasoning(text) == ("a\nb", "c")


def test_what_is_no_row_is_kept_as_text():
    assert skipped(2, b'{"a": \xff', RowError("not_utf8")).row == {
        "data": '{"a": \ufffd',
        "error": "not_utf8",
        "status": "skipped",
        "line": 2,
    }
