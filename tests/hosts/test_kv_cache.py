"""Preallocated keys and values against a list that is simply rebuilt."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dloop.hosts.kv_cache import KVCache


def rows(generator, count):
    return torch.randn(2, 3, 1, 2, count, 4, generator=generator)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 7), st.integers(0, 127)), min_size=1, max_size=8))
def test_writes_and_commits_equal_a_rebuilt_cache(steps):
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(3, 2, 4, torch.float32, torch.device("cpu"))
    rebuilt = rows(generator, 0)
    for count, kept in steps:
        new = rows(generator, count)
        cache.reserve(cache.length + count)
        for layer in range(3):
            keys, values = cache.write(layer, new[0, layer], new[1, layer])
            assert torch.equal(keys, torch.cat((rebuilt, new), dim=-2)[0, layer])
            assert torch.equal(values, torch.cat((rebuilt, new), dim=-2)[1, layer])
        chosen = [row for row in range(count) if kept >> row & 1]
        cache.keep(cache.length, chosen)
        rebuilt = torch.cat((rebuilt, new[..., chosen, :]), dim=-2)
        assert cache.length == rebuilt.shape[-2]
        assert torch.equal(cache.store[..., : cache.length, :], rebuilt)


def test_rollback_forgets_and_reserve_never_shrinks():
    cache = KVCache(1, 1, 2, torch.float32, torch.device("cpu"))
    cache.reserve(10)
    store = cache.store
    cache.write(0, torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2))
    cache.advance(3)
    cache.reserve(5)
    assert cache.store is store
    cache.rollback(1)
    keys, _ = cache.write(0, torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2))
    assert keys[0, 0, :, 0].tolist() == [1, 0]
