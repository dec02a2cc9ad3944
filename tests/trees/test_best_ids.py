"""The largest values against a stable sort."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dloop.trees.best_ids import CHUNK, best_ids

values = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 3.0, float("-inf")])


def by_stable_sort(rows, count):
    return rows.float().sort(dim=-1, descending=True, stable=True).indices[:, :count]


@given(st.lists(values, min_size=1, max_size=400), st.integers(1, 4))
def test_equal_values_by_ascending_id(row, count):
    rows = torch.tensor([row, row[::-1]])
    count = min(count, len(row))
    assert torch.equal(best_ids(rows, count), by_stable_sort(rows, count))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [64 * CHUNK, 64 * CHUNK + 5])
def test_long_rows(dtype, length):
    rows = torch.randn(3, length, generator=torch.Generator().manual_seed(length)).to(dtype)
    for count in (1, 7, 20, 60):
        assert torch.equal(best_ids(rows, count), by_stable_sort(rows, count))
