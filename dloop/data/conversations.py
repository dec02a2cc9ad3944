"""Conversations on disk: which bytes are a row, and which messages a row holds.

One reader for every stage: lines as bytes, rows as objects, messages in one normal form, and one reason code
for each way a row can be unusable. It knows neither chat templates nor tokenizers, and it never drops a row
by itself: callers decide whether a `RowError` skips, counts or stops. Check a file with
`python -m dloop.data.check FILE`.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dloop.cli import UserError

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
}
"""Names of speakers in public data sets, and the role each stands for."""

BOM = b"\xef\xbb\xbf"
_KEPT_AS_THEY_ARE = ("reasoning_content", "name", "tool_call_id")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class RowError(Exception):
    """An unusable row: a reason code (`not_utf8`, ...) and, where one message is to blame, its position."""

    def __init__(self, reason: str, position: int | None = None) -> None:
        super().__init__(reason if position is None else f"{reason} at message {position}")
        self.reason = reason
        self.position = position


def iter_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """The rows of a JSONL file as (0-based line number, bytes); blank lines are counted but not yielded.

    Only LF ends a line: U+2028, U+2029 and U+0085 may stand inside strings. A byte-order mark at the start of
    the file and a CR at the end of a line are removed.
    """
    with open(path, "rb") as file:
        for number, raw in enumerate(file):
            line = clean_line(raw.removeprefix(BOM) if number == 0 else raw)
            if line:
                yield number, line


def clean_line(raw: bytes) -> bytes:
    """`raw` without its line end; empty if nothing but blanks is left."""
    line = raw.removesuffix(b"\n").removesuffix(b"\r")
    return line if line.strip() else b""


def refuse_json_array(path: str | Path) -> None:
    """Raise `UserError` if the file is one JSON array, which a reader of lines would take for one bad row."""
    with open(path, "rb") as file:
        start = file.read(4096).removeprefix(BOM).lstrip()
    if start.startswith(b"["):
        raise UserError(
            f"{path} starts with '[', so it is a JSON array, but one JSON object a line is needed: "
            f"write it again as JSON lines (`jq -c '.[]' {path}`)"
        )


def parse_row(raw: bytes) -> dict[str, Any]:
    """One line as an object; lone surrogates become U+FFFD, so that every row can be written again as UTF-8.

    Raises `RowError` with `not_utf8`, `not_json` or `not_object`.
    """
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise RowError("not_utf8") from None
    except (ValueError, RecursionError):
        raise RowError("not_json") from None
    if not isinstance(row, dict):
        raise RowError("not_object")
    return _without_surrogates(row) if _SURROGATE_ESCAPE.search(raw) else row


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATE.sub("\ufffd", value)
    if isinstance(value, list):
        return [_without_surrogates(part) for part in value]
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(part) for key, part in value.items()}
    return value


def normalise(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a row as `{"role", "content", ...}`.

    Roles are user, assistant, system and tool; content is a text. Both spellings are read (`role`/`content`,
    `from`/`value`). Raises `RowError` with `status`, `missing_conversations`, `empty_conversations`,
    `bad_message`, `unsupported_role` or `unsupported_content`. The order of roles is not judged here, see
    `require_user`.
    """
    if row.get("status", "success") != "success":
        raise RowError("status")
    conversation = row.get("conversations")
    if conversation is None:
        raise RowError("missing_conversations")
    if not isinstance(conversation, list) or not conversation:
        raise RowError("empty_conversations")
    return [_message(source) for source in conversation]


def require_user(messages: list[dict[str, Any]]) -> None:
    """Raise `RowError("no_user")` unless somebody asks something: what training needs beyond `normalise`."""
    if not any(message["role"] == "user" for message in messages):
        raise RowError("no_user")


def role_of(source: dict[str, Any]) -> str | None:
    """The role of a source message in either spelling, None for a speaker no rule knows."""
    name = source.get("role") or source.get("from")
    return ROLES.get(name.strip().lower()) if isinstance(name, str) else None


def text_of(source: dict[str, Any]) -> str:
    """The text of a source message; text parts are joined, null is "". Raises `unsupported_content`."""
    content = source.get("content")
    if content is None:
        content = source.get("value")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_text_part(part) for part in content)
    raise RowError("unsupported_content")


def _text_part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    raise RowError("unsupported_content")


def _message(source: Any) -> dict[str, Any]:
    if not isinstance(source, dict):
        raise RowError("bad_message")
    role = role_of(source)
    if role is None:
        raise RowError("unsupported_role")
    message: dict[str, Any] = {"role": role, "content": text_of(source)}
    if source.get("tool_calls"):
        message["tool_calls"] = _tool_calls(source["tool_calls"])
    message.update({key: source[key] for key in _KEPT_AS_THEY_ARE if source.get(key) is not None})
    return message


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    parsed = _parsed(calls)
    if not isinstance(parsed, list) or not all(isinstance(call, dict) for call in parsed):
        raise RowError("unsupported_content")
    return [_tool_call(call) for call in parsed]


def _tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return call | {"function": function | {"arguments": _parsed(function["arguments"])}}


def _parsed(value: Any) -> Any:
    """Tool data is often stored as JSON inside JSON; text that is not JSON stays text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value
