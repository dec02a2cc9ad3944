"""EAGLE-3 checkpoints: both file formats, aliases, maps, refusals, saving; the draft's vocabulary."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop.cli import UserError
from dloop.hosts.eagle3.config import read_eagle3_config
from dloop.hosts.eagle3.vocabulary import frequent_tokens, vocabulary_maps
from dloop.hosts.registry import load_host, new_host, recognise
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")


def load(folder):
    return load_host(str(folder), dtype=torch.float32, device=CPU)


@pytest.fixture
def draft(golden, tmp_path):
    """A copy of the golden draft that a test may spoil; returns (folder, config, tensors)."""
    folder = tmp_path / "draft"
    shutil.copytree(golden / "eagle3/draft", folder)
    return folder, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def rewrite(folder, config=None, tensors=None):
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


def same(host, tensors):
    state = host.network.state_dict()
    return state.keys() == tensors.keys() and all(torch.equal(state[name], tensors[name]) for name in tensors)


def test_saving_keeps_format_names_and_maps(draft, tmp_path):
    folder, config, tensors = draft
    host = load(folder)
    assert host.name == "eagle3"
    assert recognise(str(folder)) is type(host)
    host.save(tmp_path / "saved", torch.float32)
    assert json.loads((tmp_path / "saved/config.json").read_text()) == config
    assert same(load(tmp_path / "saved"), tensors)
    host.save(tmp_path / "half", torch.bfloat16)
    half = load_file(tmp_path / "half/model.safetensors")
    assert {name: tensor.dtype for name, tensor in half.items() if not tensor.is_floating_point()} == {
        "d2t": torch.int64,
        "t2d": torch.bool,
    }
    assert not any("embed" in name for name in half)


def test_eagle_s_own_file_with_its_names_loads(draft):
    folder, config, tensors = draft
    (folder / "model.safetensors").unlink()
    config |= {"architectures": ["LlamaForCausalLM"]}
    rewrite(folder, config)
    old = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    old["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    torch.save(old, folder / "pytorch_model.bin")
    assert same(load(folder), tensors)
    assert recognise(str(folder)).name == "eagle3"


@pytest.mark.parametrize("prefix", ["model.", "draft_model."])
def test_prefixes_are_stripped(draft, prefix):
    folder, _, tensors = draft
    rewrite(folder, tensors={prefix + name: tensor for name, tensor in tensors.items()})
    assert same(load(folder), tensors)


def test_code_in_a_pickled_file_is_not_run(draft, tmp_path):
    folder, _, _ = draft
    (folder / "model.safetensors").unlink()

    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    torch.save({"fc.weight": Trap()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="nothing else is loaded"):
        load(folder)
    assert not (tmp_path / "sprung").exists()
    torch.save({"weights": {"fc.weight": torch.ones(2)}}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="no flat table"):
        load(folder)


def test_an_embedding_of_its_own_is_used_and_kept(draft, golden, tmp_path):
    folder, _, tensors = draft
    target = load_target(str(golden / "eagle3/target"), dtype=torch.float32, device=CPU)
    own = torch.randn(320, 48)
    rewrite(folder, tensors=tensors | {"embed_tokens.weight": own})
    host = load(folder)
    assert torch.equal(host.drafter(target).embed.weight, own)
    assert not host.network.embed_tokens.weight.requires_grad
    host.save(tmp_path / "saved", torch.float32)
    assert same(load(tmp_path / "saved"), tensors | {"embed_tokens.weight": own})
    borrowed = load(golden / "eagle3/draft").drafter(target)
    assert borrowed.embed is target.get_input_embeddings()


def test_a_whole_vocabulary_needs_no_maps(draft):
    folder, config, tensors = draft
    tensors["lm_head.weight"] = torch.randn(320, 48)
    del tensors["d2t"], tensors["t2d"], config["draft_vocab_size"]
    rewrite(folder, config, tensors)
    network = load(folder).network
    assert network.target_ids.tolist() == list(range(320))
    assert network.t2d.all()


def test_both_spellings_of_fields_are_read(draft):
    _, config, _ = draft
    plain = read_eagle3_config(config)
    assert (plain.head_dim, plain.target_hidden_size, plain.rope_theta) == (16, 48, 1e6)
    moved = dict(config)
    moved["rope_parameters"] = {"rope_type": "default", "rope_theta": moved.pop("rope_theta")}
    assert read_eagle3_config(moved) == plain
    del moved["head_dim"]
    assert read_eagle3_config(moved) == replace(plain, head_dim=12)
    named = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}}
    assert read_eagle3_config(named).taps(8) == ("layers.0", "layers.2", "layers.5")
    whole = config | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 7]}}
    assert read_eagle3_config(whole).taps(8)[-1] == "layers.7", "the raw output of the last layer, before the norm"
    assert plain.taps(36) == ("layers.1", "layers.17", "layers.32")


def test_optional_norms_load(draft):
    folder, config, tensors = draft
    config |= {"fc_norm": True, "norm_output": False}
    norms = {f"fc_norm.{place}.weight": torch.rand(48) + 0.5 for place in range(3)}
    rewrite(folder, config, tensors | norms)
    network = load(folder).network
    features = torch.randn(5, 144)
    parts = [
        torch.nn.functional.rms_norm(part, (48,), norms[f"fc_norm.{place}.weight"], 1e-6)
        for place, part in enumerate(features.chunk(3, -1))
    ]
    torch.testing.assert_close(network.fuse(features), torch.cat(parts, -1) @ tensors["fc.weight"].T)
    states = torch.randn(2, 48)
    torch.testing.assert_close(network.logits(states), states @ tensors["lm_head.weight"].T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "has one"),
        ({"hidden_act": "gelu"}, "only 'silu'"),
        ({"attention_bias": True}, "have none"),
        ({"draft_vocab_size": 400}, "more than the target's vocabulary"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'llama3'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "fuses 3"),
        ({"head_dim": 8}, "do not fit its configuration"),
        ({"intermediate_size": None}, "lacks intermediate_size"),
    ],
)
def test_configurations_that_cannot_be_are_refused(draft, changes, message):
    folder, config, _ = draft
    rewrite(folder, config | changes)
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["fc.weight", "d2t", "midlayer.hidden_norm.weight"])
def test_a_missing_tensor_is_named(draft, name):
    folder, _, tensors = draft
    del tensors[name]
    rewrite(folder, tensors=tensors)
    with pytest.raises(UserError, match=f"missing {name}"):
        load(folder)


def test_maps_that_contradict_each_other_are_refused(draft):
    folder, _, tensors = draft
    tensors["d2t"][5] += 1
    rewrite(folder, tensors=tensors)
    with pytest.raises(UserError, match="contradict"):
        load(folder)


def test_targets_of_another_size_are_refused(draft, golden):
    host = load(draft[0])
    with pytest.raises(UserError, match="vocabulary 320, this target has 151"):
        host.check_target(load_target(str(golden / "dflash/target"), dtype=torch.float32, device=CPU))
    with pytest.raises(UserError, match="target layers"):
        host.network.config.taps(3)


def test_a_vocabulary_from_counts():
    counts = torch.tensor([0, 5, 5, 0, 9, 1, 0])
    assert frequent_tokens(counts, 3).tolist() == [1, 2, 4]
    assert frequent_tokens(counts, 2).tolist() == [1, 4], "of equal counts the lower id"
    assert frequent_tokens(counts, 6).tolist() == [0, 1, 2, 3, 4, 5], "unseen ids from 0 upward"
    d2t, t2d = vocabulary_maps(torch.tensor([1, 2, 4]), 7)
    assert d2t.tolist() == [1, 1, 2]
    assert t2d.nonzero()[:, 0].tolist() == [1, 2, 4]


def test_from_scratch_the_vocabulary_comes_from_the_data(draft):
    folder, config, _ = draft
    del config["draft_vocab_size"]
    config["vocab_size"] = 40_000
    rewrite(folder, config)
    host = new_host(str(folder), seed=0, dtype=torch.float32, device=CPU)
    assert host.raw["draft_vocab_size"] == 32_000
    asked = []
    host.adopt_vocabulary(lambda size: (asked.append(size), torch.arange(size))[1])
    assert asked == [40_000]
    assert host.network.target_ids[[0, -1]].tolist() == [8_000, 39_999]
    assert int(host.network.t2d.sum()) == 32_000
