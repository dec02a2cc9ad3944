"""The demo's untrained targets: the documented size, the same weights for the same seed, the real draft on top."""

from pathlib import Path

import pytest
import torch

from dloop.demo.architectures import ARCHITECTURES, new_target
from dloop.hosts.checkpoint_files import read_config
from dloop.hosts.mtp.qwen35_config import read_qwen35_config
from dloop.hosts.registry import new_host
from dloop.hosts.target_model import embedding, head

DRAFTS = Path("config/demo-drafts")


@pytest.mark.parametrize(("name", "parameters"), [("qwen3", 1_510_528), ("qwen3.5", 761_208), ("gemma4", 940_776)])
def test_a_new_target_has_its_documented_size_and_follows_the_seed(name, parameters):
    model, again = (new_target(name, 1024, eos=2, pad=0, seed=0) for _ in range(2))
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert head(model).weight.data_ptr() == embedding(model).weight.data_ptr()
    for ours, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_draft_configuration_of_the_qwen35_demo_is_its_targets_own(tmp_path):
    model = new_target("qwen3.5", 1024, eos=2, pad=0, seed=0)
    ARCHITECTURES["qwen3.5"].save(model, tmp_path)
    stored, asked = (read_qwen35_config(read_config(path)) for path in (tmp_path, DRAFTS / "mtp-qwen3.5.json"))
    assert asked == stored
    host = new_host(str(DRAFTS / "mtp-qwen3.5.json"), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    host.check_target(model)


def test_the_assistant_of_the_gemma4_demo_fits_its_target():
    model = new_target("gemma4", 1024, eos=2, pad=0, seed=0)
    host = new_host(str(DRAFTS / "mtp-gemma4.json"), seed=0, dtype=torch.float32, device=torch.device("cpu"))
    host.check_target(model)
    kinds = host.network.config.get_text_config().layer_types
    assert set(kinds) == set(model.config.get_text_config().layer_types)
