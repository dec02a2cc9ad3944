"""Attention whose query heads share keys, against keys repeated for every head."""

import pytest
import torch
import torch.nn.functional as F

from dloop.hosts.attention import group_bias, grouped_attention

QUERIES, KEYS = 5, 9


@pytest.fixture
def rows():
    torch.manual_seed(0)
    return torch.randn(1, 6, QUERIES, 4), torch.randn(1, 3, KEYS, 4), torch.randn(1, 3, KEYS, 4)


@pytest.fixture
def mask():
    seen = torch.rand(QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) > 0.4
    seen[:, 0] = True
    return seen


def naive(queries, keys, values, mask=None):
    keys, values = (part.repeat_interleave(2, dim=1) for part in (keys, values))
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)


def test_heads_of_a_group_share_keys(rows, mask):
    torch.testing.assert_close(grouped_attention(*rows), naive(*rows))
    bias = group_bias(mask, 2, torch.float32)
    torch.testing.assert_close(grouped_attention(*rows, bias=bias), naive(*rows, mask=mask))


def test_the_kernels_order_of_memory_does_not_matter(rows, monkeypatch):
    expected, kernel = naive(*rows), F.scaled_dot_product_attention

    def rows_before_heads(*arguments, **options):
        # As CUDA's memory-efficient kernel answers.
        return kernel(*arguments, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", rows_before_heads)
    torch.testing.assert_close(grouped_attention(*rows), expected)
