"""The chat on a tiny target: one prompt, a conversation, an interrupted answer, refusals."""

import json

import pytest

from dloop import benchmark, chat
from dloop.cli import UserError
from dloop.reporting.stream import AnswerView
from tests.test_benchmark import talking  # noqa: F401


@pytest.fixture
def models(talking):  # noqa: F811
    return ["--model", talking / "target", "--draft-model", talking / "draft", "--device", "cpu"]


def run(*arguments):
    chat.main([str(argument) for argument in arguments])


def squeezed(text):
    """Without spaces and line ends: the console wraps."""
    return "".join(text.split())


def test_one_prompt_is_answered_with_the_target_s_own_text(models, talking, tmp_path, capsys):  # noqa: F811
    (tmp_path / "p.jsonl").write_text(json.dumps({"turns": ["Say something."]}) + "\n")
    plain = [
        "--model",
        talking / "target",
        "--dataset",
        tmp_path / "p.jsonl",
        "--max-new-tokens",
        24,
        "--device",
        "cpu",
    ]
    benchmark.main([str(part) for part in [*plain, "--baseline", "--warmup-runs", 0, "--output", tmp_path / "b.json"]])
    capsys.readouterr()
    run(*models, "--prompt", "Say something.", "--max-new-tokens", 24, "--loop-gate=-inf", "--max-extra-stages", 1)
    out = capsys.readouterr().out
    (response,) = json.loads((tmp_path / "b.json").read_text())["responses"]
    assert squeezed(response["text"]) in squeezed(out)
    assert "first additional stage" in out
    assert "autoregressive" in out


def test_a_conversation_goes_on_until_the_input_ends(models, monkeypatch, capsys):
    said = iter(["Hello", "", "And again?", "/new", "Hello"])
    asked = []

    def type_a_line(prompt):
        try:
            return next(said)
        except StopIteration:
            raise EOFError from None

    original = chat._prompt_ids
    monkeypatch.setattr("builtins.input", type_a_line)
    monkeypatch.setattr(chat, "_prompt_ids", lambda s, talk, o: asked.append(len(talk)) or original(s, talk, o))
    run(*models, "--max-new-tokens", 6)
    assert asked == [1, 3, 1]
    assert capsys.readouterr().out.count("τ ") == 3


def test_ctrl_c_ends_the_answer_and_not_the_chat(models, monkeypatch, capsys):
    write, pieces = AnswerView._write, []

    def interrupted(self, words, style):
        pieces.append(words)
        if len(pieces) == 5:
            raise KeyboardInterrupt
        write(self, words, style)

    monkeypatch.setattr(AnswerView, "_write", interrupted)
    lines = iter(["Say something.", "Go on."])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or (_ for _ in ()).throw(EOFError))
    run(*models, "--max-new-tokens", 40)
    assert capsys.readouterr().out.count("τ ") == 2
    assert len(pieces) > 5


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--max-new-tokens", 0], "at least 1"),
        (["--tree-width", 3], "--tree-width has no effect on dflash drafts"),
    ],
)
def test_bad_options_end_in_one_sentence(models, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run(*models, "--prompt", "Hi", *more)
