"""Our attention in the library's registry against the library's own."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dloop.decoding.target import Target
from dloop.hosts import library_attention
from dloop.hosts.target_model import load_target
from dloop.trees.draft_tree import DraftTree

from ..decoding.watching import answers_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("heads", "groups", "rows", "scaling"), [(8, 2, 5, None), (4, 4, 3, 0.3), (6, 1, 1, 1.0)])
def test_rows_equal_the_librarys(heads, groups, rows, scaling, masked):
    torch.manual_seed(0)
    queries = torch.randn(1, heads, rows, 8)
    keys, values = torch.randn(2, 1, groups, 11, 8)
    mask = torch.ones(1, 1, rows, 11, dtype=torch.bool).tril(11 - rows) if masked else None
    module = SimpleNamespace(num_key_value_groups=heads // groups, is_causal=True, training=False)
    arguments = (module, queries, keys, values, mask)
    theirs, _ = sdpa_attention_forward(*arguments, scaling=scaling)
    ours, _ = library_attention.attend(*arguments, scaling=scaling)
    torch.testing.assert_close(ours, theirs)


def test_what_it_does_not_cover_is_the_librarys():
    torch.manual_seed(0)
    queries = torch.randn(2, 4, 3, 8)
    keys, values = torch.randn(2, 2, 2, 7, 8)
    mask = torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(4)
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True, training=False)
    for batch, bias in ((2, None), (1, torch.randn(1, 4, 3, 7))):
        arguments = (module, queries[:batch], keys[:batch], values[:batch], mask)
        theirs, _ = sdpa_attention_forward(*arguments, position_bias=bias)
        ours, _ = library_attention.attend(*arguments, position_bias=bias)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("folder", ["mtp_gemma4/target", "mtp_qwen35/checkpoint"])
@torch.inference_mode()
def test_a_verification_copies_no_keys_and_says_the_same(golden, folder, monkeypatch):
    calls, copies, answers = [], [], []

    def counted(kind, function):
        return lambda *arguments, **options: kind.append(1) or function(*arguments, **options)

    monkeypatch.setattr(library_attention, "attend", counted(calls, library_attention.attend))
    monkeypatch.setattr(library_attention, "sdpa_attention_forward", counted(copies, sdpa_attention_forward))
    for shared in (True, False):
        model = load_target(str(golden / folder), dtype=torch.float32, device=CPU)
        target = Target(model)
        if not shared:
            model.set_attn_implementation("sdpa")
        target.reset(64)
        target.prefill([5, 17, 3, 9, 22, 7])
        calls.clear(), copies.clear()
        seen = answers_of(target)
        tree = DraftTree(11)
        tree.graft([4, 9, 4, 7], range(-1, 3))
        target.verify(tree)
        target.commit([0])
        answers.append(seen[0][0])
        assert (len(calls) > 0, len(copies)) == (shared, 0)
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)
