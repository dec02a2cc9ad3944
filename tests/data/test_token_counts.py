"""Counting supervised tokens: every row once, whoever counts."""

import json

import pytest
import torch

from dloop.cli import UserError
from dloop.data.loader import ConversationDataset
from dloop.data.token_counts import supervised_counts
from tests.toy_tokenizer import toy_tokenizer
from tests.training.tiny import conversation, write_conversations


def dataset(path, **options):
    return ConversationDataset(path, toy_tokenizer(), "qwen", 512, **options)


def test_counts_equal_a_plain_walk_for_any_number_of_ranks_and_workers(tmp_path):
    rows = dataset(write_conversations(tmp_path / "data.jsonl", 11))
    plain = torch.zeros(448, dtype=torch.long)
    for row in range(11):
        for token, mask in zip(rows[row].input_ids[0].tolist(), rows[row].loss_mask[0].tolist(), strict=True):
            plain[token] += mask
    assert plain.sum() > 50
    assert torch.equal(supervised_counts(rows, 448), plain)
    ranks = [supervised_counts(rows, 448, rank=rank, world_size=3, num_workers=rank % 2) for rank in range(3)]
    assert torch.equal(sum(ranks), plain)


def test_unusable_rows_are_replaced_or_named(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"conversations": []}) + "\n" + json.dumps(conversation(1)) + "\n")
    once = supervised_counts(dataset(path), 448, rank=1, world_size=2)
    assert torch.equal(supervised_counts(dataset(path), 448), 2 * once)
    with pytest.raises(UserError, match=r"data\.jsonl:1"):
        supervised_counts(dataset(path, strict=True), 448)
