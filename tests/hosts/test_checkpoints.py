"""Loading, refusing and saving draft checkpoints in the public formats."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop.cli import UserError
from dloop.hosts.block.config import default_target_layers, read_block_config
from dloop.hosts.host import ObjectiveOptions
from dloop.hosts.registry import load_host, new_host, recognise
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")


def load(folder):
    return load_host(str(folder), dtype=torch.float32, device=CPU)


@pytest.fixture
def draft(golden, tmp_path):
    """A copy of the golden draft that a test may spoil; returns (folder, config, tensors)."""
    folder = tmp_path / "draft"
    shutil.copytree(golden / "dflash/draft", folder)
    return folder, json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def rewrite(folder, config=None, tensors=None):
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors")


def same_weights(host, tensors):
    state = host.network.state_dict()
    return state.keys() == tensors.keys() and all(torch.equal(state[k], tensors[k]) for k in tensors)


def test_saving_keeps_format_names_and_architecture(draft, tmp_path):
    folder, config, tensors = draft
    load(folder).save(tmp_path / "saved", torch.float32)
    again = json.loads((tmp_path / "saved/config.json").read_text())
    assert again == config
    assert same_weights(load(tmp_path / "saved"), tensors)
    load(folder).save(tmp_path / "half", torch.bfloat16)
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
    assert {t.dtype for t in load_file(tmp_path / "half/model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize("prefix", ["draft_model.", "_orig_mod.", "model.", "draft_model._orig_mod."])
def test_prefixes_of_trainers_are_stripped(draft, prefix):
    folder, _, tensors = draft
    rewrite(folder, tensors={prefix + name: tensor for name, tensor in tensors.items()})
    assert same_weights(load(folder), tensors)


def test_a_sharded_checkpoint_loads(draft):
    folder, _, tensors = draft
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert same_weights(load(folder), tensors)


def test_both_spellings_of_moved_fields_are_read(draft):
    folder, config, tensors = draft
    config["dflash_config"] |= {"block_size": config.pop("block_size")}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    del config["layer_types"]
    config |= {"target_layer_ids": None, "mask_token_id": None, "rope_scaling": None}
    rewrite(folder, config)
    host = load(folder)
    assert (host.network.config.block_size, host.network.config.rope_theta) == (8, 1e6)
    assert same_weights(host, tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["dflash_config"].update(block_size=9), "block_size"),
        (lambda c: c.update(rope_parameters={"rope_theta": 5.0}), "rope_theta"),
        (lambda c: c.update(rope_scaling={"rope_type": "yarn", "factor": 4.0}), "yarn"),
        (lambda c: c.update(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 5]), "never a feature"),
        (lambda c: c["dflash_config"].pop("mask_token_id"), "mask_token_id"),
        (lambda c: c.update(num_hidden_layers=3), "missing layers.2"),
        (lambda c: c.update(num_hidden_layers=1), "unexpected layers.1"),
        (lambda c: c.update(intermediate_size=80), "expected"),
        (lambda c: c["dflash_config"].update(projector_type="unheard_of"), "no draft of a known family"),
        (lambda c: c.update(hidden_size="wide"), "holds a value that no draft can be built from"),
        (lambda c: c.update(num_attention_heads=0, head_dim=None), "holds a value that no draft can be built from"),
        (lambda c: c.update(architectures=5), "holds a value that no draft can be built from"),
    ],
)
def test_bad_configurations_are_refused_with_a_sentence(draft, change, message):
    folder, config, _ = draft
    change(config)
    rewrite(folder, config)
    with pytest.raises(UserError, match=message):
        load(folder)


@pytest.mark.parametrize("index", ["{", "{}", "[]"])
def test_a_broken_index_is_refused_with_a_sentence(draft, index):
    folder, _, _ = draft
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(UserError, match="does not map tensors to files"):
        load(folder)


def test_an_incomplete_target_is_refused_and_not_filled_at_random(golden, tmp_path):
    folder = shutil.copytree(golden / "dflash/target", tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"hold no model\.layers\.3\.mlp\.up_proj\.weight"):
        load_target(str(folder), dtype=torch.float32, device=CPU)
    tensors["model.layers.3.mlp.up_proj.weight"] = lost[:-1]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="of the size its config"):
        load_target(str(folder), dtype=torch.float32, device=CPU)
    (folder / "model.safetensors").write_bytes((golden / "dflash/target/model.safetensors").read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot load the target"):
        load_target(str(folder), dtype=torch.float32, device=CPU)


def test_broken_files_are_refused_with_a_sentence(draft, tmp_path):
    folder, _, _ = draft
    whole = (folder / "model.safetensors").read_bytes()
    for damaged in (b"", whole[: len(whole) // 2]):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(UserError, match="cannot be read as safetensors"):
            recognise(str(folder))
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(UserError, match="safetensors"):
        load(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(UserError, match="nothing else is loaded"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load(folder)
    with pytest.raises(UserError, match=r"config\.json"):
        load(tmp_path)


def test_a_draft_of_another_target_is_refused(draft, golden):
    folder, config, _ = draft
    target = load_target(str(golden / "dflash/target"), dtype=torch.float32, device=CPU)
    for change, message in (
        ({"num_target_layers": 9}, "number of target layers 9"),
        ({"vocab_size": 152}, "vocabulary 152"),
        ({"vocab_size": None, "dflash_config": config["dflash_config"] | {"mask_token_id": 151}}, "mask token 151"),
    ):
        rewrite(folder, config | change)
        with pytest.raises(UserError, match=message):
            load(folder).drafter(target)


def test_an_option_without_effect_is_refused(golden):
    target = load_target(str(golden / "dflash/target"), dtype=torch.float32, device=CPU)
    with pytest.raises(UserError, match="--dloop-loss-weight"):
        load(golden / "dflash/draft").objective(target, ObjectiveOptions(dloop_loss_weight=0.25))


def test_from_scratch_the_weights_follow_from_the_seed(golden):
    path = str(golden / "dflash/draft/config.json")
    first, again, other = (new_host(path, seed=seed, dtype=torch.float32, device=CPU) for seed in (1, 1, 2))
    assert same_weights(first, again.network.state_dict())
    assert not same_weights(first, other.network.state_dict())
    assert torch.equal(first.network.norm.weight, torch.ones(48))
    assert float(first.network.fc.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_default_target_layers_round_half_to_even():
    assert default_target_layers(5, 36) == [1, 9, 17, 25, 33]
    assert default_target_layers(1, 36) == [18]
    assert default_target_layers(3, 9) == [1, 4, 6]


def test_absent_target_layers_take_the_default(draft):
    _, config, _ = draft
    del config["dflash_config"]["target_layer_ids"]
    assert read_block_config(config, first_draft_row=1).target_layers == (1, 3)
