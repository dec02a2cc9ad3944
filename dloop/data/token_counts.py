"""How often each token is supervised in a training file: what a draft's own vocabulary is chosen by.

Every row counts once, whoever counts it: `rank` of `world_size` counts its own rows, and the sums over all ranks depend
on neither number.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from dloop.cli import UserError
from dloop.data.loader import ConversationDataset


def supervised_counts(
    dataset: ConversationDataset, token_ids: int, *, rank: int = 0, world_size: int = 1, num_workers: int = 0
) -> Tensor:
    """Occurrences int64 [token_ids] of each id among the supervised tokens of this rank's rows."""
    counts = torch.zeros(token_ids, dtype=torch.long)
    rows = range(rank, len(dataset), world_size)
    loader = DataLoader(_Supervised(dataset), batch_size=None, sampler=rows, num_workers=num_workers)
    for found in tqdm(loader, desc="count tokens", unit="row", disable=rank != 0, leave=False):
        if isinstance(found, UserError):
            raise found
        counts += torch.bincount(found, minlength=token_ids)
    return counts


class _Supervised(Dataset["Tensor | UserError"]):
    """Supervised ids by row. Errors travel as values: a worker process would wrap them in a traceback."""

    def __init__(self, dataset: ConversationDataset) -> None:
        self.dataset = dataset

    def __getitem__(self, row: int) -> Tensor | UserError:
        try:
            sample = self.dataset[row]
        except UserError as error:
            return error
        return sample.input_ids[sample.loss_mask.bool()]
