"""The contract every draft-model family fulfils, and the words both engines use to talk to it.

A *host* knows how to recognise, load and save one public checkpoint format, and hands out a *drafter* for decoding and
an *objective* for training. It knows neither the decode loop nor the trainer. Shape letters: B batch, S sequence,
D hidden size, F concatenated tap features, T drafts a stage, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from dloop.cli import UserError
from dloop.data.loader import Batch
from dloop.hosts.tree_options import LINEAR, TreeOptions
from dloop.trees.forced_chain import force_chain
from dloop.trees.nodes import Nodes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dloop.hosts.target_cache import TargetCache


@dataclass(frozen=True)
class Segment:
    """What one drafting stage proposes below its root.

    `chain` are the host's greedy tokens [T] (host integers), `log_probs` their log-probabilities after the host's own
    logit corrections, in float32. Both arrive in one packed read of the device.
    """

    chain: list[int]
    log_probs: list[float]

    @property
    def gate_sum(self) -> float:
        """Summed log-probability of the chain in nats: the quantity the gate looks at."""
        return sum(self.log_probs)

    def record(self) -> Segment:
        """The numbers alone, without what a host keeps to build its tree."""
        return Segment(self.chain, self.log_probs)

    def subtree(self, budget: int, whole_chain: bool = False) -> tuple[list[int], list[int]]:
        """Tokens and parents of at most `budget` nodes below the segment's root; parent -1 is that root.

        A host without a tree answers with its chain, whatever the budget. `whole_chain` demands that the chain is in
        the answer in full, because the next stage hangs below its last token.
        """
        return self.chain, list(range(-1, len(self.chain) - 1))


@dataclass(frozen=True)
class TreeSegment(Segment):
    """A segment of a host with draft trees; `grow` builds the host's own tree of so many nodes.

    `counts_root` is for a host whose budgets include the node the segment hangs below.
    """

    grow: Callable[[int], Nodes]
    counts_root: bool = False

    def subtree(self, budget: int, whole_chain: bool = False) -> tuple[list[int], list[int]]:
        if budget == 0:
            return super().subtree(0)
        budget -= self.counts_root
        nodes = self.grow(budget)
        if whole_chain:
            nodes = force_chain(nodes, self.chain, budget)
        return nodes.tokens, nodes.parents


class Drafter(Protocol):
    """A host at decode time, batch 1; owns its draft-side cache."""

    stage_length: int
    """Most tokens a stage drafts (T)."""

    def reset(self, capacity: int) -> None:
        """Forget everything and make room for `capacity` committed tokens."""

    def begin(self, features: Tensor, tokens: Sequence[int]) -> None:
        """Take the committed target features [n, F] that arrived since the last round, and the token behind each.

        The last of the n `tokens` is the round's root, which has no features yet.
        """

    def first_stage(self) -> Segment:
        """Draft behind the root."""

    def next_stage(self) -> Segment:
        """Draft one more stage behind the chain of the last segment."""

    def end(self) -> None:
        """Forget everything the stages wrote that the target has not confirmed."""


@dataclass(frozen=True)
class ObjectiveOptions:
    """Training settings an objective may need; a host refuses what it has no use for. None is the host's default."""

    num_anchors: int | None = None
    loss_decay_gamma: float | None = None
    dloop_max_stage: int | None = None
    dloop_loss_weight: float | None = None
    lambda_base_start: float | None = None
    lambda_base_decay_ratio: float | None = None
    ttt_length_dist: tuple[int, ...] | None = None
    attention_backend: str = "sdpa"
    seed: int = 42
    total_steps: int = 0
    """Optimizer steps of the run, the horizon of a curriculum; 0 is unknown."""
    from_scratch: bool = False
    """Whether the draft began untrained: then tensors are learnt too that a released draft keeps."""


@dataclass(frozen=True)
class TargetOutputs:
    """What the frozen target says about a training batch.

    `states` maps a tap name (a submodule path below the target's decoder, as `layers.9` or `norm`) to its output
    [B, S, D]; `position_offset_B` is what was added to each sample's rotary positions.
    """

    states: Mapping[str, Tensor]
    position_offset_B: Tensor


@dataclass(frozen=True)
class Loss:
    """One micro-step's loss: `total` is differentiated; `ratios` maps a metric to (numerator, denominator), both
    detached scalars, so that means over ranks and steps are sums of numerators over sums of denominators."""

    total: Tensor
    ratios: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


class Objective(nn.Module, ABC):
    """A host at training time. Its parameters that require gradients are exactly the draft's."""

    taps: tuple[str, ...]
    """Submodule paths of the target whose outputs the loss needs."""

    @abstractmethod
    def forward(self, batch: Batch, outputs: TargetOutputs, step: int) -> Loss:
        """Loss of one micro-batch at optimizer step `step` (from 0). Always connected to every parameter."""


class Host(ABC):
    """One draft-model family with one checkpoint loaded."""

    name: ClassVar[str]
    tree_defaults: ClassVar[Mapping[str, Any]]
    """The tree flags this family has, and what they default to."""
    start_flag: ClassVar[str] = "draft_init_path"
    """The training option that names a draft of this family to start from."""
    training_defaults: ClassVar[Mapping[str, float]] = MappingProxyType(
        {"learning_rate": 6e-4, "warmup_ratio": 0.04, "max_grad_norm": 1.0}
    )
    """What the trainer does where the command line leaves it open."""
    tensor_prefix: ClassVar[str] = ""
    """What the names of the draft's tensors begin with, where a checkpoint holds others beside them."""
    network: nn.Module
    """The trainable draft."""
    taps: tuple[str, ...]
    """Submodule paths of the target this draft listens to when decoding, in the order of its features."""

    @classmethod
    @abstractmethod
    def recognises(cls, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        """Whether a checkpoint with this `config.json` and these tensor names belongs to the family."""

    @classmethod
    @abstractmethod
    def load(
        cls,
        config: dict[str, Any],
        tensors: dict[str, Tensor] | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Host:
        """Build the draft from a checkpoint, strictly; with `tensors` None, from scratch (seeded by the caller)."""

    @abstractmethod
    def check_target(self, target: PreTrainedModel) -> None:
        """Raise a UserError when this draft cannot belong to `target`.

        Call it first: what a checkpoint leaves to its target (as the taps of an EAGLE-3 draft) is settled here.
        """

    def adopt_vocabulary(self, counts: Callable[[int], Tensor]) -> None:  # noqa: B027 (most have nothing to do)
        """Before training from scratch: choose a vocabulary of its own, where a family has one.

        `counts(rows)` goes through the training data and says how often each of `rows` token ids is supervised.
        """

    def refuse(self, options: ObjectiveOptions, *, because: str, **unused: object) -> None:
        """Raise when an option this family has no use for was given a value other than its neutral one."""
        for name, neutral in unused.items():
            if getattr(options, name) != neutral:
                flag = "--" + name.replace("_", "-")
                raise UserError(
                    f"{flag} {getattr(options, name)} has no effect on {self.name}: {because}; leave it out"
                )

    def facts(self) -> dict[str, str]:
        """What the draft is, in words a person reads: subject -> sentence."""
        return {}

    @abstractmethod
    def save(self, folder: Path, dtype: torch.dtype) -> None:
        """Write `config.json` and `model.safetensors` into the existing `folder`, in the host's own format."""

    @abstractmethod
    def drafter(self, target: PreTrainedModel, tree: TreeOptions = LINEAR, cache: TargetCache | None = None) -> Drafter:
        """The host at decode time, beside `target` (its embedding and its head) and, where it reads them, the keys and
        values in the target's `cache`."""

    @abstractmethod
    def objective(self, target: PreTrainedModel, options: ObjectiveOptions) -> Objective:
        """The host at training time, beside the frozen `target`."""
