"""Anchors, windows and the packed mask against naive loops; flex_attention against the dense mask."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounter

from dloop.hosts.block.packing import (
    Packing,
    attend_densely,
    attend_flexibly,
    block_mask,
    keep_alone,
    open_windows,
    reaches,
    sample_anchors,
    seeded,
)
from dloop.hosts.flex import flex_kernel


def naive_mask(packing):
    """Who sees whom, key by key, as a person would explain it."""
    batch, queries, keys = len(packing.anchor_BN), packing.queries, packing.keys
    mask = torch.zeros(batch, queries, keys, dtype=torch.bool)
    for b in range(batch):
        for q in range(queries):
            block = q // packing.rows
            real = bool(packing.keep_BN[b, block])
            for k in range(keys):
                if k < packing.context:
                    mask[b, q, k] = real and k < packing.anchor_BN[b, block]
                else:
                    mask[b, q, k] = (k - packing.context) // (packing.extra + packing.rows) == block
    return mask


def random_parts(packing, heads, groups, size):
    """Queries, the context's keys and values, each block's own."""
    generator, batch = seeded(1), len(packing.anchor_BN)

    def parts(*shape):
        return torch.randn(batch, groups, *shape, size, generator=generator, requires_grad=True)

    q = torch.randn(batch, heads, packing.queries, size, generator=generator, requires_grad=True)
    own = (packing.anchors, packing.extra + packing.rows)
    return q, (parts(packing.context), parts(packing.context)), (parts(*own), parts(*own))


def attend_naively(packing, q, context, own):
    """All queries meet all keys under the naive mask."""
    k, v = (torch.cat((first, second.flatten(2, 3)), dim=2) for first, second in zip(context, own, strict=True))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=naive_mask(packing)[:, None], enable_gqa=True)


TWO_ROWS = (torch.tensor([[3, 9, 30], [0, 5, 39]]), torch.tensor([[1, 1, 1], [0, 1, 1]]).bool())


@settings(deadline=None, max_examples=40)
@given(
    context=st.integers(1, 9),
    extra=st.integers(0, 5),
    rows=st.integers(1, 5),
    anchors=st.lists(st.integers(0, 8), min_size=1, max_size=4),
    keep=st.integers(0, 15),
)
def test_the_mask_equals_naive_loops(context, extra, rows, anchors, keep):
    anchor_BN = torch.tensor([anchors]).clamp(max=context - 1)
    keep_BN = torch.tensor([[bool(keep >> n & 1) for n in range(len(anchors))]])
    packing = Packing(context, extra, rows, anchor_BN, keep_BN)
    places = torch.meshgrid(*(torch.arange(count) for count in (1, packing.queries, packing.keys)), indexing="ij")
    assert torch.equal(packing.allowed()(*places), naive_mask(packing))
    assert torch.equal(packing.context_mask().repeat_interleave(rows, 1), naive_mask(packing)[..., :context])


@pytest.mark.parametrize("extra", [0, 6])
def test_attention_in_two_parts_equals_the_masked_one_with_its_gradients(extra):
    packing = Packing(40, extra, 4, *TWO_ROWS)
    q, context, own = random_parts(packing, heads=4, groups=2, size=16)
    outputs = attend_densely(packing)(q, context, own), attend_naively(packing, q, context, own)
    torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-5)
    # Weighted by place, so that swapped rows would show.
    weights = torch.arange(outputs[0].numel()).view_as(outputs[0]).sin()
    found, wanted = (torch.autograd.grad((out * weights).sum(), (q, *context, *own)) for out in outputs)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("extra", [0, 6])
def test_flex_attention_equals_the_masked_one(extra):
    packing = Packing(40, extra, 4, *TWO_ROWS)
    with torch.no_grad():
        parts = random_parts(packing, heads=4, groups=2, size=16)
        q, context, own = parts[0].detach(), *(tuple(part.detach() for part in pair) for pair in parts[1:])
        torch.testing.assert_close(attend_flexibly(packing)(q, context, own), attend_naively(packing, q, context, own))


def test_only_kept_blocks_are_left_in_their_order():
    keep = torch.tensor([[0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0]]).bool()
    places = torch.arange(6).expand(2, -1)
    at = keep_alone(keep)
    assert places[at][keep[at]].tolist() == [1, 3, 5, 4]
    assert keep[at].tolist() == [[True, True, True], [True, False, False]]
    assert keep[keep_alone(torch.zeros_like(keep))].shape == (2, 1)


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


def test_a_compiled_kernel_serves_all_lengths_stages_and_masks():
    counter = CompileCounter()
    kernel = flex_kernel(True, counter)
    with torch.no_grad():
        for context, extra, anchors in ((40, 0, 3), (56, 0, 5), (56, 6, 4), (72, 13, 3), (88, 20, 6)):
            anchor_BN = torch.arange(anchors).expand(2, -1) * 3
            packing = Packing(context, extra, 4, anchor_BN, torch.ones_like(anchor_BN).bool())
            q, context_parts, own = random_parts(packing, heads=4, groups=2, size=16)
            k, v = (torch.cat((a, b.flatten(2, 3)), dim=2) for a, b in zip(context_parts, own, strict=True))
            kernel(q.detach(), k.detach(), v.detach(), block_mask=block_mask(packing), enable_gqa=True)
    assert 0 < counter.frame_count <= 2


def test_a_kernel_that_cannot_be_compiled_again_says_so():
    torch._dynamo.reset()
    kernel = flex_kernel(True, CompileCounter())
    single, double = (torch.zeros(1, 2, 16, 16, dtype=dtype) for dtype in (torch.float32, torch.float64))
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=1):
        kernel(single, single, single)
        with pytest.raises(FailOnRecompileLimitHit):
            kernel(double, double, double)
