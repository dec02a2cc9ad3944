"""Candidates and corrected scores for a draft tree over a block whose rows are corrected by what stands before them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from dloop.trees.best_ids import best_ids

CANDIDATES = 64
"""Candidates a depth, the same for all parents (magneto0124/DARTree)."""


class BlockScorer(ABC):
    """One stage's rows [T, D] and base logits [T, V]; a family adds its correction, in float32."""

    def __init__(self, rows_TD: Tensor, base_TV: Tensor, root_token: int) -> None:
        base_TV = base_TV.float()
        self.candidates_LC = best_ids(base_TV, min(CANDIDATES, base_TV.shape[-1]))
        self.rows_TD, self.base_LC = rows_TD, base_TV.gather(-1, self.candidates_LC)
        self.root_token = root_token

    def root_state(self) -> Tensor:
        """Recurrent state [1, G] behind the root; nothing where a correction depends on the parent's token alone."""
        return self.rows_TD.new_empty(1, 0)

    @abstractmethod
    def scores(self, depth: int, parent_tokens_P: Tensor, states_PG: Tensor) -> Tensor:
        """Corrected logits [P, C] of the candidates of `depth` (from 0) below each parent."""

    def advance(self, depth: int, states_WG: Tensor, tokens_W: Tensor) -> Tensor:
        """States [W, G] behind new nodes from their parents' states and their own tokens."""
        return states_WG

    def corrected(self, depth: int, latent_PM: Tensor, output_weight_VM: Tensor) -> Tensor:
        """Base scores plus a low-rank correction whose output rows are only needed for the candidates."""
        output_CM = output_weight_VM[self.candidates_LC[depth]]
        return self.base_LC[depth] + torch.mm(latent_PM.float(), output_CM.float().T)
