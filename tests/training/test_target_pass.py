"""The target's states in training: the same as from a full forward, at any offset, with any padding."""

import pytest
import torch
from safetensors.torch import load_file

from dloop.data.loader import Batch
from dloop.hosts.target_model import load_target
from dloop.training.target_pass import FrozenTarget, early_exit, layers_needed, position_offset
from tests.training.scripted import LAYERS, ScriptedTarget
from tests.training.tiny import VOCAB, write_target

CPU = torch.device("cpu")


def batch_of(ids_BS: torch.Tensor, lengths: list[int], epoch: int = 0) -> Batch:
    mask = (torch.arange(ids_BS.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return Batch(ids_BS * mask, mask, mask, epoch, tuple(range(len(lengths))))


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return load_target(str(write_target(tmp_path_factory.mktemp("target"))), dtype=torch.float32, device=CPU)


@pytest.fixture(scope="module")
def ids_BS():
    return torch.randint(VOCAB, (2, 20), generator=torch.Generator().manual_seed(3))


class TestLayersNeeded:
    def test_up_to_the_last_tapped_one(self):
        assert layers_needed(["layers.1", "layers.33", "layers.9"]) == 34

    def test_all_for_the_final_norm(self):
        assert layers_needed(["layers.1", "norm"]) is None

    def test_none_for_the_embedding(self):
        assert layers_needed(["embed_tokens"]) == 0


class TestEarlyExit:
    def test_runs_no_layer_behind_the_last_tap(self):
        target = ScriptedTarget()
        passes = FrozenTarget(target, ["layers.1"])
        passes(batch_of(torch.ones(1, 4, dtype=torch.int64), [4]), [4])
        assert target.decoder.layers_run == 2
        assert target.decoder.config.num_hidden_layers == LAYERS

    def test_restores_the_configuration_after_an_error(self):
        stack = ScriptedTarget().decoder
        with pytest.raises(ValueError, match="inside"), early_exit(stack, 1):
            raise ValueError("inside")
        assert stack.config.num_hidden_layers == LAYERS


class TestStates:
    def test_equal_the_hidden_states_of_a_full_forward(self, target, ids_BS):
        with torch.no_grad():
            full = target(input_ids=ids_BS, output_hidden_states=True).hidden_states
        outputs = FrozenTarget(target, ["layers.0", "layers.2"])(batch_of(ids_BS, [20, 20]), [20, 20])
        assert list(outputs.states) == ["layers.0", "layers.2"]
        assert torch.equal(outputs.states["layers.0"], full[1])
        assert torch.equal(outputs.states["layers.2"], full[3])
        assert outputs.position_offset_B.tolist() == [0, 0]

    def test_the_final_norm_can_be_tapped(self, target, ids_BS):
        with torch.no_grad():
            full = target(input_ids=ids_BS, output_hidden_states=True).hidden_states
        outputs = FrozenTarget(target, ["norm"])(batch_of(ids_BS, [20, 20]), [20, 20])
        assert torch.equal(outputs.states["norm"], full[-1])

    def test_carry_no_gradient_but_can_enter_a_graph(self, target, ids_BS):
        state = FrozenTarget(target, ["layers.0"])(batch_of(ids_BS, [20, 20]), [20, 20]).states["layers.0"]
        assert not state.requires_grad
        weight = torch.ones(state.shape[-1], requires_grad=True)
        (state * weight).sum().backward()
        assert weight.grad is not None

    def test_padding_changes_no_row(self, target, ids_BS):
        passes = FrozenTarget(target, ["layers.2"])
        together = passes(batch_of(ids_BS, [20, 13]), [20, 13]).states["layers.2"]
        alone = passes(batch_of(ids_BS[1:, :13], [13]), [13]).states["layers.2"]
        torch.testing.assert_close(together[1:, :13], alone, rtol=0, atol=1e-5)

    def test_offsets_shift_the_rotary_positions_alone(self, target, ids_BS):
        """Attention sees distances only, so a shifted row has the same states up to rounding."""
        lengths = [20, 13]
        batch = batch_of(ids_BS, lengths)
        still = FrozenTarget(target, ["layers.2"])(batch, lengths).states["layers.2"]
        moved = FrozenTarget(target, ["layers.2"], seed=5, position_offset_max=400)(batch, lengths)
        first, second = moved.position_offset_B.tolist()
        assert first != second
        torch.testing.assert_close(moved.states["layers.2"], still, rtol=0, atol=2e-3)

    def test_remembered_rows_equal_fresh_ones_and_cost_no_forward(self, target, ids_BS):
        batch = batch_of(ids_BS, [20, 13])
        frozen = FrozenTarget(target, ["layers.0", "layers.2"], remember=True)
        expected = FrozenTarget(target, ["layers.0", "layers.2"])(batch, [20, 13]).states
        first = frozen(batch, [20, 13]).states
        frozen.decoder = None
        again = frozen(batch, [20, 13]).states
        for name, states in expected.items():
            assert torch.equal(again[name], first[name])
            for row, length in enumerate([20, 13]):
                torch.testing.assert_close(first[name][row, :length], states[row, :length])

    def test_equal_the_golden_features(self, golden):
        """Features stored with the reference implementation's training batch."""
        fixture = load_file(golden / "dflash" / "train.safetensors")
        target = load_target(str(golden / "dflash" / "target"), dtype=torch.float32, device=CPU)
        rows, length = fixture["input_ids"].shape
        outputs = FrozenTarget(target, ["layers.1", "layers.3"])(
            batch_of(fixture["input_ids"], [length] * rows), [length] * rows
        )
        features = torch.cat(list(outputs.states.values()), dim=-1)
        torch.testing.assert_close(features, fixture["hidden_states"], rtol=0, atol=1e-4)


class TestPositionOffset:
    def test_is_a_function_of_seed_epoch_and_place(self):
        assert position_offset(42, 0, 7, 1000) == position_offset(42, 0, 7, 1000)
        drawn = {position_offset(seed, epoch, place, 10**9) for seed in (1, 2) for epoch in (0, 1) for place in (0, 1)}
        assert len(drawn) == 8

    def test_fills_the_whole_room_and_stays_inside(self):
        drawn = {position_offset(42, 0, place, 3) for place in range(100)}
        assert drawn == {0, 1, 2, 3}

    @pytest.mark.parametrize("room", [0, -5])
    def test_is_zero_without_room(self, room):
        assert position_offset(42, 0, 0, room) == 0
