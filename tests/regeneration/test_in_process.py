"""The target answering in this process: fixed batches, several turns, bad rows in between."""

import json

import pytest
import torch

from dloop.cli import UserError
from dloop.regeneration.dialogue import Outcome
from dloop.regeneration.in_process import LocalTarget, answer_batches, batches, random_state
from dloop.regeneration.ledger import Ledger, paths
from dloop.regeneration.sampling import Sampling
from dloop.regeneration.selection import select
from tests.regeneration.tiny_target import tiny_model
from tests.toy_tokenizer import toy_tokenizer

REFUSED = {"starts_with_assistant", "empty_answer", "think_marker"}
SAMPLING = Sampling(temperature=0.7, top_p=0.9, top_k=40, max_tokens=8)


@pytest.fixture(scope="module")
def target():
    model = tiny_model(context=200)
    model.generation_config.eos_token_id = list(range(40, 90))
    return LocalTarget(model, toy_tokenizer(), SAMPLING, "disable")


@pytest.fixture
def selection(tmp_path):
    def row(n):
        if n == 4:
            return {"conversations": [{"role": "assistant", "content": "me first"}]}
        text = "a very long question " * (30 if n == 6 else 1)
        turns = [{"role": "user", "content": f"{text} {n}.{turn}?"} for turn in range(1 + n % 3)]
        return {"id": n, "conversations": [m for t in turns for m in (t, {"role": "assistant", "content": "old"})]}

    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row(n)) for n in range(11)))
    return select(path)


def run(target, selection, output, *, done=(), batch_size=4, seed=0):
    with Ledger(output, selection, {}, resume=True) as ledger:
        ledger.write(done)
        answer_batches(target, selection, ledger, batch_size=batch_size, seed=seed, advance=lambda count: None)
    ledger.tally.check(selection.count)
    rows = [json.loads(line) for path in paths(output).values() for line in path.read_bytes().splitlines()]
    return sorted(rows, key=lambda row: row["line"])


def test_every_line_ends_once_with_answers_to_all_its_questions(target, selection, tmp_path):
    rows = run(target, selection, tmp_path / "out.jsonl")
    assert [row["line"] for row in rows] == list(range(11))
    assert (rows[4]["status"], rows[4]["error"]) == ("skipped", "starts_with_assistant")
    assert (rows[6]["status"], rows[6]["error"]) == ("error", "prompt_too_long")
    answered = [row for row in rows if row["status"] == "success"]
    assert len(answered) >= 5
    for row in answered:
        roles = [turn["role"] for turn in row["conversations"]]
        assert roles == ["user", "assistant"] * (1 + row["line"] % 3)
        assert len(row["finish_reasons"]) == len(roles) // 2
        assert all(turn["content"] != "old" for turn in row["conversations"])
    assert all(row["error"] in REFUSED for row in rows if row["status"] == "skipped")


def test_a_batch_that_was_cut_off_is_done_again_with_the_same_answers(target, selection, tmp_path):
    whole = run(target, selection, tmp_path / "a.jsonl")
    first = [Outcome(row["line"], row["status"], row) for row in whole[:6] if row["status"] != "error"]
    assert run(target, selection, tmp_path / "b.jsonl", done=first) == whole
    assert run(target, selection, tmp_path / "c.jsonl", seed=1) != whole


def test_finished_batches_are_not_answered_again(target, selection, tmp_path, monkeypatch):
    run(target, selection, tmp_path / "out.jsonl")
    asked = []
    monkeypatch.setattr(target, "outcomes", lambda batch, generator: asked.append(batch[0][0]) or [])
    with Ledger(tmp_path / "out.jsonl", selection, {}, resume=True) as ledger:
        answer_batches(target, selection, ledger, batch_size=4, seed=0, advance=lambda count: None)
    # Only the batch with the error row, which a resumed run tries again.
    assert asked == [4]


def test_batches_are_consecutive_wanted_lines(selection):
    lines = [[line for line, _ in batch] for batch in batches(select(selection.path, "2-of-2"), 2)]
    assert lines == [[1, 3], [5, 7], [9]]


def test_the_random_state_depends_on_seed_and_first_line():
    cpu = torch.device("cpu")
    states = [random_state(seed, line, cpu).initial_seed() for seed in (0, 1) for line in (0, 1)]
    assert len(set(states)) == 4
    assert states[3] == random_state(1, 1, cpu).initial_seed()


def test_a_tokenizer_without_chat_template_is_refused_at_once():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="chat template"):
        LocalTarget(tiny_model(), tokenizer, SAMPLING, "disable")
