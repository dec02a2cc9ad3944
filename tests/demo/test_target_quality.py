import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from dloop.demo.target_quality import Quality, is_enough, measure, report
from dloop.demo.target_training import Row


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=12, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.5, **sizes)
    return Qwen3ForCausalLM(config).eval()


def _row(model, domain: str, length: int, *, greedy: bool) -> Row:
    """Three tokens of question and an answer: the model's own greedy one, or one that misses it at the end."""
    ids = torch.tensor([[1, 2, length % 5]])
    while ids.shape[1] < length:
        logits = model(ids).logits[0, -1]
        token = logits.argmax() if greedy or ids.shape[1] < length - 1 else logits.argmin()
        ids = torch.cat((ids, token.view(1, 1)), dim=1)
    return Row(domain, ids[0], torch.arange(length) >= 3)


def test_exact_means_that_greedy_decoding_gives_the_answer(model):
    rows = [
        *(_row(model, "mbpp", length, greedy=True) for length in (6, 9)),
        *(_row(model, "mbpp", length, greedy=False) for length in (7, 8, 10)),
        _row(model, "gsm8k", 9, greedy=True),
    ]
    qualities = measure(model, rows)
    assert (qualities["mbpp"].exact, qualities["mbpp"].answers) == (2, 5)
    assert (qualities["gsm8k"].exact, qualities["gsm8k"].answers) == (1, 1)


@torch.no_grad()
def test_the_loss_is_the_mean_over_answer_tokens(model):
    rows = [_row(model, "mbpp", length, greedy=False) for length in (6, 9, 11)]
    sums = [float(F.cross_entropy(model(row.ids[None]).logits[0, 2:-1], row.ids[3:], reduction="sum")) for row in rows]
    assert measure(model, rows)["mbpp"].loss == pytest.approx(sum(sums) / (3 + 6 + 8), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "exact_code", "enough"), [(0.05, 0, True), (0.5, 10, True), (0.5, 9, False), (0.1, 0, False)]
)
def test_enough_is_a_low_loss_or_half_of_the_code(loss, exact_code, enough):
    qualities = {
        "humaneval": Quality(loss * 50, 50, exact_code, 10),
        "mbpp": Quality(loss * 50, 50, 0, 10),
        "gsm8k": Quality(loss * 50, 50, 10, 10),
    }
    assert is_enough(qualities) == enough
    assert report(qualities)["exact_code"] == exact_code / 20
