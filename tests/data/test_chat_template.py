"""Which turns are rendered, with which system prompt, and how prompts are asked."""

import json
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.data.chat_template import TEMPLATES, find_template, kept_turns, prompt_ids, training_text
from dloop.data.conversations import RowError
from tests.toy_tokenizer import toy_tokenizer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "chat_render_qwen3.json").read_text("utf-8"))
TOKENIZER = toy_tokenizer()
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]

pytestmark = pytest.mark.filterwarnings("ignore:(messages|conversations) .*:UserWarning")


def named(case):
    return case["name"]


def with_template(source):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = source
    return tokenizer


@pytest.mark.parametrize("case", GOLDEN["train"], ids=named)
def test_training_text_is_what_qwen3_renders(case):
    assert training_text(case["conversation"], TOKENIZER, TEMPLATES["qwen"]) == case["rendered"]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("case", GOLDEN["eval_prompts"], ids=named)
def test_prompts_are_what_qwen3_renders(case, thinking):
    ids = prompt_ids(case["messages"], TOKENIZER, thinking=thinking)
    assert TOKENIZER.decode(ids) == case[f"prompt_enable_thinking_{str(thinking).lower()}"]


def test_prompt_starts_the_text_that_is_trained():
    prompt = prompt_ids(HI[:1], TOKENIZER)
    text = training_text(HI, TOKENIZER, TEMPLATES["qwen"], system_prompt="")
    assert TOKENIZER.encode(text, add_special_tokens=False)[: len(prompt)] == prompt


@pytest.mark.parametrize(
    ("template", "override", "expected"),
    [
        ("qwen", None, ["You are a helpful assistant."]),
        ("qwen", "Be brief.", ["Be brief."]),
        ("qwen", "", []),
        ("qwen3.5-instruct", None, []),
        ("qwen3.5-instruct", "Be brief.", ["Be brief."]),
    ],
)
def test_system_prompt(template, override, expected):
    text = training_text(HI, TOKENIZER, TEMPLATES[template], system_prompt=override)
    systems = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>system\n")[1:]]
    assert systems == expected


def test_own_system_message_wins_over_an_override():
    own = [{"role": "system", "content": "Rhyme."}, *HI]
    text = training_text(own, TOKENIZER, TEMPLATES["qwen"], system_prompt="Be brief.")
    assert "Rhyme." in text
    assert "Be brief." not in text


def test_messages_are_not_changed():
    conversation = [dict(message) for message in HI]
    training_text(conversation, TOKENIZER, TEMPLATES["gemma4"])
    assert conversation == HI


@pytest.mark.parametrize(
    ("name", "passed"),
    [("qwen", "unset"), ("qwen3-instruct", "unset"), ("qwen3-thinking", "True"), ("qwen3.5-instruct", "False")],
)
def test_thinking_argument(name, passed):
    tokenizer = with_template("{{ enable_thinking | default('unset') }}")
    assert training_text(HI, tokenizer, TEMPLATES[name]) == passed


def test_gemma4_answers_open_with_the_empty_thought_channel_once():
    tokenizer = with_template("{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}")
    prefix = "<|channel>thought\n<channel|>"
    turns = [*HI, HI[0], {"role": "assistant", "content": prefix + "Bye!"}]
    text = training_text(turns, tokenizer, TEMPLATES["gemma4"])
    assert text == f"user=Hi;assistant={prefix}Hello!;user=Hi;assistant={prefix}Bye!;"


def test_left_out_turns_are_warned_about_and_counted():
    turns = [HI[1], *HI, HI[1]]
    with pytest.warns(UserWarning, match="front of the first user turn"):
        training_text(turns, TOKENIZER, TEMPLATES["qwen"])
    with pytest.warns(UserWarning, match="out of place"):
        training_text(turns, TOKENIZER, TEMPLATES["qwen"])
    kept = kept_turns(turns)
    assert (kept.messages, kept.dropped, kept.cut) == (HI, 1, 1)


def test_regular_conversation_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training_text([*HI, *HI], TOKENIZER, TEMPLATES["qwen"])


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=8))
def test_kept_turns_by_walking(roles):
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    if "user" not in roles:
        with pytest.raises(RowError, match="no_user"):
            kept_turns(messages)
        return
    walked = []
    for place, message in enumerate(messages):
        role = message["role"]
        before = walked[-1]["role"] if walked else None
        if place == 0 and role == "system":
            walked.append(message)
        elif before in (None, "system") and role != "user" and "user" not in [w["role"] for w in walked]:
            continue
        elif before not in {"assistant": ("user", "tool"), "tool": ("assistant", "tool")}.get(role, (before,)):
            break
        else:
            walked.append(message)
    kept = kept_turns(messages)
    assert kept.messages == walked
    assert kept.dropped + kept.cut + len(walked) == len(messages)


def test_unknown_template_is_refused_with_the_known_names():
    with pytest.raises(UserError, match=r"'qwen2'.*qwen, qwen3-instruct"):
        find_template("qwen2")


def test_tokenizer_without_template_is_refused():
    with pytest.raises(UserError, match="has no chat template"):
        prompt_ids(HI[:1], with_template(None))


def test_template_that_refuses_a_conversation_makes_a_bad_row():
    tokenizer = with_template("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RowError, match="template_error"):
        training_text(HI, tokenizer, TEMPLATES["qwen"])
    with pytest.raises(UserError, match="roles must alternate"):
        prompt_ids(HI[:1], tokenizer)


def test_text_that_begins_twice_is_refused():
    tokenizer = with_template("<|endoftext|>{{ messages[0].content }}")
    tokenizer.bos_token = "<|endoftext|>"
    assert prompt_ids(HI[:1], tokenizer).count(tokenizer.bos_token_id) == 1
    with pytest.raises(UserError, match=r"holds '<\|endoftext\|>' 2 times"):
        prompt_ids([{"role": "user", "content": "<|endoftext|>Hi"}], tokenizer)
