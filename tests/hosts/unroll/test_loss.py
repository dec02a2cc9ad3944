"""Chunked soft cross-entropy and the shift of an unroll."""

import pytest
import torch
from torch import nn

from dloop.hosts.unroll import loss as loss_module
from dloop.hosts.unroll.loss import shift_left, soft_cross_entropy

from ..logit_rows import LogitRows, saved_shapes


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_chunks_equal_the_whole(monkeypatch, chunk):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    torch.manual_seed(0)
    draft, teacher = nn.Linear(6, 11, bias=False), nn.Linear(5, 11, bias=False).requires_grad_(False)
    hidden, states = torch.randn(12, 6, requires_grad=True), torch.randn(12, 5)
    rows, teacher_rows = torch.tensor([0, 3, 4, 7, 8, 9, 10]), torch.tensor([2, 5, 6, 9, 10, 11, 0])
    total, greedy = soft_cross_entropy(hidden, states, rows, teacher_rows, draft, teacher)
    logits = draft(hidden[rows])
    whole = -(teacher(states[teacher_rows]).softmax(-1) * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(total, whole)
    assert torch.equal(greedy, logits.argmax(-1))
    for ours, theirs in zip(
        torch.autograd.grad(total, (hidden, draft.weight)),
        torch.autograd.grad(whole, (hidden, draft.weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_logits_exist_for_one_chunk_of_rows(monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 4)
    draft, teacher = nn.Linear(6, 11, bias=False), nn.Linear(5, 11, bias=False).requires_grad_(False)
    hidden, states, rows = torch.randn(20, 6, requires_grad=True), torch.randn(20, 5), torch.arange(20)
    with LogitRows(11) as forward, saved_shapes() as saved:
        total, _ = soft_cross_entropy(hidden, states, rows, rows, draft, teacher)
    with LogitRows(11) as backward:
        total.backward()
    assert (forward.most, backward.most) == (4, 4)
    assert saved
    assert all(shape[-1:] != (11,) for shape in saved)


def test_no_row_is_a_loss_of_zero():
    head, none = nn.Linear(3, 5), torch.empty(0, dtype=torch.long)
    total, greedy = soft_cross_entropy(torch.randn(4, 3), torch.randn(4, 3), none, none, head, head)
    assert (total.item(), len(greedy)) == (0.0, 0)


def test_shifts_fill_with_zeros():
    x = torch.arange(1, 9).view(2, 4)
    assert shift_left(x, 0).tolist() == x.tolist()
    assert shift_left(x, 3).tolist() == [[4, 0, 0, 0], [8, 0, 0, 0]]
    assert shift_left(x, 9).tolist() == [[0] * 4] * 2
    assert shift_left(x[..., None].expand(2, 4, 3), 1).shape == (2, 4, 3)
    assert shift_left(x > 2, 1).tolist() == [[False, True, True, False], [True, True, True, False]]
