"""The roomy cache holds what the library's dynamic cache holds."""

import torch
from transformers import DynamicCache, Qwen3_5TextConfig

from dloop.regeneration.batch_cache import BatchCache, SelectableLinearLayer
from tests.regeneration.tiny_target import tiny_model


def test_appending_and_selecting_equals_the_dynamic_cache():
    config = tiny_model().config
    ours, theirs = BatchCache(config), DynamicCache(config=config)
    random = torch.Generator().manual_seed(0)
    rows = 5
    for step, tokens in enumerate([7, 1, 1, 90, 1, 1]):
        for layer in range(config.num_hidden_layers):
            states = [torch.randn(rows, 2, tokens, 8, generator=random) for _ in range(2)]
            for found, wanted in zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True):
                assert torch.equal(found, wanted)
        if step in (1, 3):
            kept = torch.tensor([0, 2, 3][: rows - 2])
            rows = len(kept)
            ours.batch_select_indices(kept)
            theirs.batch_select_indices(kept)
    assert ours.get_seq_length() == theirs.get_seq_length() == 101


def test_rows_can_be_taken_out_unless_a_kind_of_layer_knows_no_such_thing(monkeypatch):
    assert BatchCache(tiny_model().config).can_select
    assert BatchCache(Qwen3_5TextConfig(num_hidden_layers=4)).can_select
    monkeypatch.delattr(SelectableLinearLayer, "batch_select_indices")
    assert not BatchCache(Qwen3_5TextConfig(num_hidden_layers=4)).can_select
