import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dloop.cli import UserError
from dloop.data.chat_template import TEMPLATES, prompt_ids, training_text
from dloop.data.conversations import normalise
from dloop.data.loss_mask import Encoder
from dloop.demo.tokenizer import VOCABULARY, texts


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return AutoTokenizer.from_pretrained(tokenizer_folder)


def _conversations(corpus) -> list[list[dict]]:
    return [normalise(json.loads(line)) for line in (corpus / "target_train.jsonl").read_text().splitlines()]


def test_the_saved_folder_opens_as_a_fast_tokenizer(tokenizer):
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert len(tokenizer) <= VOCABULARY
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
    assert tokenizer.convert_tokens_to_ids(list(specials)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 2, 3)
    assert tokenizer.bos_token_id is None


@settings(max_examples=40)
@given(text=st.text())
def test_every_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_a_number_below_100_is_one_token(tokenizer):
    assert all(tokenizer.tokenize(str(number)) == [str(number)] for number in range(100))
    assert tokenizer.tokenize("12+345") == ["12", "+", "34", "5"]


def test_the_full_vocabulary_spells_most_words_whole(corpus, tokenizer):
    for messages in _conversations(corpus)[:20]:
        words = " ".join(message["content"] for message in messages).split()
        pieces = tokenizer.tokenize(" ".join(words))
        assert len(pieces) < 3 * len(words)


def test_training_text_is_what_the_qwen_template_expects(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    assert training_text(messages, tokenizer, TEMPLATES["qwen"]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
    )


def test_a_prompt_is_the_start_of_the_training_text(corpus, tokenizer):
    for messages in _conversations(corpus)[:20]:
        asked = prompt_ids(messages[:-1], tokenizer)
        text = training_text(messages, tokenizer, TEMPLATES["qwen"], system_prompt="")
        assert tokenizer.encode(text, add_special_tokens=False)[: len(asked)] == asked


def test_thinking_changes_nothing(tokenizer):
    messages = [{"role": "user", "content": "Hi"}]
    assert prompt_ids(messages, tokenizer, thinking=True) == prompt_ids(messages, tokenizer, thinking=False)


def test_the_answers_are_supervised(corpus, tokenizer):
    encode = Encoder(tokenizer=tokenizer, template=TEMPLATES["qwen"], max_length=1024)
    for messages in _conversations(corpus)[:20]:
        encoded = encode(messages)
        kept = [token for token, keep in zip(encoded.input_ids, encoded.loss_mask, strict=True) if keep]
        answers = [message["content"] for message in messages if message["role"] == "assistant"]
        assert tokenizer.decode(kept) == "".join(f"{answer}<|im_end|>\n" for answer in answers)


def test_a_bad_corpus_is_refused_with_its_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"conversations": [{"role": "user", "content": "Hi"}]}\nnonsense\n')
    with pytest.raises(UserError, match="line 2"):
        list(texts(path))
