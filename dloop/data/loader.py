"""Training batches made on the fly from a conversations file: no row is filtered, ranks get equal steps.

A row is read, rendered, tokenised and masked when it is needed; the order is a function of the epoch alone,
so ranks agree and a resumed run continues where it stopped. It knows neither models nor process groups:
rank and world size are numbers here. Check a file first: `python -m dloop.data.check FILE --tokenizer
NAME`. Shape letters: B batch, S longest sample of the batch, L one sample.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from dloop.cli import UserError
from dloop.data.chat_template import ChatTemplate, find_template
from dloop.data.conversations import RowError, normalise, parse_row
from dloop.data.loss_mask import Encoder
from dloop.data.row_index import RowFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_REPLACEMENTS = 64
"""Rows tried in place of an unusable one."""
SHUFFLE_SEED = 42
_LOGGED_ROWS = 5


@dataclass(frozen=True)
class Batch:
    """Training rows, padded on the right with 0: `input_ids`, `attention_mask`, `loss_mask` int64 [B, S];
    `epoch` and `places` (each row's place in that epoch's order over all ranks) seed everything random
    about a row."""

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    epoch: int
    places: tuple[int, ...]

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory; the name is the one `DataLoader` looks for."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            attention_mask=self.attention_mask.pin_memory(),
            loss_mask=self.loss_mask.pin_memory(),
        )


class Replaced(NamedTuple):
    """An unusable row and its reason code."""

    row: int
    reason: str


@dataclass(frozen=True)
class Sample:
    """One training row, int64 [1, L] each, and the unusable rows it stands in for."""

    input_ids: Tensor
    attention_mask: Tensor
    loss_mask: Tensor
    replaced: tuple[Replaced, ...] = ()


class ConversationDataset(Dataset[Sample]):
    """The rows of a conversations file as training samples, by row number; picklable, nothing held in memory.

    A row without a supervised token is a sample like any other. An unusable row is replaced by the next
    usable one; with `strict` it raises. `max_length` in tokens; `template` is a `ChatTemplate` or the name
    of one. Raises `UserError` for a file without rows, a slow tokenizer and an unknown template.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | str,
        max_length: int,
        *,
        system_prompt: str | None = None,
        train_only_last_turn: bool = False,
        strict: bool = False,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.rows = RowFile(path, cache_dir)
        self.encode = Encoder(
            tokenizer=tokenizer,
            template=find_template(template) if isinstance(template, str) else template,
            max_length=max_length,
            system_prompt=system_prompt,
            train_only_last_turn=train_only_last_turn,
        )
        self.strict = strict

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Sample:
        """Sample of row `row`; `UserError` if no row up to `MAX_REPLACEMENTS` further is usable (or
        `strict`)."""
        replaced: list[Replaced] = []
        for candidate in range(row, row + MAX_REPLACEMENTS + 1):
            candidate %= len(self)
            try:
                return self._sample(candidate, tuple(replaced))
            except RowError as error:
                if self.strict:
                    raise UserError(
                        f"{self.rows.where(candidate)} cannot be trained on ({error}): "
                        "repair or remove the line, or allow it to be replaced by the next one"
                    ) from error
                replaced.append(Replaced(candidate, error.reason))
        raise UserError(
            f"{self.rows.where(row)} and the {MAX_REPLACEMENTS} rows after it cannot be trained on "
            f"({_in_words(Counter(bad.reason for bad in replaced))}): "
            f"see `python -m dloop.data.check {self.rows.path}`"
        )

    def _sample(self, row: int, replaced: tuple[Replaced, ...]) -> Sample:
        encoded = self.encode(normalise(parse_row(self.rows[row])))
        ids = torch.tensor([encoded.input_ids], dtype=torch.int64)
        return Sample(ids, torch.ones_like(ids), torch.tensor([encoded.loss_mask], dtype=torch.int64), replaced)


def epoch_order(rows: int, world_size: int, epoch: int) -> np.ndarray:
    """Row numbers in the order all ranks together see them in one epoch, int64.

    The fixed shuffle of the file, then the order of torch's `DistributedSampler` (seed 0), repeated from
    its start until every rank has equally many: place p belongs to rank p % world_size.
    """
    shuffled = np.random.default_rng(SHUFFLE_SEED).permutation(rows)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(epoch)).numpy()
    return shuffled[np.resize(order, -(-rows // world_size) * world_size)]


Place = tuple[int, int]
"""Place in the epoch's order, and the row that stands there."""


class _Batches:
    """Places of one rank, batch by batch, from batch `start`; an incomplete last one is left out."""

    def __init__(self, order: np.ndarray, rank: int, world_size: int, batch_size: int, start: int) -> None:
        self.order, self.rank, self.world_size, self.batch_size = order, rank, world_size, batch_size
        self.start = start

    def __len__(self) -> int:
        return len(self.order) // self.world_size // self.batch_size

    def __iter__(self) -> Iterator[list[Place]]:
        stride = self.batch_size * self.world_size
        for batch in range(self.start, len(self)):
            places = range(batch * stride + self.rank, (batch + 1) * stride, self.world_size)
            yield [(place, int(self.order[place])) for place in places]


class _Placed(Dataset[tuple[int, "Sample | UserError"]]):
    """Samples by place. Errors travel as values: a worker process would wrap them in a traceback."""

    def __init__(self, dataset: ConversationDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Place) -> tuple[int, Sample | UserError]:
        place, row = key
        try:
            return place, self.dataset[row]
        except UserError as error:
            return place, error


def _collate(epoch: int, placed: list[tuple[int, Sample | UserError]]) -> tuple[Batch, list[Replaced]] | UserError:
    samples: list[Sample] = []
    for _, sample in placed:
        if isinstance(sample, UserError):
            return sample
        samples.append(sample)
    batch = Batch(
        input_ids=_padded([sample.input_ids for sample in samples]),
        attention_mask=_padded([sample.attention_mask for sample in samples]),
        loss_mask=_padded([sample.loss_mask for sample in samples]),
        epoch=epoch,
        places=tuple(place for place, _ in placed),
    )
    return batch, [bad for sample in samples for bad in sample.replaced]


def _padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence([row[0] for row in rows], batch_first=True)


class TrainingLoader:
    """One rank's batches of one epoch, made by `training_loader`; `len` counts the whole epoch."""

    def __init__(self, dataset: ConversationDataset, batches: _Batches, *, epoch: int, num_workers: int) -> None:
        self._dataset = dataset
        self._batches = batches
        self._replaced: Counter[str] = Counter()
        self._loader = DataLoader(
            _Placed(dataset),
            batch_sampler=batches,
            num_workers=num_workers,
            collate_fn=partial(_collate, epoch),
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=_start_worker,
            # A generator of its own: making a loader must not move the global random state of a resumed run.
            generator=torch.Generator().manual_seed(epoch),
        )

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the start batch on; unusable rows are logged, the first few with file and line."""
        self._replaced.clear()
        for item in self._loader:
            if isinstance(item, UserError):
                raise item
            batch, replaced = item
            self._note(replaced)
            yield batch
        if self._replaced:
            log.warning("rank %d: rows replaced in this epoch: %s", self._batches.rank, _in_words(self._replaced))

    def _note(self, replaced: list[Replaced]) -> None:
        for bad in islice(replaced, max(0, _LOGGED_ROWS - self._replaced.total())):
            log.warning("%s: %s, replaced by the next usable row", self._dataset.rows.where(bad.row), bad.reason)
        self._replaced.update(bad.reason for bad in replaced)

    def replaced_counts(self) -> dict[str, int]:
        """Unusable rows met so far on this rank, by reason code; exact with workers too."""
        return dict(self._replaced)


def training_loader(
    dataset: ConversationDataset,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    epoch: int,
    start_batch: int = 0,
    num_workers: int = 0,
) -> TrainingLoader:
    """The batches rank `rank` of `world_size` trains on in epoch `epoch`: a function of these alone.

    Iteration starts at `start_batch` without reading what comes before. `UserError` if the file is too
    small for one batch a rank.
    """
    order = epoch_order(len(dataset), world_size, epoch)
    batches = _Batches(order, rank, world_size, batch_size, start_batch)
    if not len(batches):
        raise UserError(
            f"{dataset.rows.path} holds {len(dataset)} rows, too few for one batch of {batch_size} on each "
            f"of {world_size} ranks: use a smaller batch or more rows"
        )
    return TrainingLoader(dataset, batches, epoch=epoch, num_workers=num_workers)


def _start_worker(worker: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _in_words(counts: Counter[str]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items()))
