"""The training loader: order, sharding, collation, resuming, bad rows; torch's own sampler is the oracle."""

import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from dloop.cli import UserError
from dloop.data.chat_template import TEMPLATES
from dloop.data.loader import MAX_REPLACEMENTS, ConversationDataset, epoch_order, training_loader
from tests.toy_tokenizer import toy_tokenizer

TOKENIZER = toy_tokenizer()
GOOD = {"conversations": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
CASES = Path(__file__).parents[1] / "golden" / "cases"


def conversation(number):
    question, answer = f"Question {number}", f"Answer {number} " + "long " * (number % 5)
    return {
        "id": str(number),
        "conversations": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ],
    }


def dataset_of(tmp_path, rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return ConversationDataset(path, TOKENIZER, TEMPLATES["qwen"], options.pop("max_length", 4096), **options)


def number_of(ids):
    """The row's number, from its text."""
    return int(TOKENIZER.decode(ids).split("Question ")[1].split("<")[0])


def seen(loader):
    return [(batch.places, [number_of(ids) for ids in batch.input_ids]) for batch in loader]


def batches(dataset, **options):
    return training_loader(dataset, **{"batch_size": 1, "rank": 0, "world_size": 1, "epoch": 0} | options)


def test_a_sample(tmp_path):
    sample = dataset_of(tmp_path, [GOOD])[0]
    for tensor in (sample.input_ids, sample.attention_mask, sample.loss_mask):
        assert tensor.dtype == torch.int64
        assert tensor.shape == (1, sample.input_ids.shape[1])
    assert sample.attention_mask.all()
    supervised = TOKENIZER.decode(sample.input_ids[sample.loss_mask.bool()])
    assert supervised == "<think>\n\n</think>\n\nHello!<|im_end|>\n"


def test_options_reach_the_sample(tmp_path):
    two_turns = {"conversations": GOOD["conversations"] * 2}
    options = {"system_prompt": "", "train_only_last_turn": True, "max_length": 20}
    sample = dataset_of(tmp_path, [two_turns], **options)[0]
    assert sample.input_ids.shape[1] == 20
    assert "system" not in TOKENIZER.decode(sample.input_ids[0])
    first_answer = dataset_of(tmp_path, [two_turns], system_prompt="")[0].loss_mask[0, :20]
    assert sample.loss_mask.sum() < first_answer.sum()


def test_order_is_the_fixed_shuffle_then_torchs_sampler(tmp_path):
    rows, world = 23, 4
    shuffled = np.random.default_rng(42).permutation(rows)
    for epoch in (0, 1, 7):
        order = epoch_order(rows, world, epoch)
        for rank in range(world):
            sampler = DistributedSampler(range(rows), num_replicas=world, rank=rank)
            sampler.set_epoch(epoch)
            assert order[rank::world].tolist() == shuffled[list(sampler)].tolist()


def test_more_ranks_than_rows():
    sampler = DistributedSampler(range(3), num_replicas=8, rank=7)
    assert epoch_order(3, 8, 0)[7::8].tolist() == np.random.default_rng(42).permutation(3)[list(sampler)].tolist()


def test_steps_of_the_papers_epoch():
    rows, world = 1_420_909, 64
    order = epoch_order(rows, world, 0)
    assert len(order) // world == 22_202
    counts = np.bincount(order, minlength=rows)
    assert counts.min() == 1
    assert len(order) - rows == 19
    assert (counts == 2).sum() == 19


def test_ranks_share_the_epoch(tmp_path):
    dataset = dataset_of(tmp_path, map(conversation, range(10)))
    order = epoch_order(10, 3, 2)
    for rank in range(3):
        loader = batches(dataset, rank=rank, world_size=3, epoch=2)
        assert len(loader) == 4
        places = [rank + 3 * step for step in range(4)]
        assert seen(loader) == [((place,), [order[place]]) for place in places]


def test_collation_pads_right_with_zeros_and_drops_the_incomplete_batch(tmp_path):
    dataset = dataset_of(tmp_path, map(conversation, range(10)))
    loader = batches(dataset, batch_size=4, epoch=3)
    assert len(loader) == 2
    for batch in loader:
        assert batch.epoch == 3
        assert batch.input_ids.shape == batch.loss_mask.shape == batch.attention_mask.shape
        for place, *row in zip(batch.places, batch.input_ids, batch.attention_mask, batch.loss_mask, strict=True):
            sample = dataset[int(epoch_order(10, 1, 3)[place])]
            length = sample.input_ids.shape[1]
            for got, want in zip(row, (sample.input_ids, sample.attention_mask, sample.loss_mask), strict=True):
                assert torch.equal(got[:length], want[0])
                assert not got[length:].any()
    assert sum(len(batch.places) for batch in loader) == 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_start_batch_continues_the_epoch(tmp_path, num_workers):
    dataset = dataset_of(tmp_path, map(conversation, range(12)))
    options = {"batch_size": 2, "rank": 1, "world_size": 2, "num_workers": num_workers}
    whole = batches(dataset, **options)
    rest = batches(dataset, start_batch=2, **options)
    assert len(rest) == len(whole) == 3
    assert seen(rest) == seen(whole)[2:]
    assert seen(batches(dataset, start_batch=3, **options)) == []


def test_start_batch_reads_nothing_before_it(tmp_path):
    dataset = dataset_of(tmp_path, ["broken", *map(conversation, range(5))], strict=True)
    place = epoch_order(6, 1, 0).tolist().index(0)
    assert len(seen(batches(dataset, start_batch=place + 1))) == 5 - place


def test_loading_is_the_same_with_workers_and_leaves_the_random_state_alone(tmp_path):
    dataset = dataset_of(tmp_path, map(conversation, range(9)))
    state = torch.get_rng_state()
    assert seen(batches(dataset, batch_size=2, num_workers=2)) == seen(batches(dataset, batch_size=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_dataset_can_be_pickled_after_use(tmp_path):
    dataset = dataset_of(tmp_path, map(conversation, range(3)))
    first = dataset[1]
    again = pickle.loads(pickle.dumps(dataset))[1]
    assert torch.equal(first.input_ids, again.input_ids)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_rows_are_replaced_counted_and_logged(tmp_path, caplog, num_workers):
    rows = [*map(conversation, range(4)), "not json", '{"conversations": []}']
    dataset = dataset_of(tmp_path, rows)
    assert number_of(dataset[4].input_ids[0]) == number_of(dataset[5].input_ids[0]) == 0
    assert [bad.reason for bad in dataset[4].replaced] == ["not_json", "empty_conversations"]
    loader = batches(dataset, batch_size=2, num_workers=num_workers)
    with caplog.at_level(logging.WARNING, "dloop.data.loader"):
        numbers = sorted(number for _, batch in seen(loader) for number in batch)
    assert numbers == [0, 0, 0, 1, 2, 3]
    assert loader.replaced_counts() == {"not_json": 1, "empty_conversations": 2}
    assert f"{dataset.rows.path}:5: not_json" in caplog.text
    assert "rows replaced in this epoch: empty_conversations 2, not_json 1" in caplog.text


def test_only_the_first_bad_rows_are_logged(tmp_path, caplog):
    dataset = dataset_of(tmp_path, [*["x"] * 20, GOOD])
    list(loader := batches(dataset))
    assert loader.replaced_counts() == {"not_json": 20 * 21 // 2}
    assert caplog.text.count("replaced by the next usable row") == 5


def test_replacement_wraps_around_and_gives_up(tmp_path):
    assert len(dataset_of(tmp_path, [GOOD, *["x"] * MAX_REPLACEMENTS])[1].replaced) == MAX_REPLACEMENTS
    dataset = dataset_of(tmp_path, [GOOD, *["x"] * (MAX_REPLACEMENTS + 1)])
    with pytest.raises(UserError, match=rf"rows.jsonl:2 and the {MAX_REPLACEMENTS} rows after it .*not_json 65"):
        dataset[1]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_strict_names_file_line_and_reason(tmp_path, num_workers):
    dataset = dataset_of(tmp_path, [GOOD, "", '{"conversations": [{"role": "assistant"}]}'], strict=True)
    loader = batches(dataset, batch_size=2, num_workers=num_workers)
    with pytest.raises(UserError) as caught:
        list(loader)
    assert str(caught.value).startswith(f"{dataset.rows.path}:3 cannot be trained on (no_user)")
    assert "Traceback" not in str(caught.value)


def test_rows_without_supervision_are_kept(tmp_path):
    dataset = dataset_of(tmp_path, [GOOD, {"conversations": GOOD["conversations"][:1]}], max_length=4096)
    assert dataset[1].loss_mask.sum() == 0
    assert dataset[1].replaced == ()
    assert dataset_of(tmp_path, [GOOD], max_length=8)[0].loss_mask.sum() == 0


def test_file_level_cases_load(tmp_path):
    for case in ("c09_utf8_bom", "c10_crlf_blank_lines", "c11_truncated_last_line", "c13_lone_surrogates"):
        expected = json.loads((CASES / f"{case}.expected.json").read_text("utf-8"))
        dataset = ConversationDataset(CASES / f"{case}.jsonl", TOKENIZER, "qwen", 4096, cache_dir=tmp_path)
        bad = [dataset[row].replaced for row in range(len(dataset))]
        assert len(dataset) == expected["rows"] + len(expected["bad_lines"])
        assert [r.reason for replaced in bad for r in replaced] == [b["reason"] for b in expected["bad_lines"]]
        assert all("\r" not in TOKENIZER.decode(dataset[row].input_ids[0]) for row in range(len(dataset)))


def test_too_few_rows_for_a_batch(tmp_path):
    with pytest.raises(UserError, match="holds 3 rows, too few for one batch of 2 on each of 4 ranks"):
        batches(dataset_of(tmp_path, [GOOD] * 3), batch_size=2, world_size=4)


def test_unknown_template_name(tmp_path):
    (tmp_path / "f.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(UserError, match="no chat template is named 'nope'"):
        ConversationDataset(tmp_path / "f.jsonl", TOKENIZER, "nope", 8)


def test_batches_can_be_pinned(monkeypatch, tmp_path):
    batch = next(iter(batches(dataset_of(tmp_path, [GOOD]))))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 0)
    pinned = batch.pin_memory()
    assert torch.equal(pinned.input_ids, batch.input_ids)
    assert (pinned.epoch, pinned.places) == (batch.epoch, batch.places)
