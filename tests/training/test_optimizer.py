"""The schedule against its formula, the optimizer against torch's own on float32 copies."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dloop.training.optimizer import MasterAdamW, learning_rate


class TestSchedule:
    def test_of_the_paper(self):
        """22202 steps, 4 % of them warm up: linear to the peak, then half a cosine."""
        rate = [learning_rate(s, peak=6e-4, total_steps=22_202, warmup_ratio=0.04) for s in range(22_202)]
        assert rate[0] == pytest.approx(6e-4 / 888)
        assert rate[443] == pytest.approx(3e-4)
        assert rate[887] == rate[888] == pytest.approx(6e-4)
        assert rate[888 + (22_202 - 888) // 2] == pytest.approx(3e-4)
        assert 0 < rate[-1] < 1e-11

    @given(st.integers(1, 300), st.floats(0, 1))
    def test_rises_then_falls_and_never_leaves_its_range(self, total, ratio):
        rates = [learning_rate(s, peak=1.0, total_steps=total, warmup_ratio=ratio) for s in range(total)]
        warmup = int(ratio * total)
        assert all(0 < rate <= 1 for rate in rates)
        assert rates[:warmup] == sorted(rates[:warmup])
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)

    def test_without_warmup_starts_at_the_peak(self):
        assert learning_rate(0, peak=0.5, total_steps=3, warmup_ratio=0.0) == 0.5


def network(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(6, 5).to(dtype)


def give_gradients(module: nn.Module, step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


class TestMasterAdamW:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_adamw_on_float32_copies(self, dtype):
        module = network(dtype)
        oracle = [parameter.detach().float().clone().requires_grad_() for parameter in module.parameters()]
        plain = torch.optim.AdamW(oracle, lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        ours = MasterAdamW(module.parameters(), max_grad_norm=1.0)
        for step in range(5):
            give_gradients(module, step)
            for copy, parameter in zip(oracle, module.parameters(), strict=True):
                copy.grad = parameter.grad.float().clone()
            norm = math.sqrt(sum(copy.grad.square().sum().item() for copy in oracle))
            for copy in oracle:
                copy.grad *= min(1.0, 1.0 / (norm + 1e-6))
            plain.param_groups[0]["lr"] = 0.1 / (step + 1)
            plain.step()
            assert ours.step(0.1 / (step + 1)).item() == pytest.approx(norm, rel=1e-5)
            for copy, parameter in zip(oracle, module.parameters(), strict=True):
                torch.testing.assert_close(parameter, copy.to(dtype))
                assert parameter.grad is None

    def test_float32_parameters_have_no_copies(self):
        module = network(torch.float32)
        ours = MasterAdamW(module.parameters(), max_grad_norm=1.0)
        assert all(master is parameter for master, parameter in zip(ours.masters, module.parameters(), strict=True))
        assert ours.state_dict()["masters"] == []

    def test_tiny_updates_survive_in_the_masters(self):
        """A bfloat16 weight of 1 cannot take a step of 1e-3; its master can, and 10 of them show."""
        parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        ours = MasterAdamW([parameter], max_grad_norm=1.0)
        for _ in range(10):
            parameter.grad = torch.ones_like(parameter)
            ours.step(1e-3)
        assert ours.masters[0].item() == pytest.approx(0.99, abs=1e-4)
        assert parameter.item() == pytest.approx(0.99, abs=2e-3)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_restored_state_goes_on_bit_for_bit(self, dtype, tmp_path):
        module = network(dtype)
        ours = MasterAdamW(module.parameters(), max_grad_norm=1.0)
        for step in range(3):
            give_gradients(module, step)
            ours.step(0.1)
        torch.save(ours.state_dict(), tmp_path / "state.pt")
        copy = network(dtype)
        if dtype == torch.float32:
            copy.load_state_dict(module.state_dict())
        restored = MasterAdamW(copy.parameters(), max_grad_norm=1.0)
        restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for optimizer, owner in ((ours, module), (restored, copy)):
            give_gradients(owner, 3)
            optimizer.step(0.1)
        assert all(torch.equal(a, b) for a, b in zip(module.parameters(), copy.parameters(), strict=True))

    def test_frozen_parameters_are_left_alone(self):
        module = network(torch.float32)
        module.bias.requires_grad_(False)
        assert len(MasterAdamW(module.parameters(), max_grad_norm=1.0).parameters) == 1

    def test_a_parameter_outside_the_loss_is_named_as_the_fault(self):
        ours = MasterAdamW(network(torch.bfloat16).parameters(), max_grad_norm=1.0)
        with pytest.raises(AssertionError, match="connected to every parameter"):
            ours.step(0.1)
