"""What the golden training tests of the block hosts share."""

import torch

from dloop.data.loader import Batch
from dloop.hosts.host import TargetOutputs
from dloop.hosts.registry import load_host
from dloop.hosts.target_model import load_target

CPU = torch.device("cpu")


def load(folder, draft="draft"):
    """Target and draft of a golden folder, float32."""
    target = load_target(str(folder / "target"), dtype=torch.float32, device=CPU)
    return target, load_host(str(folder / draft), dtype=torch.float32, device=CPU)


def batch_of(data):
    mask = data["loss_mask"].long()
    return Batch(data["input_ids"], torch.ones_like(mask), mask, 0, tuple(range(len(mask))))


def outputs_of(host, data, **more):
    split = data["hidden_states"].chunk(len(host.taps), dim=-1)
    offsets = torch.zeros(len(data["input_ids"]), dtype=torch.long)
    return TargetOutputs(dict(zip(host.taps, split, strict=True)) | more, offsets)


def gradients(objective, total):
    objective.zero_grad()
    total.backward()
    return {name: parameter.grad for name, parameter in objective.network.named_parameters()}


def anchors_of(data):
    return data["anchor_positions"], data["block_keep_mask"].bool()


def computed_blocks(stages, anchors, kept):
    """Which blocks of the last stage are real: the kept ones of the reference, row by row, and few others."""
    window, hidden = stages[-1]
    real = window.keep_BN
    torch.testing.assert_close(real.sum(-1), kept.sum(-1))
    torch.testing.assert_close(window.position_BN[real], anchors[kept] + (len(stages) - 1) * hidden.shape[2])
    assert real.shape[1] == max(1, int(kept.sum(-1).max()))
    return real
