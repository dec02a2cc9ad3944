"""Anchors, windows and the packed mask against naive loops; flex_attention against the dense mask."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dloop.hosts.block.packing import (
    Packing,
    attend_densely,
    attend_flexibly,
    open_windows,
    reaches,
    sample_anchors,
    seeded,
)


def naive_mask(packing):
    """Who sees whom, key by key, as a person would explain it."""
    batch, queries, keys = len(packing.anchor_BN), packing.queries, packing.keys
    mask = torch.zeros(batch, queries, keys, dtype=torch.bool)
    extra_end = packing.context + packing.anchors * packing.extra
    for b in range(batch):
        for q in range(queries):
            block = q // packing.rows
            real = bool(packing.keep_BN[b, block])
            for k in range(keys):
                if k < packing.context:
                    mask[b, q, k] = real and k < packing.anchor_BN[b, block]
                elif k < extra_end:
                    mask[b, q, k] = (k - packing.context) // packing.extra == block
                else:
                    mask[b, q, k] = (k - extra_end) // packing.rows == block
    return mask


@settings(deadline=None, max_examples=40)
@given(
    context=st.integers(1, 9),
    extra=st.integers(0, 5),
    rows=st.integers(1, 5),
    anchors=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    keep=st.integers(0, 15),
)
def test_dense_mask_equals_naive_loops(context, extra, rows, anchors, keep):
    anchor_BN = torch.tensor([anchors]).clamp(max=context - 1)
    keep_BN = torch.tensor([[bool(keep >> n & 1) for n in range(len(anchors))]])
    packing = Packing(context, extra, rows, anchor_BN, keep_BN)
    assert torch.equal(packing.dense_mask()[:, 0], naive_mask(packing))


@pytest.mark.parametrize("extra", [0, 6])
def test_flex_attention_equals_dense_attention(extra):
    generator = seeded(1)
    packing = Packing(40, extra, 4, torch.tensor([[3, 9, 30], [0, 5, 39]]), torch.tensor([[1, 1, 1], [0, 1, 1]]).bool())
    q = torch.randn(2, 4, packing.queries, 16, generator=generator)
    k = torch.randn(2, 2, packing.keys, 16, generator=generator)
    v = torch.randn(2, 2, packing.keys, 16, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(attend_flexibly(packing)(0, q, k, v), attend_densely(packing)(0, q, k, v))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=24), min_size=1, max_size=3), st.integers(1, 6))
def test_anchors_are_supervised_pairs_without_repetition(rows, count):
    width = max(map(len, rows))
    mask = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    position_BN, keep_BN = sample_anchors(mask, count, [seeded(7, b) for b in range(len(rows))])
    for b, row in enumerate(mask.tolist()):
        chosen = position_BN[b][keep_BN[b]].tolist()
        candidates = [p for p in range(width - 1) if row[p] and row[p + 1]]
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(candidates)
        assert len(chosen) == min(count, len(candidates))


def test_a_rows_anchors_depend_on_its_generator_alone():
    mask = torch.ones(3, 50, dtype=torch.long)
    together, _ = sample_anchors(mask, 8, [seeded(42, 1, 0, place) for place in (4, 5, 6)])
    alone, _ = sample_anchors(mask[:1], 8, [seeded(42, 1, 0, 5)])
    assert torch.equal(together[1], alone[0])
    assert not torch.equal(together[0], together[1])


def test_windows_end_with_the_sequence_and_skip_unsupervised_labels():
    ids = torch.arange(10)[None] + 100
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1, 1, 1]])
    window = open_windows(ids, mask, torch.tensor([[1, 7, 12]]), torch.tensor([[True, True, False]]), 4)
    assert window.anchor_BN[0, :2].tolist() == [101, 107]
    assert window.labels_BNT[0, 0].tolist() == [102, 103, 104, 105]
    assert window.mask_BNT.int().tolist() == [[[1, 1, 0, 1], [1, 1, 0, 0], [0, 0, 0, 0]]]


@pytest.mark.parametrize("offset", [1, 3, 7])
def test_reaching_blocks_have_a_supervised_path_and_a_label_behind_it(offset):
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]])
    positions = torch.arange(11)[None]
    expected = [p + offset + 1 <= 11 and all(mask[0, p + 1 : p + offset + 1].tolist()) for p in positions[0].tolist()]
    got = reaches(mask, positions, torch.ones_like(positions).bool(), offset)
    assert got[0].tolist() == expected
