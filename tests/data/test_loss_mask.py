"""Which characters and tokens carry the loss; the prefix-length rule is the oracle of the offset rule."""

import json
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dloop.cli import UserError
from dloop.data.chat_template import TEMPLATES, kept_turns, training_text
from dloop.data.conversations import RowError, iter_lines, normalise, parse_row
from dloop.data.loss_mask import Encoder, mask_from_offsets, supervised_spans
from tests.toy_tokenizer import toy_tokenizer

GOLDEN_DIR = Path(__file__).parents[1] / "golden"
GOLDEN = json.loads((GOLDEN_DIR / "chat_render_qwen3.json").read_text("utf-8"))["train"]
CASES = {
    path.name.split(".")[0]: expected["lines"]
    for path in sorted((GOLDEN_DIR / "cases").glob("*.expected.json"))
    if "lines" in (expected := json.loads(path.read_text("utf-8")))
}
TOKENIZER = toy_tokenizer()
QWEN = TEMPLATES["qwen"]
HI = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]

pytestmark = pytest.mark.filterwarnings("ignore:(messages|conversations) .*:UserWarning")


def encode(messages, template=QWEN, max_length=4096, **options):
    return Encoder(tokenizer=TOKENIZER, template=template, max_length=max_length, **options)(messages)


def mask_from_prefixes(text, template, max_length):
    """Tokens of a span [a, b): from the number of tokens of text[:a] to that of text[:b], all cut alike."""

    def count(end):
        return min(len(TOKENIZER.encode(text[:end], add_special_tokens=False)), max_length)

    mask = [0] * count(len(text))
    for start, end in supervised_spans(text, template):
        mask[count(start) : count(end)] = [1] * (count(end) - count(start))
    return mask


def decoded_loss(encoded):
    return TOKENIZER.decode([t for t, m in zip(encoded.input_ids, encoded.loss_mask, strict=True) if m])


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_spans_of_the_golden_renders(case):
    spans = supervised_spans(case["rendered"], QWEN)
    assert [list(span) for span in spans] == case["supervised_char_spans"]
    assert [case["rendered"][a:b] for a, b in spans] == case["supervised_text"]


@pytest.mark.parametrize("max_length", [4096, 40])
@pytest.mark.parametrize("name", ["qwen", "qwen3-instruct"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_offsets_and_prefix_lengths_agree_on_golden_renders(case, name, max_length):
    encoded = encode(case["conversation"], TEMPLATES[name], max_length)
    assert encoded.loss_mask == mask_from_prefixes(case["rendered"], TEMPLATES[name], max_length)


def test_offsets_and_prefix_lengths_agree_on_real_conversations():
    for _, raw in iter_lines(GOLDEN_DIR / "conversations_sample.jsonl"):
        messages = normalise(parse_row(raw))
        text = training_text(messages, TOKENIZER, QWEN)
        encoded = encode(messages, max_length=300)
        assert encoded.loss_mask == mask_from_prefixes(text, QWEN, 300)
        assert encoded.uncut_length == len(TOKENIZER.encode(text, add_special_tokens=False))


@given(st.lists(st.text(alphabet="a\n é😀\u0301<|", max_size=6), min_size=2, max_size=2))
def test_offsets_and_prefix_lengths_agree_on_odd_text(texts):
    # Line breaks at the start of an answer in the history merge with the header's: covered by the golden renders.
    question, answer = texts
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    text = training_text(messages, TOKENIZER, QWEN)
    assert encode(messages).loss_mask == mask_from_prefixes(text, QWEN, 4096)


TRAINING_CASES = [
    pytest.param(name, expected, id=f"{name}-{expected['line']}")
    for name, lines in CASES.items()
    for expected in lines
    if "train" in expected
]


@pytest.mark.parametrize(("name", "expected"), TRAINING_CASES)
def test_training_sees_of_real_world_rows(name, expected):
    raw = dict(iter_lines(GOLDEN_DIR / "cases" / f"{name}.jsonl"))[expected["line"] - 1]
    want = expected["train"]
    if want["status"] == "bad_row":
        with pytest.raises(RowError) as caught:
            encode(normalise(parse_row(raw)))
        assert caught.value.reason == want["reason"]
        return
    messages = normalise(parse_row(raw))
    text = training_text(messages, TOKENIZER, QWEN)
    roles = [message["role"] for message in kept_turns(messages).messages]
    assert (roles if roles[0] == "system" else ["system", *roles]) == want["rendered_roles"]
    assert [text[a:b] for a, b in supervised_spans(text, QWEN)] == want["supervised_text"]
    encoded = encode(messages)
    assert decoded_loss(encoded) == "".join(want["supervised_text"])
    assert (sum(encoded.loss_mask) == 0) == (want["status"] == "zero_loss")


def test_cases_are_there():
    assert len(TRAINING_CASES) > 30


def test_empty_think_block_is_supervised_by_qwen_only():
    assert decoded_loss(encode(HI)) == "<think>\n\n</think>\n\nHello!<|im_end|>\n"
    assert decoded_loss(encode(HI, TEMPLATES["qwen3-instruct"])) == "Hello!<|im_end|>\n"
    thinking = [HI[0], HI[1] | {"reasoning_content": "greet"}]
    assert decoded_loss(encode(thinking, TEMPLATES["qwen3-thinking"])).startswith("<think>\ngreet\n</think>")


def test_gemma4_spans_start_behind_the_thought_channel():
    text = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>Hello!<turn|>\n"
    assert [text[a:b] for a, b in supervised_spans(text, TEMPLATES["gemma4"])] == ["Hello!<turn|>\n"]


def test_answer_without_end_reaches_to_the_end_of_the_text():
    text = "<|im_start|>assistant\nHello\n"
    assert supervised_spans(text, QWEN) == [(22, 28)]
    assert supervised_spans("<|im_start|>assistant\n", QWEN) == []


def test_only_the_last_answer():
    both, last = encode([*HI, *HI]), encode([*HI, *HI], train_only_last_turn=True)
    assert decoded_loss(both).count("Hello!") == 2
    assert decoded_loss(last) == "<think>\n\n</think>\n\nHello!<|im_end|>\n"


def test_cut_keeps_the_first_tokens():
    whole, cut = encode(HI), encode(HI, max_length=10)
    assert cut.input_ids == whole.input_ids[:10]
    assert cut.loss_mask == [0] * 10
    assert cut.uncut_length == len(whole.input_ids)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=30),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4),
)
def test_mask_is_containment(widths, gaps):
    ends = list(accumulate(widths))
    offsets = [(end - width, end) for end, width in zip(ends, widths, strict=True)]
    spans, position = [], 0
    for gap, length in gaps:
        spans.append((position + gap, position + gap + length))
        position += gap + length
    naive = [int(any(a <= start and end <= b for a, b in spans)) for start, end in offsets]
    assert mask_from_offsets(offsets, spans) == naive


def test_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False
        name_or_path = "slow"

    with pytest.raises(UserError, match="gives no character offsets"):
        Encoder(tokenizer=Slow(), template=QWEN, max_length=8)
