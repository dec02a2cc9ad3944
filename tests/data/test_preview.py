"""What a person sees of a training sample."""

import json

from dloop.data.loader import ConversationDataset
from dloop.data.preview import describe_sample, describe_tokens
from tests.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()


def test_a_sample_with_its_answer_marked(tmp_path):
    path = tmp_path / "rows.jsonl"
    answer = {"role": "assistant", "content": "a\\b"}
    path.write_text("{}\n" + json.dumps({"conversations": [{"role": "user", "content": "Hi"}, answer]}))
    text = describe_sample(ConversationDataset(path, TOKENIZER, "qwen", 4096), 0)
    lines = text.split("\n")
    assert lines[0] == f"row 0 of {path}"
    assert lines[1] == "  row 0 is unusable (missing_conversations), the next one is shown"
    assert lines[2].endswith("of them carry the loss")
    assert lines[3].startswith("       | <|im_start|>system\\nYou are a helpful assistant.")
    assert lines[4] == "  loss | <think>\\n\\n</think>\\n\\na\\\\b<|im_end|>\\n"
    assert len(lines) == 5


def test_long_runs_are_shortened():
    ids = TOKENIZER.encode("word " * 200)
    text = describe_tokens(ids, [0] * len(ids), TOKENIZER)
    assert "0 of them carry the loss" in text
    assert "[... 680 characters ...]" in text
