"""The streaming answer: whole characters, a style a stage, numbers that add up."""

import io

import pytest
from rich.console import Console

from dloop.reporting.stream import STAGES, TARGET, AnswerView, Detokenizer, legend, styles
from tests.toy_tokenizer import toy_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return toy_tokenizer()


@pytest.mark.parametrize("text", ["Hello there, you.\n\nA second line: 12 + 30 = 42", "größer 日本語 🙂🙂 end", "a"])
def test_the_pieces_join_to_the_text_and_hold_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = Detokenizer(tokenizer.decode)
    pieces = [shown.add(token) for token in ids]
    assert "".join(pieces) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_every_token_has_the_style_of_its_stage_and_the_target_s_own_comes_last():
    assert styles([]) == [TARGET]
    assert styles([2, 1, 0, 1]) == [STAGES[0], STAGES[0], STAGES[1], STAGES[2], TARGET]


def view(tokenizer, *, terminal=False, **more):
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=terminal, color_system="truecolor" if terminal else None)
    return AnswerView(console, tokenizer.decode, frozenset({2}), **more), out


def stream(shown, ids, rounds):
    with shown:
        shown(ids[:1], None)
        place = 1
        for accepted in rounds:
            shown(ids[place : place + 1 + sum(accepted)], accepted)
            place += 1 + sum(accepted)


def test_without_a_terminal_the_text_is_written_once(tokenizer):
    text = "One line that is long enough.\nAnd another one."
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown, out = view(tokenizer, plain_rate=1e-3)
    stream(shown, ids, [[2, 1], [len(ids) - 6]])
    lines = out.getvalue().splitlines()
    assert "\n".join(lines[:2]) == text
    assert f"τ {(len(ids) - 1) / 2:.2f} · 2 rounds, 1 additional stage ·" in out.getvalue().replace("\n", " ")
    assert "autoregressive 0:" in out.getvalue().replace("\n", " ")


def test_nothing_is_shown_behind_a_stop_token(tokenizer):
    ids = [*tokenizer.encode("Done.", add_special_tokens=False), 2, 7, 7]
    shown, out = view(tokenizer)
    stream(shown, ids, [[len(ids) - 2]])
    assert out.getvalue().splitlines()[0] == "Done."


def test_a_terminal_sees_colours(tokenizer):
    ids = tokenizer.encode("A longer answer with several words.", add_special_tokens=False)
    shown, out = view(tokenizer, terminal=True)
    stream(shown, ids, [[1, 1, 1], [len(ids) - 6]])
    assert "38;2;86;180;233" in out.getvalue(), "the first stage"
    assert "38;2;230;159;0" in out.getvalue(), "the first additional one"


def test_the_legend_names_every_style():
    assert [str(span.style) for span in legend().spans] == [*STAGES, TARGET]
