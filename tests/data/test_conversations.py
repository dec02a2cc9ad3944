"""Reading and normalising conversations, against the collected cases of real-world input."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.data.conversations import (
    RowError,
    iter_lines,
    normalise,
    parse_row,
    refuse_json_array,
    require_user,
)

CASES = Path(__file__).parent.parent / "golden" / "cases"
EXPECTED = {
    path.name.removesuffix(".expected.json"): json.loads(path.read_text("utf-8"))
    for path in CASES.glob("*.expected.json")
}
BY_LINE = [name for name in sorted(EXPECTED) if "lines" in EXPECTED[name]]
BY_FILE = [name for name in sorted(EXPECTED) if "rows" in EXPECTED[name]]


def read(path):
    """(rows with their messages, {line number: reason}) of a file, as training reads it."""
    rows, bad = [], {}
    for number, raw in iter_lines(path):
        try:
            row = parse_row(raw)
            messages = normalise(row)
            require_user(messages)
            rows.append((row, messages))
        except RowError as error:
            bad[number] = error.reason
    return rows, bad


def test_every_case_is_covered():
    assert len(BY_LINE) + len(BY_FILE) == 15


@pytest.mark.parametrize("name", BY_FILE)
def test_rows_of_a_file(name):
    expected = EXPECTED[name]
    rows, bad = read(CASES / f"{name}.jsonl")
    assert [row["id"] for row, _ in rows] == expected["ids"]
    assert len(rows) == expected["rows"]
    assert bad == {line["line"] - 1: line["reason"] for line in expected["bad_lines"]}
    assert "\r" not in "".join(message["content"] for _, messages in rows for message in messages)
    for index, key in enumerate(("user_content", "assistant_content")):
        if key in expected:
            contents = [messages[index]["content"] for _, messages in rows]
            # The file of expectations spells characters outside the basic plane as pairs of escapes.
            assert contents == [text.encode("utf-16", "surrogatepass").decode("utf-16") for text in expected[key]]
    json.dumps([messages for _, messages in rows], ensure_ascii=False).encode("utf-8")


def test_unicode_separators_stay_inside_their_strings():
    rows, _ = read(CASES / "c12_unicode_separators.jsonl")
    assert [message["content"] for message in rows[0][1]] == [
        "first\u2028second\u2029third",
        "line\x85next\x0bvt\x0cff",
    ]


@pytest.mark.parametrize("name", BY_LINE)
def test_bad_rows_have_the_reason_training_expects(name):
    _, bad = read(CASES / f"{name}.jsonl")
    wanted = {line["line"] - 1: line["train"] for line in EXPECTED[name]["lines"]}
    assert bad == {number: train["reason"] for number, train in wanted.items() if train["status"] == "bad_row"}


def test_both_spellings_give_the_same_messages():
    released = {"conversations": [{"from": " Human", "value": "a"}, {"from": "GPT", "value": "b"}]}
    ours = {"conversations": [{"role": "user", "content": "a"}, {"role": "model", "content": "b"}]}
    assert (
        normalise(released)
        == normalise(ours)
        == [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
        ]
    )


def test_text_parts_are_joined_and_null_is_empty():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    row = {"conversations": [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]}
    assert [message["content"] for message in normalise(row)] == ["2+2", ""]


def test_tool_calls_stored_as_text_are_parsed_and_unknown_keys_dropped():
    _, raw = next(iter_lines(CASES / "c08_tool_turns.jsonl"))
    call = normalise(parse_row(raw))[1]
    assert call["tool_calls"] == [
        {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
    ]
    row = {"conversations": [{"role": "user", "content": "a", "name": "me", "weight": 1, "tool_calls": None}]}
    assert normalise(row) == [{"role": "user", "content": "a", "name": "me"}]


def test_arguments_that_are_no_json_stay_text():
    calls = [{"function": {"name": "f", "arguments": "not json"}}]
    row = {"conversations": [{"role": "assistant", "content": "", "tool_calls": calls}]}
    assert normalise(row)[0]["tool_calls"] == calls


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"status": "error", "conversations": [{"role": "user", "content": "a"}]}, "status"),
        ({}, "missing_conversations"),
        ({"conversations": {"role": "user"}}, "empty_conversations"),
        ({"conversations": ["hello"]}, "bad_message"),
        ({"conversations": [{"content": "a"}]}, "unsupported_role"),
        ({"conversations": [{"role": 1, "content": "a"}]}, "unsupported_role"),
        ({"conversations": [{"role": "user", "content": {"text": "a"}}]}, "unsupported_content"),
        ({"conversations": [{"role": "user", "content": [{"type": "text"}]}]}, "unsupported_content"),
        (
            {"conversations": [{"role": "assistant", "content": "", "tool_calls": "nope"}]},
            "unsupported_content",
        ),
    ],
)
def test_reason_codes(row, reason):
    with pytest.raises(RowError) as caught:
        normalise(row)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"a": "\xff"}', "not_utf8"),
        (b'{"a": ', "not_json"),
        (b"[1]", "not_object"),
        (b"[" * 100_000, "not_json"),
    ],
)
def test_lines_that_are_no_rows(raw, reason):
    with pytest.raises(RowError) as caught:
        parse_row(raw)
    assert caught.value.reason == reason


def test_a_json_array_is_refused_with_the_fix(tmp_path):
    path = tmp_path / "rows.json"
    path.write_bytes(b'\xef\xbb\xbf\n  [{"conversations": []}]')
    with pytest.raises(UserError, match="JSON array"):
        refuse_json_array(path)
    path.write_bytes(b'{"conversations": []}\n')
    refuse_json_array(path)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.one_of(st.none(), st.text(st.characters(exclude_categories=())))),
    st.booleans(),
    st.booleans(),
)
def test_what_is_written_is_read_back(tmp_path_factory, texts, windows, mark):
    """None stands for a blank line; line numbers count it. Surrogates come back as U+FFFD."""
    end = b"\r\n" if windows else b"\n"
    lines = [b" " if text is None else json.dumps({"t": text}).encode() for text in texts]
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * mark + b"".join(line + end for line in lines))
    rows = [(number, parse_row(raw)["t"]) for number, raw in iter_lines(path)]
    wanted = [(n, json.loads(lines[n])["t"]) for n, text in enumerate(texts) if text is not None]
    assert rows == [(n, "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)) for n, text in wanted]
