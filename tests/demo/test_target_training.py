import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dloop.demo.target_training import (
    Recipe,
    Row,
    Run,
    answer_logits,
    epoch_batches,
    padded,
    rate_share,
)


def _rows(count: int = 11) -> list[Row]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for number in range(count):
        length = 6 + number % 5
        ids = torch.randint(4, 40, (length,), generator=generator)
        rows.append(Row("gsm8k", ids, torch.arange(length) >= 3))
    return rows


def _model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=40, tie_word_embeddings=True, **sizes, **heads))


def _recipe(**changes) -> Recipe:
    settings = {
        "architecture": "qwen3",
        "steps": 7,
        "batch_size": 3,
        "muon_rate": 0.02,
        "adamw_rate": 4e-3,
        "seed": 1,
        "data": "x",
    }
    return Recipe(**(settings | changes))


class _Killed(Exception):
    pass


def _train(folder, *, kill_at: int | None = None, **changes):
    run = Run(_model(), _rows(), _recipe(**changes), folder)
    if kill_at is not None:
        step = run._step

        def stop_or_step(number):
            if number == kill_at:
                raise _Killed
            return step(number)

        run._step = stop_or_step
    run.train(save_interval=2)
    return run


def test_an_epoch_holds_every_row_once_and_depends_on_seed_and_epoch():
    rows = _rows()
    batches = epoch_batches(rows, 3, seed=1, epoch=0)
    assert sorted(id(row) for batch in batches for row in batch) == sorted(map(id, rows))
    assert [len(batch) for batch in batches].count(3) == 3
    shapes = [[id(row) for row in batch] for batch in batches]
    assert shapes == [[id(row) for row in batch] for batch in epoch_batches(rows, 3, seed=1, epoch=0)]
    assert shapes != [[id(row) for row in batch] for batch in epoch_batches(rows, 3, seed=1, epoch=1)]


def test_rows_of_a_batch_are_of_similar_length():
    spread = [len({len(row.ids) for row in batch}) for batch in epoch_batches(_rows(30), 3, seed=0, epoch=0)]
    assert max(spread) <= 2


def test_answer_logits_are_those_of_every_row_alone():
    model, rows = _model().eval(), _rows(4)
    with torch.no_grad():
        logits_RV, tokens_R = answer_logits(model, *padded(rows))
        alone = [model(row.ids[None]).logits[0, :-1][row.answer[1:]] for row in rows]
    torch.testing.assert_close(logits_RV, torch.cat(alone))
    assert tokens_R.tolist() == torch.cat([row.ids[1:][row.answer[1:]] for row in rows]).tolist()


def test_the_loss_falls_when_rows_repeat(tmp_path):
    run = Run(_model(), _rows(3), _recipe(steps=60), tmp_path)
    losses = run.train(save_interval=20).losses
    assert [step for step, _ in losses] == [20, 40, 60]
    assert losses[-1][1] < 0.7 * losses[0][1]


@pytest.mark.parametrize("kill_at", [1, 2, 5])
def test_a_killed_run_ends_like_one_that_was_not(tmp_path, kill_at):
    whole = _train(tmp_path / "whole")
    with pytest.raises(_Killed):
        _train(tmp_path / "killed", kill_at=kill_at)
    resumed = _train(tmp_path / "killed")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert [step for step, _ in whole.progress.losses] == [2, 4, 6, 7]
    assert whole.progress.losses == resumed.progress.losses
    assert whole.progress.tokens == resumed.progress.tokens


def test_a_state_of_another_recipe_is_not_taken_up(tmp_path, capsys):
    _train(tmp_path, seed=2)
    assert torch.equal(_train(tmp_path).model.lm_head.weight, _train(tmp_path / "fresh").model.lm_head.weight)
    assert "other settings" in capsys.readouterr().out


def test_the_rate_rises_and_falls():
    shares = [rate_share(step, 1000) for step in range(1000)]
    assert shares[0] == pytest.approx(0.02)
    assert max(shares) == shares[49] == 1.0
    assert shares[50:] == sorted(shares[50:], reverse=True)
    assert shares[-1] == pytest.approx(0.05, abs=2e-3)
