"""The train stage with a Gemma 4 assistant on a tiny target of the real architecture."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dloop.cli import UserError
from dloop.hosts.registry import load_host
from dloop.train import Options
from tests.test_train import ALONE, draft_bytes, kill_after_step, manifest, run_here
from tests.toy_tokenizer import toy_tokenizer
from tests.training.tiny import VOCAB, write_conversations

TABLE = "model.embed_tokens.weight"


def write_gemma4_pair(folder: Path, golden: Path) -> None:
    """The golden pair's configurations with the toy tokenizer's vocabulary: a random target, an assistant's config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    for part in ("target", "assistant"):
        config = json.loads((golden / "mtp_gemma4" / part / "config.json").read_text())
        config["text_config"] |= {"vocab_size": VOCAB, "initializer_range": 0.2}
        (folder / part).mkdir()
        (folder / part / "config.json").write_text(json.dumps(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "target"))
    target.save_pretrained(folder / "target")
    toy_tokenizer().save_pretrained(folder / "target")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, golden) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    write_gemma4_pair(folder, golden)
    write_conversations(folder / "data.jsonl", 16)
    return folder


@pytest.fixture(scope="module")
def recipe(inputs) -> Options:
    return Options(
        target_model_path=str(inputs / "target"),
        train_data_path=inputs / "data.jsonl",
        output_dir=Path("nowhere"),
        draft_config=str(inputs / "assistant"),
        ttt_length_dist=(1, 2, 4),
        dataloader_num_workers=0,
        num_epochs=2,
        batch_size=2,
        learning_rate=4e-3,
        log_interval=4,
        save_interval=5,
    )


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory) -> Path:
    return run_here(recipe, tmp_path_factory.mktemp("run") / "run")


def test_learns_and_saves_what_loads_here_and_in_the_library(finished, inputs):
    from transformers import AutoModelForCausalLM

    host = load_host(str(finished / "final"), dtype=torch.float32, device=ALONE.device)
    peer = AutoModelForCausalLM.from_pretrained(finished / "final", dtype=torch.float32)
    ours, theirs = host.network.state_dict(), peer.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert json.loads((finished / "final/config.json").read_text()) == json.loads(
        (inputs / "assistant/config.json").read_text()
    )
    assert manifest(finished)["host"] == "mtp"
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["unroll/cross_entropy/1"] < lines[0]["unroll/cross_entropy/1"]
    assert any("unroll/accuracy/4" in line for line in lines)


def test_after_a_kill_ends_in_the_same_assistant(recipe, finished, tmp_path):
    folder = tmp_path / "run"
    kill_after_step(replace(recipe, output_dir=folder), 8)
    assert draft_bytes(run_here(recipe, folder)) == draft_bytes(finished)


def test_remembered_states_train_the_same_assistant(recipe, finished, tmp_path):
    folder = run_here(recipe, tmp_path / "run", remember_target_states=True, max_steps=4)
    other = run_here(recipe, tmp_path / "other", max_steps=4)
    ours, theirs = (load_file(run / "final" / "model.safetensors") for run in (folder, other))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-4)


def test_a_released_assistant_keeps_its_table(recipe, finished, tmp_path):
    start = {"draft_config": None, "ckpt_dir": str(finished / "final")}
    folder = run_here(recipe, tmp_path / "run", max_steps=2, **start)
    before, after = (load_file(run / "final" / "model.safetensors") for run in (finished, folder))
    scales = {name for name in before if name.endswith("layer_scalar")}
    assert {name for name in before if torch.equal(before[name], after[name])} == {TABLE} | scales


def test_a_start_of_the_wrong_kind_is_refused(recipe, finished, tmp_path):
    wrong = replace(recipe, draft_config=None, draft_init_path=str(finished / "final"))
    with pytest.raises(UserError, match="start from it with --ckpt-dir"):
        run_here(wrong, tmp_path / "run")
