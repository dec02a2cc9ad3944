"""How the demo's target learns: tokenised conversations in, a trained target out.

Only answers carry loss, and the head sees only their rows. Conversations of similar length share a batch, so that
little is padding. A batch is a function of the step, so that a run goes on after a kill with the same result. Knows no
domain and no command line: `python -m dloop.demo.tiny_target` runs it. Shape letters: B batch, S longest conversation
of it, R answer tokens of it, V vocabulary.
"""

from __future__ import annotations

import io
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from dloop.cli import UserError
from dloop.hosts.target_model import decoder, head, soft_capped
from dloop.results.atomic import write_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WARMUP_STEPS = 50
LAST_RATE = 0.05
"""Share of the peak learning rate at the last step; the way down is a straight line."""
WINDOW = 16
"""Batches whose conversations are sorted by length together."""


@dataclass(frozen=True)
class Row:
    """One conversation: its domain, its tokens [L] and which of them are answers [L]."""

    domain: str
    ids: Tensor
    answer: Tensor


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a training run's result depends on, besides the rows."""

    architecture: str
    steps: int
    batch_size: int
    muon_rate: float
    adamw_rate: float
    seed: int
    data: str
    """Hash of the conversations and the tokenizer."""


@dataclass
class Progress:
    """Where a run stands: steps done, tokens seen, CPU-seconds spent, and the answers' loss by interval."""

    step: int = 0
    tokens: int = 0
    cpu_seconds: float = 0.0
    losses: list[tuple[int, float]] = field(default_factory=list)


def epoch_batches(rows: Sequence[Row], batch_size: int, seed: int, epoch: int) -> list[list[Row]]:
    """All rows once, in batches of similar length and random order: a function of `seed` and `epoch`."""
    rng = random.Random(f"{seed}/{epoch}")
    order = rng.sample(rows, len(rows))
    window = WINDOW * batch_size
    batches = []
    for start in range(0, len(order), window):
        chunk = sorted(order[start : start + window], key=lambda row: len(row.ids))
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    rng.shuffle(batches)
    return batches


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Ids and answer flags [B, S], padded on the right, where causal attention does not look."""
    ids = pad_sequence([row.ids for row in rows], batch_first=True)
    return ids, pad_sequence([row.answer for row in rows], batch_first=True)


def answer_logits(model: PreTrainedModel, ids_BS: Tensor, answer_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [R, V] of the answer tokens and these tokens [R], batch row by batch row."""
    hidden_BSD = decoder(model)(input_ids=ids_BS, use_cache=False).last_hidden_state
    asked = answer_BS[:, 1:]
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return soft_capped(head(model)(hidden_BSD[:, :-1][asked]), cap), ids_BS[:, 1:][asked]


def rate_share(step: int, steps: int) -> float:
    """Learning rate of step `step` (from 0) as a share of its peak: up for 50 steps, then a line down to 5 %."""
    up = (step + 1) / WARMUP_STEPS
    down = 1 - (1 - LAST_RATE) * (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return min(1.0, up, down)


class Optimizer:
    """Muon for the layers' matrices, AdamW for embedding and norms, one schedule for both.

    Muon (github.com/KellerJordan/Muon) reaches the same loss here in less processor time than AdamW alone.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"torch {torch.__version__} lacks the optimizer Muon: the demo needs torch 2.9 or newer")
        named = list(model.named_parameters())
        matrices = [value for name, value in named if value.ndim == 2 and "embed" not in name]
        others = [value for name, value in named if value.ndim != 2 or "embed" in name]
        self.recipe = recipe
        self.parameters = matrices + others
        self.muon = torch.optim.Muon(matrices, lr=recipe.muon_rate, weight_decay=0.1)
        self.adamw = torch.optim.AdamW(others, lr=recipe.adamw_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def step(self, step: int) -> None:
        """Apply and forget the gradients of step `step` (from 0)."""
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        share = rate_share(step, self.recipe.steps)
        self.muon.param_groups[0]["lr"] = share * self.recipe.muon_rate
        self.adamw.param_groups[0]["lr"] = share * self.recipe.adamw_rate
        for optimizer in (self.muon, self.adamw):
            optimizer.step()
            optimizer.zero_grad()


class Run:
    """One training run of `model` on `rows`; its state lies in `folder`, and a state of the same recipe is taken up."""

    def __init__(self, model: PreTrainedModel, rows: Sequence[Row], recipe: Recipe, folder: Path) -> None:
        self.model, self.rows, self.recipe = model, rows, recipe
        self.optimizer = Optimizer(model, recipe)
        self.progress = Progress()
        self.state_file = folder / "state.pt"
        self._epoch, self._batches = -1, list[list[Row]]()

    def train(self, save_interval: int) -> Progress:
        """Go on to the last step, saving every `save_interval` steps."""
        self._resume()
        self.model.train()
        recent: list[float] = []
        steps = range(self.progress.step, self.recipe.steps)
        for step in (bar := tqdm(steps, initial=steps.start, total=steps.stop, desc="target", mininterval=2.0)):
            recent.append(self._step(step))
            if (step + 1) % save_interval == 0 or step + 1 == steps.stop:
                self.progress.losses.append((step + 1, sum(recent) / len(recent)))
                bar.set_postfix(loss=f"{self.progress.losses[-1][1]:.3f}")
                recent.clear()
                self._save()
        return self.progress

    def _step(self, step: int) -> float:
        started = time.process_time()
        ids_BS, answer_BS = padded(self._batch(step))
        logits_RV, tokens_R = answer_logits(self.model, ids_BS, answer_BS)
        loss = F.cross_entropy(logits_RV, tokens_R)
        loss.backward()
        self.optimizer.step(step)
        self.progress.step = step + 1
        self.progress.tokens += ids_BS.numel()
        self.progress.cpu_seconds += time.process_time() - started
        return loss.item()

    def _batch(self, step: int) -> list[Row]:
        epoch, place = divmod(step, -(-len(self.rows) // self.recipe.batch_size))
        if epoch != self._epoch:
            self._batches = epoch_batches(self.rows, self.recipe.batch_size, self.recipe.seed, epoch)
            self._epoch = epoch
        return self._batches[place]

    def _save(self) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "progress": asdict(self.progress),
            "model": self.model.state_dict(),
            "muon": self.optimizer.muon.state_dict(),
            "adamw": self.optimizer.adamw.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_bytes(self.state_file, buffer.getvalue())

    def _resume(self) -> None:
        if not self.state_file.is_file():
            return
        state = torch.load(self.state_file, weights_only=True)
        if state["recipe"] != asdict(self.recipe):
            print(f"{self.state_file} belongs to a run with other settings: starting anew")
            return
        self.progress = Progress(**state["progress"])
        self.model.load_state_dict(state["model"])
        self.optimizer.muon.load_state_dict(state["muon"])
        self.optimizer.adamw.load_state_dict(state["adamw"])
        print(f"going on from step {self.progress.step} of {self.recipe.steps}")
