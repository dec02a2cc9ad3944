"""The command from corpus to a folder that every stage can open; two steps of the real size."""

import json

import pytest
import torch

from dloop.cli import UserError
from dloop.demo.tiny_target import Options, read_rows, train_target


def _options(corpus, tokenizer_folder, output_dir, **changes) -> Options:
    paths = {"corpus": corpus / "target_train.jsonl", "heldout": corpus / "heldout.jsonl"}
    settings = {"steps": 2, "batch_size": 2, "check_quality": False} | changes
    return Options(**paths, tokenizer=tokenizer_folder, output_dir=output_dir, **settings)


@pytest.fixture(scope="module")
def folder(corpus, tokenizer_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("target") / "target"
    train_target(_options(corpus, tokenizer_folder, output))
    return output


def test_the_folder_is_complete(folder):
    from dloop.hosts.target_model import load_target, load_tokenizer

    model = load_target(str(folder), dtype=torch.float32, device=torch.device("cpu"))
    tokenizer = load_tokenizer(str(folder))
    assert model.config.model_type == "qwen3"
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.eos_token_id == 2
    assert not list(folder.parent.glob(".*"))


def test_a_qwen35_target_is_written_as_the_real_ones_are(corpus, tokenizer_folder, tmp_path):
    from safetensors.torch import load_file

    from dloop.hosts.target_model import load_target

    output = tmp_path / "target"
    train_target(_options(corpus, tokenizer_folder, output, architecture="qwen3.5"))
    assert json.loads((output / "config.json").read_text())["model_type"] == "qwen3_5"
    stored = load_file(output / "model.safetensors")
    assert all(name.startswith("model.language_model.") for name in stored)
    model = load_target(str(output), dtype=torch.float32, device=torch.device("cpu"))
    assert model.generation_config.eos_token_id == [2, 0]
    for name, tensor in model.model.state_dict().items():
        assert torch.equal(tensor, stored[f"model.language_model.{name}"])
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert json.loads((output / "training.json").read_text())["recipe"]["architecture"] == "qwen3.5"


def test_a_gemma4_target_is_written_as_the_real_ones_are(corpus, tokenizer_folder, tmp_path):
    from safetensors.torch import load_file

    from dloop.hosts.target_model import decoder, load_target

    output = tmp_path / "target"
    train_target(_options(corpus, tokenizer_folder, output, architecture="gemma4"))
    assert json.loads((output / "config.json").read_text())["model_type"] == "gemma4_unified"
    stored = load_file(output / "model.safetensors")
    assert "lm_head.weight" not in stored
    assert {name.split(".")[1] for name in stored} == {
        *("language_model", "vision_embedder", "embed_vision", "embed_audio")
    }
    model = load_target(str(output), dtype=torch.float32, device=torch.device("cpu"))
    assert model.generation_config.eos_token_id == [2, 0]
    for name, tensor in decoder(model).state_dict().items():
        assert torch.equal(tensor, stored[f"model.language_model.{name}"])


def test_the_facts_of_the_training_are_kept(folder):
    facts = json.loads((folder / "training.json").read_text())
    assert facts["recipe"]["steps"] == 2
    assert facts["losses"][-1][0] == 2
    assert facts["padded_tokens"] > 0
    assert set(facts["heldout"]["domains"]) >= {"gsm8k", "alpaca", "mt-bench"}


def test_a_target_that_has_not_learnt_is_refused_and_nothing_is_written(corpus, tokenizer_folder, tmp_path):
    options = _options(corpus, tokenizer_folder, tmp_path / "target", check_quality=True)
    with pytest.raises(UserError, match="more --steps"):
        train_target(options)
    assert not options.output_dir.exists()


def test_rows_carry_their_domain_and_no_inserted_system_prompt(corpus, tokenizer_folder):
    from dloop.hosts.target_model import load_tokenizer

    tokenizer = load_tokenizer(str(tokenizer_folder))
    rows = read_rows(corpus / "heldout.jsonl", tokenizer)
    assert len(rows) == 16
    assert len({row.domain for row in rows}) == 8
    assert all(tokenizer.decode(row.ids).startswith("<|im_start|>user\n") for row in rows)


def test_a_bad_row_is_refused_with_its_line(tmp_path, tokenizer_folder):
    from dloop.hosts.target_model import load_tokenizer

    path = tmp_path / "bad.jsonl"
    path.write_text('{"id": "gsm8k/1", "conversations": []}\n')
    with pytest.raises(UserError, match="line 1: empty_conversations"):
        read_rows(path, load_tokenizer(str(tokenizer_folder)))
