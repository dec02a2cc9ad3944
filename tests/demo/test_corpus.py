import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dloop.cli import UserError
from dloop.data.conversations import normalise
from dloop.demo.corpus import DOMAINS, Options, draw, write_corpus

SETS = ("heldout", "prompts", "target_train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("corpus")
    write_corpus(Options(output_dir=path))
    return path


def _rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _first_questions(folder: Path, name: str) -> list[str]:
    if name == "benchmarks":
        return [row["turns"][0] for domain in DOMAINS for row in _rows(folder / "benchmarks" / f"{domain}.jsonl")]
    messages = (normalise(row) for row in _rows(folder / f"{name}.jsonl"))
    return [next(message["content"] for message in turns if message["role"] == "user") for turns in messages]


def test_the_domains_are_the_eight_benchmarks():
    from dloop.data.benchmarks import BENCHMARKS

    assert list(DOMAINS) == list(BENCHMARKS)


def test_no_question_is_in_two_sets_or_twice_in_one(folder):
    questions = [text for name in ("benchmarks", *SETS) for text in _first_questions(folder, name)]
    assert len(questions) == len(set(questions)) == 8 * 8 + 192 + 1200 + 8000


def test_every_domain_has_its_share(folder):
    for name, share in zip(SETS, (24, 150, 1000), strict=True):
        domains = [row["id"].split("/")[0] for row in _rows(folder / f"{name}.jsonl")]
        assert {domain: domains.count(domain) for domain in DOMAINS} == dict.fromkeys(DOMAINS, share)


def test_there_are_many_more_conversations_than_are_drawn():
    drawn = 8 + 24 + 150 + 1000
    for patterns in DOMAINS.values():
        for pattern in patterns:
            assert pattern.size >= 10 * drawn / len(patterns), pattern.write.__name__


@pytest.mark.parametrize("domain", DOMAINS)
def test_the_first_question_decides_the_conversation(domain):
    for pattern in DOMAINS[domain]:
        numbers = range(0, pattern.size, 7)
        conversations = [pattern.conversation(number) for number in numbers]
        assert len({turns[0][0] for turns in conversations}) == len(numbers)


def test_the_same_seed_gives_the_same_files_and_another_seed_others(folder, tmp_path):
    write_corpus(Options(output_dir=tmp_path / "same"))
    write_corpus(Options(output_dir=tmp_path / "other", seed=1))
    for path in folder.rglob("*.jsonl"):
        name = path.relative_to(folder)
        assert path.read_bytes() == (tmp_path / "same" / name).read_bytes()
        assert path.read_bytes() != (tmp_path / "other" / name).read_bytes()


def test_evaluation_prompts_do_not_depend_on_the_size_of_the_training_set(folder, tmp_path):
    write_corpus(Options(output_dir=tmp_path, conversations=80))
    for domain in DOMAINS:
        name = Path("benchmarks") / f"{domain}.jsonl"
        assert (folder / name).read_bytes() == (tmp_path / name).read_bytes()


def test_half_of_the_training_conversations_carry_the_system_prompt_of_the_drafts(folder):
    from dloop.data.chat_template import TEMPLATES

    first = [row["conversations"][0] for row in _rows(folder / "target_train.jsonl")]
    systems = [message["content"] for message in first if message["role"] == "system"]
    assert len(systems) == len(first) / 2
    assert set(systems) == {TEMPLATES["qwen"].system_prompt}


def test_texts_are_plain_and_numbers_small(folder):
    for name in SETS:
        messages = (message for row in _rows(folder / f"{name}.jsonl") for message in row["conversations"])
        text = "\n".join(message["content"] for message in messages)
        assert re.fullmatch(r"[\x20-\x7e\n]*", text)
        assert not re.search(r"\d\d\d|[5-9]\d", text)


def test_more_conversations_than_there_are_is_refused():
    with pytest.raises(UserError, match="fewer --conversations"):
        draw("alpaca", replace(Options(output_dir=Path()), conversations=10_000_000))
