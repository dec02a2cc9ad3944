"""What a target's forward is to the decode loop, whoever computes it. Shape letters: R rows, F concatenated taps,
V vocabulary."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from dloop.hosts.greedy import greedy_tokens


class TargetRuntime(ABC):
    """Runs new rows behind those in the target's cache, where they become valid."""

    accepted_first = False
    """Whether the last verification moved the rows it accepts to the front, in the cache and among its features."""

    @abstractmethod
    def forward(self, ids_R: Tensor, positions_R: Tensor, mask: Tensor | None, last: bool) -> tuple[Tensor, Tensor]:
        """Logits [R, V], of the `last` row alone if so asked, and the tapped states [R, F] of all rows.

        `mask` (boolean [R, length + R], True: seen) describes a tree; without one the rows are a chain.
        """

    def verify(self, ids_R: Tensor, positions_R: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """The greedy token [R] behind every row, and the tapped states [R, F]."""
        logits_RV, features_RF = self.forward(ids_R, positions_R, mask, last=False)
        return greedy_tokens(logits_RV), features_RF

    def close(self) -> None:  # noqa: B027 (most hang nothing on the model)
        """Leave the model as it was."""
