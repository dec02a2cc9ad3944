"""Attention of an unroll: against a dense mask over all steps' keys, and dense against flexible."""

import pytest
import torch
import torch.nn.functional as F

from dloop.hosts.unroll.attention import attend_densely, attend_flexibly

B, H, G, S, E = 2, 4, 2, 9, 8


def tensors(steps, rows=S, dtype=torch.float64):
    generator = torch.Generator().manual_seed(steps)
    shapes = [(B, H, rows, E), *[(B, G, rows, E)] * (2 * steps)]
    q, *rest = (torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, rest[:steps], rest[steps:]


def by_mask(q, keys, values):
    """One softmax over the flattened key axis: key s * S + k is visible from row j as the specification says."""
    rows = q.shape[2]
    query = torch.arange(rows)[:, None]
    key = torch.arange(rows * len(keys))[None]
    allowed = torch.where(key < rows, key <= query, (key - query) % rows == 0)
    return F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), allowed, enable_gqa=True)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_rows_see_their_prefix_and_their_own_chain(steps):
    q, keys, values = tensors(steps)
    ours, oracle = attend_densely(q, keys, values), by_mask(q, keys, values)
    torch.testing.assert_close(ours, oracle, atol=1e-6, rtol=1e-5)
    weight = torch.randn_like(oracle)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), (q, *keys, *values)),
        torch.autograd.grad((oracle * weight).sum(), (q, *keys, *values)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [9, 130])
@pytest.mark.parametrize("steps", [1, 4])
def test_flexible_equals_dense(steps, rows):
    q, keys, values = tensors(steps, rows, torch.float32)
    with torch.no_grad():
        detached = [q.detach(), [key.detach() for key in keys], [value.detach() for value in values]]
        torch.testing.assert_close(attend_flexibly(*detached), attend_densely(*detached), atol=2e-6, rtol=1e-5)
