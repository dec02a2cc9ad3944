"""The lean runtime against the library's: logits, features, cache, and what it refuses."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dloop.cli import UserError
from dloop.decoding.target import Target
from dloop.hosts.lean_layer import fuse
from dloop.hosts.target_model import load_target
from dloop.trees.draft_tree import DraftTree

from .watching import answers_of

CPU = torch.device("cpu")
TAPS = ("embed_tokens", "layers.1", "layers.3", "norm")
PROMPT = [5, 17, 3, 99, 120, 22, 7]


@pytest.fixture(scope="module", params=["dflash", "dspark", "domino", "ddtree", "eagle3"])
def model(request, golden):
    return load_target(str(golden / request.param / "target"), dtype=torch.float32, device=CPU)


def random_tree():
    tree = DraftTree(11)
    for token, parent in ((4, 0), (9, 0), (4, 1), (7, 1), (2, 3), (9, 2), (5, 4), (1, 5)):
        tree.add(token, parent)
    return tree


def chain():
    tree = DraftTree(11)
    tree.graft([4, 9, 4, 7], range(-1, 3))
    return tree


@torch.inference_mode()
def test_logits_features_and_cache_equal_the_librarys(model):
    taps = TAPS if len(model.model.layers) > 4 else ("embed_tokens", "layers.1", "norm")
    answers = []
    for runtime in ("library", "lean"):
        target = Target(model, taps, runtime)
        seen = answers_of(target)
        target.reset(64)
        target.prefill(PROMPT)
        for tree in (DraftTree(3), random_tree(), chain(), random_tree()):
            target.verify(tree)
            target.commit(tree.longest_accepted([-1] * len(tree)) if tree.is_chain else [0, 1, 3])
        answers.append((seen, target.cache.memory.store[..., : target.cache.length, :].clone()))
        target.close()
    (library, library_cache), (lean, lean_cache) = answers
    for theirs, ours in zip(library, lean, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(lean_cache, library_cache, atol=1e-5, rtol=1e-5)


def tiny(**changes):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(**(sizes | heads | changes))).eval()


def test_fused_weights_stay_the_models_own():
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention = model.model.layers[0].self_attn
    fused = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert torch.equal(fused, torch.cat([before[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]))
    again = fuse(attention.q_proj, attention.k_proj, attention.v_proj)
    assert again.data_ptr() == fused.data_ptr() == attention.q_proj.weight.data_ptr()
    assert torch.equal(again, fused)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_a_biased_model_in_either_precision_is_close_to_the_librarys(dtype):
    torch.manual_seed(0)
    model = tiny(attention_bias=True).to(dtype)
    for layer in model.model.layers:
        layer.self_attn.q_proj.bias.normal_()
        layer.self_attn.o_proj.bias.normal_()
    logits = []
    for runtime in ("library", "lean"):
        target = Target(model, (), runtime)
        target.reset(32)
        logits.append(target._read(PROMPT[:3]))
        target.close()
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, "sliding_attention"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}}, "'linear'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
    ],
)
def test_other_models_are_refused(changes, message):
    with pytest.raises(UserError, match=f"{message}.*--target-runtime library"):
        Target(tiny(**changes), (), "lean")


def test_weights_fused_while_decoding_can_be_trained():
    layers = [torch.nn.Linear(3, 2, bias=False) for _ in range(2)]
    with torch.inference_mode():
        fuse(*layers)
    layers[1](torch.ones(1, 3)).sum().backward()
    assert layers[1].weight.grad is not None
