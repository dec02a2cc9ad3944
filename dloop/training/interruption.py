"""SIGTERM as a request: clusters send it before they take a machine away."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType

EXIT_CODE = 143
"""128 + SIGTERM, as a shell reports it."""


class StopRequest:
    """Whether SIGTERM arrived while this context was open; what to do about it is left to its user."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopRequest:
        self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._previous)
