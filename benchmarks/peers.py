"""The decoders that are compared: transformers' own generation loops, and ours in all its modes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from probes import Watched
from torch import nn
from transformers import PreTrainedModel

from dloop.decoding.clock import Clock
from dloop.decoding.gate import Gate
from dloop.decoding.loop import Settings, SilentDrafter, generate
from dloop.decoding.static_drafter import StaticBackbone, over_static_shapes
from dloop.decoding.target import Target
from dloop.hosts.block.drafter import BlockDrafter
from dloop.hosts.host import Drafter, Host
from dloop.hosts.target_model import embedding, head
from dloop.hosts.tree_options import TreeOptions

LIBRARY_NAMES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


@dataclass(frozen=True)
class Run:
    """One response: its new ids, the verifications it took, tokens they accepted (the target's own counted) and
    verified, additional stages, and, where the loop is ours, seconds by part."""

    ids: list[int]
    rounds: int
    accepted: int
    verified: int
    extra_stages: int = 0
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """One decoder. `answer` decodes so many tokens; `targets` and `drafts` are the calls that run a network."""

    name: str
    answer: Callable[[int], Run]
    targets: list[Watched]
    drafts: list[Watched]
    against: str | None = None
    """The decoder of the library that does the same."""


def library_greedy(model: PreTrainedModel, prompt: list[int]) -> Peer:
    """transformers' `generate`."""
    return _library("transformers generate", model, prompt, [])


def library_assisted(model: PreTrainedModel, assistant: PreTrainedModel, prompt: list[int]) -> Peer:
    """transformers' assisted generation."""
    return _library("transformers assisted", model, prompt, [(assistant, "forward")], assistant_model=assistant)


def library_dflash(model: PreTrainedModel, draft: PreTrainedModel, prompt: list[int]) -> Peer:
    """transformers' DFlash generation."""
    arguments = {"assistant_model": draft, "speculation_type": "dflash"}
    return _library("transformers DFlash", model, prompt, [(draft, "forward")], **arguments)


def _library(name: str, model: PreTrainedModel, prompt: list[int], drafts: list[Watched], **arguments: Any) -> Peer:
    ids = torch.tensor([prompt], device=embedding(model).weight.device)
    # An argument of None leaves the configured one in force, and a response must have its full length.
    model.generation_config.eos_token_id = None

    def answer(tokens: int) -> Run:
        rows: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        try:
            output = model.generate(ids, do_sample=False, max_new_tokens=tokens, **arguments)
        finally:
            hook.remove()
        # The first forward reads the prompt.
        return Run(output[0, len(prompt) :].tolist(), len(rows) - 1, tokens - 1, sum(rows[1:]))

    # The head is watched beside the models: the library's drafts go through it outside of both.
    return Peer(name, answer, [(model, "forward")], [*drafts, (head(model), "forward")] if drafts else [])


def library_draft(host: Host) -> PreTrainedModel:
    """A DFlash draft in the library's class (transformers:models/muse_glimmer_assistant): other names, same tensors."""
    config = host.network.config
    weight = host.network.fc.weight
    draft = transformers.MuseGlimmerAssistantModel(
        transformers.MuseGlimmerAssistantConfig(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
            block_size=config.block_size,
            vocab_size=config.vocab_size,
            mask_token_id=config.mask_token_id,
            target_layer_ids=list(config.target_layers),
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            layer_types=["full_attention"] * config.layers,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    ).to(weight.device, weight.dtype)
    draft.load_state_dict({LIBRARY_NAMES.get(name, name): t for name, t in host.network.state_dict().items()})
    return draft.eval().requires_grad_(False)


def ours(
    name: str,
    model: PreTrainedModel,
    host: Host | None,
    prompt: list[int],
    runtime: str,
    before_stage: Callable[[], None] | None = None,
    gate: float = 1.0,
    tree_budget: int = 0,
    stage_tree_budget: int = 0,
    against: str | None = None,
) -> Peer:
    """Our loop under one setting; without a `host` it is autoregressive decoding. `before_stage` is called before every
    stage of a block drafter."""
    tree = TreeOptions(tree_budget, stage_tree_budget)
    target = Target(model, host.taps if host else (), runtime)
    drafter: Drafter = host.drafter(model, tree, target.cache) if host else SilentDrafter()
    if host and runtime == "graphs":
        drafter = over_static_shapes(drafter)
    calls = _draft_calls(model, host, drafter)
    if isinstance(drafter, BlockDrafter) and before_stage is not None:
        drafter.backbone = _preceded(drafter.backbone, before_stage)

    def answer(tokens: int) -> Run:
        settings = Settings(tokens, frozenset(), Gate(gate), tree_budget, stage_tree_budget)
        clock = Clock(target.device)
        response = generate(target, drafter, prompt, settings, clock)
        return Run(
            response.output_ids,
            len(response.rounds),
            sum(r.acceptance_length for r in response.rounds),
            sum(r.verified_tokens for r in response.rounds),
            sum(len(r.segments) - 1 for r in response.rounds),
            clock.read(),
        )

    # A captured verification cannot be looked into: its greedy choice counts as the network's.
    watched = ("forward", "verify") if runtime == "graphs" else ("forward",)
    return Peer(name, answer, [(target._runtime, call) for call in watched], calls, against)


def _preceded(stage: Any, before_stage: Callable[[], None]) -> Any:
    def both(*arguments: Any) -> Any:
        before_stage()
        return stage(*arguments)

    return both


def _draft_calls(model: PreTrainedModel, host: Host | None, drafter: Drafter) -> list[Watched]:
    if host is None:
        return []
    parts: list[nn.Module] = [*host.network.modules(), head(model), embedding(model)]
    calls: list[Watched] = [(part, "forward") for part in parts]
    if not isinstance(drafter, BlockDrafter):
        return calls
    # Block drafts run past their modules' own forwards; a captured stage cannot be looked into.
    static = isinstance(drafter.backbone, StaticBackbone)
    return [(drafter, "backbone")] if static else [*calls, (drafter.backbone, "run")]
