"""One conversation being answered: which requests are sent, which answers are kept, which row comes out.

Only the questions of the source are used; each request holds the target's own earlier answers. Knows neither
servers nor models nor files.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dloop.data.conversations import RowError, normalise, parse_row

Reasoning = Literal["none", "save", "disable"]
Status = Literal["success", "error", "skipped"]
STATUSES: tuple[Status, ...] = get_args(Status)
Message = dict[str, Any]
THINK_MARKERS = ("<think>", "</think>")


@dataclass(frozen=True)
class Answer:
    """What came back for one request: the text, reasoning sent apart from it, and why it ended."""

    text: str | None
    reasoning: str | None = None
    finish: str | None = None
    """`stop`, or `length` for an answer cut at the token limit."""


@dataclass(frozen=True)
class Outcome:
    """A finished input line: its status and the row to write."""

    line: int
    status: Status
    row: dict[str, Any]


class Rejected(Exception):
    """An answer that must not become training data; the whole row goes to the error or the skipped file."""

    def __init__(self, status: Status, reason: str, answer: str | None = None) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason
        self.answer = answer


@dataclass
class Dialogue:
    """A conversation on its way; ask `request()`, give the reply to `add()`, until `request()` is None."""

    line: int
    source: dict[str, Any]
    questions: list[Message]
    """System and user messages still to be sent, in order."""
    reasoning: Reasoning
    history: list[Message] = field(default_factory=list)
    finishes: list[str | None] = field(default_factory=list)
    returns: int = 0
    """How often the dialogue was given back because connections were lost."""

    def request(self) -> list[Message] | None:
        """The messages of the next request (role and content only), None when every question is answered."""
        while self.questions and (not self.history or self.history[-1]["role"] != "user"):
            self.history.append(self.questions.pop(0))
        if self.history[-1]["role"] != "user":
            return None
        return [{"role": turn["role"], "content": turn["content"]} for turn in self.history]

    def add(self, answer: Answer) -> None:
        """Append the reply to the last request. Raises `Rejected`."""
        self.history.append(judged(answer, self.reasoning))
        self.finishes.append(answer.finish)

    def finished(self) -> Outcome:
        """The row with the target's answers; fields the input row had beside its conversation are passed on."""
        made = {"conversations": self.history, "finish_reasons": self.finishes}
        return _outcome(self.line, "success", self.source, made)

    def failed(self, status: Status, reason: str, answer: str | None = None) -> Outcome:
        """The input row as it was, with what went wrong."""
        details = {"error": reason} | ({} if answer is None else {"answer": answer})
        return _outcome(self.line, status, self.source, details)


def open_dialogue(line: int, raw: bytes, reasoning: Reasoning) -> Dialogue:
    """The dialogue of one input line. Raises `RowError` for a row that cannot be asked."""
    source = parse_row(raw)
    messages = normalise(source)
    check_order(messages)
    questions = [
        {"role": message["role"], "content": message["content"]}
        for message in messages
        if message["role"] != "assistant"
    ]
    return Dialogue(line, source, questions, reasoning)


def skipped(line: int, raw: bytes, error: RowError) -> Outcome:
    """The outcome of a line that `open_dialogue` refused; what is no object is kept as text."""
    try:
        source = parse_row(raw)
    except RowError:
        source = {"data": raw.decode("utf-8", "replace")}
    details = {"error": error.reason} | ({} if error.position is None else {"position": error.position})
    return _outcome(line, "skipped", source, details)


def _outcome(line: int, status: Status, source: dict[str, Any], details: dict[str, Any]) -> Outcome:
    return Outcome(line, status, {**source, **details, "status": status, "line": line})


def check_order(messages: list[Message]) -> None:
    """Raise `RowError` with the position of the first message that cannot stand where it does.

    System messages come first, then user and assistant alternate, the user first, and no question is blank. A
    blank answer is no fault, because the source's answers are not used.
    """
    previous = None
    for position, message in enumerate(messages):
        reason = _fault(message, previous)
        if reason:
            raise RowError(reason, position)
        if message["role"] != "system":
            previous = message["role"]
    if previous is None:
        raise RowError("no_user")


def _fault(message: Message, previous: str | None) -> str | None:
    """`previous` is the role before this message, None while only system messages were seen."""
    role = message["role"]
    if role == "tool" or (role == "system" and previous):
        return "unsupported_role"
    if role != "assistant" and not message["content"].strip():
        return "empty_content"
    if role == "assistant" and previous is None:
        return "starts_with_assistant"
    return "role_order" if role == previous else None


def judged(answer: Answer, reasoning: Reasoning) -> Message:
    """The assistant message of an answer. Raises `Rejected`.

    A blank answer is never kept, nor one with a think marker in it. With `save` the reasoning is stored apart
    from the content and must not be blank.
    """
    text, thought = answer.text or "", answer.reasoning
    if reasoning == "save" and thought is None and "</think>" in text:
        thought, text = split_reasoning(text)
    parts = (text, thought or "") if reasoning == "save" else (text,)
    if not all(part.strip() for part in parts):
        raise Rejected("error" if reasoning == "save" else "skipped", "empty_answer", answer.text)
    if any(marker in part.lower() for part in parts for marker in THINK_MARKERS):
        raise Rejected("skipped", "think_marker", answer.text)
    message: Message = {"role": "assistant", "content": text}
    return message | {"reasoning_content": thought} if reasoning == "save" else message


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and content of a text whose think block is closed (its opening may be part of the prompt)."""
    thought, _, content = text.partition("</think>")
    return thought.strip().removeprefix("<think>").strip("\n"), content.lstrip("\n")
