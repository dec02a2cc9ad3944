"""DARTree against the golden trees, with the two heads written out, and against an unbatched search."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from dloop.cli import UserError
from dloop.hosts.block.config import read_block_config
from dloop.hosts.domino import DominoDrafter, DominoNetwork
from dloop.hosts.dspark import DSparkDrafter, DSparkNetwork
from dloop.trees.best_ids import best_ids
from dloop.trees.dartree import build_dartree, grow
from dloop.trees.draft_tree import DraftTree
from dloop.trees.forced_chain import force_chain
from tests.conftest import GOLDEN

CPU = torch.device("cpu")
MODELS = json.loads((GOLDEN / "dartree/trees.json").read_text())
UNION = MODELS.pop("union_dspark_open")
INPUTS = load_file(GOLDEN / "dartree/inputs.safetensors")


class Scorer:
    """Base logits of the 64 best candidates of each depth; a head adds its bias."""

    def __init__(self, base_LV, root):
        self.candidates_LC = best_ids(base_LV, min(64, base_LV.shape[1]))
        self.base_LC = base_LV.gather(-1, self.candidates_LC)
        self.root_token = root

    def root_state(self):
        return torch.zeros(1, 0)

    def advance(self, depth, states_WG, tokens_W):
        return states_WG


class Markov(Scorer):
    """DSpark: the bias depends on the parent's token, in the gated head on the block's row as well."""

    def __init__(self, weights, root, stage=""):
        super().__init__(weights[stage + "base_logits"], root)
        self.weights, self.z_LH = weights, weights[stage + "z"]

    def scores(self, depth, parent_tokens_P, states_PG):
        w = self.weights
        features = w["markov_w1"][parent_tokens_P]
        if "gate_weight" in w:
            z = self.z_LH[depth].expand(len(features), -1)
            features = features * torch.sigmoid(torch.cat((z, features), -1) @ w["gate_weight"].T + w["gate_bias"])
        return self.base_LC[depth] + features @ w["markov_w2"][self.candidates_LC[depth]].T


class GRU(Scorer):
    """Domino: the bias depends on the block's row and on a recurrent state over the tokens from the root on."""

    def __init__(self, weights, root, pure_draft_prefix_len):
        super().__init__(weights["base_logits"], root)
        self.weights, self.pure_draft_prefix_len = weights, pure_draft_prefix_len

    def _cell(self, tokens, states):
        w = self.weights
        inputs = (w["embed"][tokens] @ w["gru_w_ih"].T).chunk(3, -1)
        hidden = (states @ w["gru_w_hh"].T).chunk(3, -1)
        reset, update = ((a + b).sigmoid() for a, b in zip(inputs[:2], hidden[:2], strict=True))
        new = torch.tanh(inputs[2] + reset * hidden[2])
        return (1 - update) * new + update * states

    def root_state(self):
        return self._cell(torch.tensor([self.root_token]), torch.zeros(1, self.weights["gru_w_hh"].shape[1]))

    def scores(self, depth, parent_tokens_P, states_PG):
        base_PC = self.base_LC[depth].expand(len(states_PG), -1)
        if depth < self.pure_draft_prefix_len:
            return base_PC
        w = self.weights
        z = w["z"][depth].expand(len(states_PG), -1)
        hidden = torch.nn.functional.silu(torch.cat((z, states_PG), -1) @ w["fc1"].T)
        return base_PC + hidden @ w["fc2"][self.candidates_LC[depth]].T

    def advance(self, depth, states_WG, tokens_W):
        return self._cell(tokens_W, states_WG)


def golden_scorer(name):
    weights = {key.split(".", 1)[1]: value for key, value in INPUTS.items() if key.startswith(name + ".")}
    root = MODELS[name]["root"]
    if name.startswith("dspark"):
        return Markov(weights, root)
    return GRU(weights, root, MODELS[name]["pure_draft_prefix_len"])


def grafted(nodes, root):
    tree = DraftTree(root)
    tree.graft(nodes.tokens, nodes.parents)
    return tree


def settings_of(key):
    budget, width, beta = key.split("/")
    return {"budget": int(budget), "width": int(width), "beta": float(beta)}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in MODELS for key in MODELS[name]["trees"]])
def test_golden_trees(name, key):
    model, expected = MODELS[name], MODELS[name]["trees"][key]
    nodes = build_dartree(golden_scorer(name), **settings_of(key))
    tree = grafted(nodes, model["root"])
    assert (tree.tokens, tree.parents, tree.depths) == tuple(expected[part] for part in ("tokens", "parents", "depths"))
    forced = grafted(force_chain(nodes, model["chain"], expected["budget"]), model["root"])
    assert (forced.tokens, forced.parents, forced.depths) == tuple(
        expected["forced"][part] for part in ("tokens", "parents", "depths")
    )


@pytest.mark.parametrize("name", MODELS)
def test_golden_path_scores(name):
    expected = MODELS[name]["trees"]["256/12/-0.2"]
    supertree = grow(golden_scorer(name), 12)
    assert len(supertree.tokens) == expected["supertree_nodes"]
    assert supertree.path_scores == pytest.approx(expected["path_scores"][1:], abs=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_golden_scores_of_pruned_trees_and_chains_that_were_left_out(name):
    scorer = golden_scorer(name)
    for key, expected in MODELS[name]["trees"].items():
        supertree = grow(scorer, expected["width"])
        assert len(supertree.tokens) == expected["supertree_nodes"]
        scores = dict(zip(paths(supertree), supertree.path_scores, strict=True))
        kept = paths(build_dartree(scorer, **settings_of(key)))
        assert [scores[path] for path in kept] == pytest.approx(expected["path_scores"][1:], abs=1e-3)
        chain = MODELS[name]["chain"]
        missing = {tuple(chain[: depth + 1]) for depth in range(len(chain))} - set(kept)
        assert len(missing) == expected["forced"]["missing_chain_nodes"]


def drafter_with(name, tree, stage=""):
    """The host's own drafter over the golden weights; its block is what the file says."""
    weights = {key.split(".", 1)[1]: value for key, value in INPUTS.items() if key.startswith(name + ".")}
    base_LV = weights[stage + "base_logits"]
    sizes = {"hidden_size": weights["z"].shape[1], "vocab_size": base_LV.shape[1], "block_size": len(base_LV)}
    others = ("intermediate_size", "num_hidden_layers", "num_attention_heads", "mask_token_id")
    raw = sizes | dict.fromkeys(others, 1) | {"num_target_layers": 4, "target_layer_ids": [1]}
    if name.startswith("domino"):
        prefix = {"pure_draft_prefix_len": MODELS[name]["pure_draft_prefix_len"]}
        raw |= prefix | {"gru_hidden_dim": weights["gru_w_hh"].shape[1], "emb_dim": len(weights["fc1"])}
        network, kind = DominoNetwork(read_block_config(raw, first_draft_row=0), raw), DominoDrafter
        names = {"prefix_gru.weight_ih_l0": "gru_w_ih", "prefix_gru.weight_hh_l0": "gru_w_hh"}
        names |= {"embed_proj.0.weight": "fc1", "embed_proj.2.weight": "fc2"}
    else:
        gated = "gate_weight" in weights
        raw |= {"markov_rank": weights["markov_w1"].shape[1], "markov_head_type": "gated" if gated else "vanilla"}
        network, kind = DSparkNetwork(read_block_config(raw, first_draft_row=0), raw), DSparkDrafter
        names = {f"markov_head.{part}.weight": part for part in ("markov_w1", "markov_w2")}
        names |= {f"markov_head.gate_proj.{part}": f"gate_{part}" for part in ("weight", "bias") if gated}
    network.load_state_dict({ours: weights[theirs] for ours, theirs in names.items()}, strict=False)
    drafter = kind.__new__(kind)
    drafter.network, drafter.head, drafter.device, drafter.tree = network, lambda rows: base_LV, CPU, tree
    drafter.embed = torch.nn.Embedding.from_pretrained(weights["embed"]) if "embed" in weights else None
    return drafter, weights[stage + "z"]


def stage_of(drafter, rows_LH, anchor):
    chain_2L, *kept = drafter.read(rows_LH, torch.tensor([anchor]))
    return drafter.segment(anchor, chain_2L, rows_LH, *kept)


@pytest.mark.parametrize("name", MODELS)
def test_the_drafters_chains_and_trees_equal_the_golden_ones(name):
    model = MODELS[name]
    for key, expected in model["trees"].items():
        tree = SimpleNamespace(tree_width=expected["width"], tree_beta=expected["beta"])
        drafter, rows_LH = drafter_with(name, tree)
        with torch.inference_mode():
            segment = stage_of(drafter, rows_LH, model["root"])
            nodes = segment.grow(expected["budget"])
        assert segment.chain == model["chain"]
        assert segment.log_probs == pytest.approx(model["chain_logprobs"], abs=1e-3)
        assert segment.gate_sum == pytest.approx(model["gate_sum"], abs=1e-3)
        found = grafted(nodes, model["root"])
        assert (found.tokens, found.parents) == (expected["tokens"], expected["parents"]), key


def test_the_second_stages_chain_and_sum_equal_the_golden_ones():
    drafter, rows_LH = drafter_with("dspark_open", None, stage="stage2_")
    with torch.inference_mode():
        segment = stage_of(drafter, rows_LH, MODELS["dspark_open"]["chain"][-1])
    assert segment.chain == UNION["stage2_chain"]
    assert segment.gate_sum == pytest.approx(UNION["stage2_gate_sum"], abs=1e-3)
    assert MODELS["dspark_open"]["gate_sum"] == pytest.approx(UNION["stage1_gate_sum"], abs=1e-3)


@pytest.mark.parametrize("stage_budget", [0, 10])
def test_golden_union_of_two_stages(stage_budget):
    model, shape = MODELS["dspark_open"], {"width": UNION["width"], "beta": UNION["beta"]}
    first = golden_scorer("dspark_open")
    tree = DraftTree(model["root"])
    nodes = build_dartree(first, budget=UNION["tree_budget"], **shape)
    tree.graft(*force_chain(nodes, model["chain"], UNION["tree_budget"])[:2])
    tree.move_anchor(model["chain"])
    assert tree.anchor == UNION["anchor_node"]
    if stage_budget:
        second = Markov(first.weights, model["chain"][-1], stage="stage2_")
        tree.graft(*build_dartree(second, budget=stage_budget, **shape)[:2])
    else:
        tree.graft(UNION["stage2_chain"], range(-1, len(UNION["stage2_chain"]) - 1))
    expected = UNION[f"stage_tree_budget_{stage_budget}"]
    assert (tree.tokens, tree.parents, tree.depths) == tuple(expected[part] for part in ("tokens", "parents", "depths"))


class Table(Scorer):
    """A bias of its own for every (depth, parent token, candidate) and a state that is the whole prefix, for tests."""

    def __init__(self, base_LV, bias_LVV, root):
        super().__init__(base_LV, root)
        self.bias_LVV, self.calls = bias_LVV, []

    def root_state(self):
        return torch.tensor([[float(self.root_token)]])

    def scores(self, depth, parent_tokens_P, states_PG):
        assert states_PG[:, -1].tolist() == parent_tokens_P.tolist()
        self.calls.append(("scores", depth))
        bias_PV = self.bias_LVV[depth, parent_tokens_P] + states_PG.sum(-1, keepdim=True).remainder(2)
        return self.base_LC[depth] + bias_PV[:, self.candidates_LC[depth]]

    def advance(self, depth, states_WG, tokens_W):
        self.calls.append(("advance", depth))
        return torch.cat((states_WG, tokens_W[:, None].float()), -1)


def one_by_one(scorer, width, beta, budget):
    """The rule for one node after another: prefixes as tuples of (token, depth), scores in Python."""
    frontier = [((), 0.0, scorer.root_state(), scorer.root_token)]
    kept = []
    for depth, candidates in enumerate(scorer.candidates_LC.tolist()):
        found = []
        for prefix, path, state, parent in frontier:
            log_probs = scorer.scores(depth, torch.tensor([parent]), state).log_softmax(-1)
            totals = (torch.tensor([path])[:, None] + log_probs)[0].tolist()
            for token, total in zip(candidates, totals, strict=True):
                found.append(((*prefix, token), total, state, token))
        frontier = sorted(found, key=lambda entry: -entry[1])[:width]
        frontier = [(p, s, scorer.advance(depth, state, torch.tensor([t])), t) for p, s, state, t in frontier]
        kept += [(prefix, path) for prefix, path, _, _ in frontier]
    ranking = sorted(range(len(kept)), key=lambda n: (-(kept[n][1] + beta * len(kept[n][0])), n))[:budget]
    return [kept[n][0] for n in sorted(ranking)], [kept[n][0] for n in ranking]


def paths(nodes):
    found = []
    for token, parent in zip(nodes.tokens, nodes.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@st.composite
def tables(draw):
    depths, vocabulary, levels = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    base_LV = torch.randint(levels, (depths, vocabulary), generator=generator).float()
    bias_LVV = torch.randint(levels, (depths, vocabulary, vocabulary), generator=generator).float()
    return Table(base_LV, bias_LVV, draw(st.integers(0, vocabulary - 1)))


@settings(deadline=None)
@given(tables(), st.integers(1, 6), st.sampled_from([0.0, -0.2, -1.0]), st.integers(1, 30))
def test_as_an_unbatched_search_ties_included(scorer, width, beta, budget):
    nodes = build_dartree(scorer, width=width, beta=beta, budget=budget)
    kept, ranked = one_by_one(scorer, width, beta, budget)
    assert paths(nodes) == kept
    assert [paths(nodes)[node] for node in nodes.ranking] == ranked


@settings(deadline=None)
@given(tables(), st.integers(1, 6), st.sampled_from([0.0, -0.2, -1.0]), st.integers(0, 30), st.data())
def test_a_start_of_the_ranking_is_a_tree(scorer, width, beta, budget, data):
    nodes = build_dartree(scorer, width=width, beta=beta, budget=budget)
    assert len(nodes.tokens) == min(budget, len(grow(scorer, width).tokens))
    for place, node in enumerate(nodes.ranking):
        assert nodes.parents[node] in {-1, *nodes.ranking[:place]}
    chain = [data.draw(st.integers(0, 6)) for _ in scorer.candidates_LC]
    forced = force_chain(nodes, chain, budget)
    prefixes = {tuple(chain[: depth + 1]) for depth in range(len(chain))}
    assert prefixes <= set(paths(forced))
    others = len(set(paths(nodes)) - prefixes)
    assert len(forced.tokens) == len(chain) + min(others, max(budget - len(chain), 0))


def test_one_call_a_depth():
    scorer = Table(torch.zeros(3, 4), torch.zeros(3, 4, 4), root=1)
    build_dartree(scorer, width=2, beta=-0.2, budget=5)
    assert scorer.calls == [(call, depth) for depth in range(3) for call in ("scores", "advance")][:-1]


def test_nothing_is_read_number_by_number():
    class NoScalarReads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(function), "a tree read a single number off the device"
            return function(*args, **(kwargs or {}))

    scorer = golden_scorer("domino_p0")
    with NoScalarReads():
        nodes = build_dartree(scorer, width=12, beta=-0.2, budget=64)
    assert len(nodes.tokens) == 64


def test_a_positive_beta_is_refused():
    with pytest.raises(UserError, match=r"--tree-beta is 0\.1"):
        build_dartree(golden_scorer("dspark_vanilla"), width=12, beta=0.1, budget=64)
