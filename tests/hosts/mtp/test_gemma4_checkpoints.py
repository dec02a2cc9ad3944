"""Gemma 4 assistants as files: strict loading, saving that the library reads too, refusals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop.cli import UserError
from dloop.hosts.registry import load_host, new_host
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")


@pytest.fixture
def assistant(golden, tmp_path):
    """A copy of the golden assistant that a test may spoil; returns (folder, config, tensors)."""
    folder = tmp_path / "assistant"
    shutil.copytree(golden / "mtp_gemma4/assistant", folder)
    return folder, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def target(golden):
    return load_target(str(golden / "mtp_gemma4/target"), dtype=torch.float32, device=CPU)


def rewrite(folder, config=None, tensors=None):
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


def load(folder, dtype=torch.float32):
    return load_host(str(folder), dtype=dtype, device=CPU)


def test_saving_keeps_configuration_keys_and_generation_settings(assistant, tmp_path):
    folder, config, tensors = assistant
    load(folder).save(tmp_path / "saved", torch.float32)
    assert json.loads((tmp_path / "saved/config.json").read_text()) == config
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert json.loads((tmp_path / "saved/generation_config.json").read_text()) == generation
    assert load(tmp_path / "saved").name == "mtp"


def test_half_precision_spares_the_rotary_frequencies(assistant, tmp_path):
    folder, _, _ = assistant
    host = load(folder, torch.bfloat16)
    assert {parameter.dtype for parameter in host.network.parameters()} == {torch.bfloat16}
    exact = load(folder).network.model.rotary_emb.full_attention_inv_freq
    assert torch.equal(host.network.model.rotary_emb.full_attention_inv_freq, exact)
    host.save(tmp_path / "half", torch.bfloat16)
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}


def test_the_library_reads_a_saved_assistant_and_drafts_the_same_text(assistant, target, golden, tmp_path):
    from transformers import AutoModelForCausalLM

    load(assistant[0]).save(tmp_path / "saved", torch.float32)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert peer.generation_config.num_assistant_tokens == 6
    case = json.loads((golden / "mtp_gemma4/traces.json").read_text())[0]
    ids = torch.tensor([case["prompt"]])
    answer = target.generate(ids, assistant_model=peer, do_sample=False, max_new_tokens=64, eos_token_id=None)
    assert answer[0, ids.shape[1] :].tolist() == case["greedy"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.2.self_attn.q_norm.weight"), "missing model.layers.2"),
        (lambda tensors: tensors.pop("model.embed_tokens.weight"), "missing lm_head.weight; missing model.embed"),
        (lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(2)}), "unexpected"),
        (lambda tensors: tensors.update({"pre_projection.weight": torch.ones(32, 95)}), r"expected \[32, 96\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(assistant, change, message):
    folder, _, tensors = assistant
    change(tensors)
    rewrite(folder, tensors=tensors)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_configuration_the_library_refuses_is_one_message(assistant):
    folder, config, _ = assistant
    config["text_config"]["layer_types"][0] = "unheard_of"
    rewrite(folder, config)
    with pytest.raises(UserError, match=r"cannot build a gemma4_unified_assistant.*unheard_of"):
        load(folder)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hidden_size", 64, "hidden size 48, this target has 64"),
        ("model_type", "qwen3", "needs a Gemma 4 target, this one is a qwen3"),
    ],
)
def test_another_target_is_refused(assistant, target, monkeypatch, field, value, message):
    host = load(assistant[0])
    monkeypatch.setattr(target.config.get_text_config(), field, value)
    with pytest.raises(UserError, match=message):
        host.check_target(target)


def test_heads_unlike_the_targets_are_refused(assistant, target):
    folder, config, _ = assistant
    config["text_config"]["num_key_value_heads"] = 4
    rewrite(folder, config)
    with pytest.raises(UserError, match=r"\(sliding_attention\) \(4, 16\), this target has \(2, 16\)"):
        load(folder).check_target(target)


class TestFromScratch:
    def test_weights_follow_from_the_seed_and_the_folder_loads_again(self, golden, target, tmp_path):
        path = str(golden / "mtp_gemma4/assistant/config.json")
        first, again, other = (new_host(path, seed=seed, dtype=torch.float32, device=CPU) for seed in (1, 1, 2))
        weights = [host.network.pre_projection.weight for host in (first, again, other)]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
        first.check_target(target)
        first.save(tmp_path / "new", torch.float32)
        assert torch.equal(load(tmp_path / "new").network.pre_projection.weight, weights[0])

    def test_an_order_of_tokens_cannot_be_made_up(self, assistant):
        folder, config, _ = assistant
        rewrite(folder, config | {"use_ordered_embeddings": True})
        with pytest.raises(UserError, match="ordered embeddings cannot start from scratch"):
            new_host(str(folder), seed=0, dtype=torch.float32, device=CPU)
