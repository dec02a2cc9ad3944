"""Loading targets whose head is the embedding: a composite configuration may say so in one place alone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dloop.cli import UserError
from dloop.hosts.target_model import embedding, head, load_target


def load(folder):
    return load_target(str(folder), dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def qwen35(golden, tmp_path):
    """The golden Qwen3.5 without a head of its own, its text part silent about that."""
    folder = tmp_path / "target"
    shutil.copytree(golden / "mtp_qwen35/checkpoint", folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("lm_head.weight", None)
        save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"].pop("lm_head.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def configure(folder, tied):
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = tied
    del config["text_config"]["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_head_tied_by_the_outer_configuration_alone_is_the_embedding(qwen35):
    configure(qwen35, tied=True)
    target = load(qwen35)
    assert head(target).weight is embedding(target).weight


def test_a_head_that_is_nowhere_is_refused(qwen35):
    configure(qwen35, tied=False)
    with pytest.raises(UserError, match=r"hold no lm_head\.weight"):
        load(qwen35)
