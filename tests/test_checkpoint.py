"""The checkpoint tool: description, conversion there and back, probe, refusals."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop.checkpoint import main
from dloop.cli import UserError
from dloop.hosts.registry import load_host, new_host
from tests.training.tiny import write_config_of, write_conversations, write_target


def test_describes_a_checkpoint_in_words(golden, capsys):
    main([str(golden / "domino/draft")])
    said = capsys.readouterr().out
    for words in (
        "domino",
        "DFlashDraftModel",
        "hidden size 40, 6 layers",
        "6 drafts a stage",
        "prefix_gru",
        "strictly",
    ):
        assert words in said


@pytest.mark.parametrize("start", ["draft", "draft_specforge"])
def test_conversion_keeps_every_weight(golden, tmp_path, start):
    folder = golden / "dspark"
    there, back = tmp_path / "deepspec", tmp_path / "specforge"
    main([str(folder / start), "--convert", "deepspec", "--target", str(folder / "target"), "--output", str(there)])
    main([str(there), "--convert", "specforge", "--output", str(back)])
    original = load_file(folder / "draft" / "model.safetensors")
    for name, tensor in load_file(there / "model.safetensors").items():
        assert torch.equal(tensor, original[name]), name
    public = load_file(folder / "draft_specforge" / "model.safetensors")
    for name, tensor in load_file(back / "model.safetensors").items():
        assert torch.equal(tensor, public[name]), name
    config = json.loads((there / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert "dflash_config" not in config
    saved = json.loads((back / "config.json").read_text())
    assert saved["dflash_config"]["markov_rank"] == saved["markov_rank"] == 8


def test_refuses_what_cannot_be_converted(golden, tmp_path):
    folder = golden / "dflash"
    with pytest.raises(UserError, match="only DSpark"):
        main([str(folder / "draft"), "--convert", "specforge", "--output", str(tmp_path / "x")])
    with pytest.raises(UserError, match="needs --target"):
        main([str(golden / "dspark/draft"), "--convert", "deepspec", "--output", str(tmp_path / "x")])
    with pytest.raises(UserError, match="belong together"):
        main([str(folder / "draft"), "--convert", "specforge"])
    with pytest.raises(UserError, match="exists"):
        main([str(golden / "dspark/draft"), "--convert", "specforge", "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())


def test_probe_ranks_every_reading_of_the_loop_state(tmp_path, capsys):
    target = write_target(tmp_path / "target")
    config = write_config_of("dspark", tmp_path / "config.json")
    host = new_host(str(config), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    host.save(tmp_path / "draft", torch.float32)
    data = write_conversations(tmp_path / "data.jsonl", 6)
    main([str(tmp_path / "draft"), "--probe", "--target", str(target), "--data", str(data), "--device", "cpu"])
    said = capsys.readouterr().out
    assert all(f"N{n}P{p}" in said for n in (1, 2, 3) for p in (1, 2))
    shares = [float(line.split()[1].rstrip("%")) for line in said.splitlines() if line.startswith("  N")]
    assert shares == sorted(shares, reverse=True)


def test_old_names_of_heads_and_projector_load(golden, tmp_path):
    from safetensors.torch import save_file

    config = json.loads((golden / "domino/draft/config.json").read_text())
    config["dflash_config"]["projector_type"] = "causal_v5"
    del config["dflash_config"]["emb_dim"]
    tensors = load_file(golden / "domino/draft/model.safetensors")
    nested = ("prefix_gru", "embed_proj")
    old = {f"logit_head.{name}" if name.startswith(nested) else name: tensor for name, tensor in tensors.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(old, tmp_path / "model.safetensors")
    host = load_host(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"))
    assert host.name == "domino"
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in host.network.state_dict().items())


def test_describes_an_eagle3_draft(golden, capsys):
    main([str(golden / "eagle3/draft")])
    said = capsys.readouterr().out
    for words in (
        "eagle3",
        "LlamaForCausalLMEagle3",
        "hidden size 48",
        "160 tokens of its own",
        "the target's",
        "strictly",
    ):
        assert words in said
    with pytest.raises(UserError, match="no block drafter"):
        main([str(golden / "eagle3/draft"), "--probe", "--target", str(golden / "eagle3/target"), "--data", "x.jsonl"])


def test_a_target_without_a_head_of_its_own_is_no_draft(golden, tmp_path):
    folder = shutil.copytree(golden / "mtp_qwen35/checkpoint", tmp_path / "target")
    (folder / "model.safetensors.index.json").unlink()
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    save_file({"model.norm.weight": torch.ones(48)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"no tensor mtp\.\*"):
        main([str(folder)])
