"""Where Qwen3.5's head is read from, how strictly, how it is saved, and what it demands of its target."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dloop import checkpoint
from dloop.cli import UserError
from dloop.hosts.host import ObjectiveOptions
from dloop.hosts.mtp.qwen35 import Qwen35Host
from dloop.hosts.registry import load_host, new_host, recognise
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def source(golden):
    return golden / "mtp_qwen35/checkpoint"


@pytest.fixture(scope="module")
def head(source):
    return load(source)


@pytest.fixture
def alone(head, tmp_path):
    """The head in a folder of its own."""
    folder = tmp_path / "head"
    head.save(folder, torch.float32)
    return folder


def load(folder, **options):
    return load_host(str(folder), **{"dtype": torch.float32, "device": CPU} | options)


def edit_config(folder, **changes):
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= changes
    path.write_text(json.dumps(raw))


def test_only_the_heads_tensors_are_read_from_the_targets_shards(source, monkeypatch):
    read = []
    monkeypatch.setattr("safetensors.safe_open", watching(read))
    head = load(source)
    assert isinstance(head, Qwen35Host)
    assert len(read) == 15
    assert all(name.startswith("mtp.") for name in read)
    assert recognise(str(source)) is Qwen35Host


def watching(read):
    class Watched:
        def __init__(self, *arguments):
            self.file = safe_open(*arguments)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def keys(self):
            return self.file.keys()

        def get_tensor(self, name):
            read.append(name)
            return self.file.get_tensor(name)

    return Watched


def test_a_saved_head_is_the_targets_format_and_loads_again(source, head, alone):
    stored = load_file(alone / "model.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(stored) == {name for name in index if name.startswith("mtp.")}
    config, original = (json.loads((folder / "config.json").read_text()) for folder in (alone, source))
    assert config.pop("architectures") == ["Qwen3_5MTP"]
    assert config == {name: value for name, value in original.items() if name != "architectures"}
    again = load(alone).network.state_dict()
    for name, tensor in head.network.state_dict().items():
        assert torch.equal(again[name], tensor)
    head.save(alone, torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(alone / "model.safetensors").values()} == {torch.bfloat16}
    assert load(alone).network.fc.weight.dtype == torch.float32


def test_a_head_merged_into_another_checkpoint_is_read_as_well(source, head, tmp_path):
    merged = tmp_path / "merged"
    shutil.copytree(source, merged)
    for path in merged.glob("*.safetensors"):
        tensors = load_file(path)
        changed = {name: tensor + 1 if name.startswith("mtp.") else tensor for name, tensor in tensors.items()}
        save_file(changed, path)
    for name, tensor in load(merged).network.state_dict().items():
        assert torch.equal(tensor, head.network.state_dict()[name] + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("mtp.norm.weight"), "missing norm.weight"),
        (lambda tensors: tensors.update({"mtp.extra": torch.zeros(1)}), "unexpected extra"),
        (lambda tensors: tensors.update({"mtp.norm.weight": torch.zeros(3)}), r"norm.weight is \[3\], expected \[48\]"),
        (lambda tensors: [tensors.pop(name) for name in list(tensors)], "holds no tensor mtp"),
    ],
)
def test_a_damaged_head_is_refused(alone, change, message):
    tensors = load_file(alone / "model.safetensors")
    change(tensors)
    save_file(tensors, alone / "model.safetensors")
    with pytest.raises(UserError, match=message):
        load(alone)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True"),
        ({"attn_output_gate": False}, "attn_output_gate = False"),
        ({"hidden_size": None}, "lacks hidden_size"),
    ],
)
def test_an_unknown_shape_is_refused(alone, change, message):
    edit_config(alone, **change)
    with pytest.raises(UserError, match=message):
        load(alone)


def test_a_text_only_configuration_describes_the_same_head(alone, head):
    path = alone / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())["text_config"]))
    assert load(alone).network.config == head.network.config


def test_the_wrong_target_is_refused(golden, head):
    with pytest.raises(UserError, match=r"needs a Qwen3.5 target, this one is a qwen3"):
        head.drafter(load_target(str(golden / "dflash/target"), dtype=torch.float32, device=CPU))


def test_a_target_of_another_size_is_refused(source, alone, tmp_path):
    edit_config(alone, vocab_size=200)
    with pytest.raises(UserError, match="vocabulary 200, this target has 96"):
        load(alone).check_target(load_target(str(source), dtype=torch.float32, device=CPU))


def test_from_scratch_follows_the_seed_and_the_targets_own_configuration(source):
    first, again, other = (new_host(str(source), seed=seed, dtype=torch.float32, device=CPU) for seed in (1, 1, 2))
    for name, tensor in first.network.state_dict().items():
        assert torch.equal(tensor, again.network.state_dict()[name])
        assert torch.equal(tensor, other.network.state_dict()[name]) == (tensor.ndim == 1)


def test_options_of_block_drafters_are_refused(source, head):
    target = load_target(str(source), dtype=torch.float32, device=CPU)
    with pytest.raises(UserError, match="--dloop-max-stage 2 has no effect on mtp"):
        head.objective(target, ObjectiveOptions(dloop_max_stage=2))


def test_the_checkpoint_tool_describes_it(source, capsys):
    checkpoint.main([str(source)])
    said = capsys.readouterr().out
    assert "mtp, written as Qwen3_5ForConditionalGeneration" in said
    assert "hidden size 48, vocabulary 96" in said
    assert "15, 0.04 M parameters, float32" in said
