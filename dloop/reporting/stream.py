"""An answer appearing in the terminal, every token in the colour of the drafting stage that proposed it.

Finished lines are printed for good; the line being written and the numbers below it are redrawn. Where there is no
terminal only the text and the last numbers are written. Knows tokens and counts, no model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

TARGET = "dim"
STAGES = ("#56b4e9", "#e69f00 underline", "#cc79a7 bold underline")
"""First stage, first additional one, all later ones; apart by weight and line as well as by colour."""


class Detokenizer:
    """Turns tokens into text one by one; a character of several tokens appears with its last one."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = self._done = 0

    def add(self, token: int) -> str:
        """The text that `token` completes, perhaps none."""
        self._ids.append(token)
        # Decoded behind its predecessors: some tokenizers drop the space in front of a first token.
        before = self._decode(self._ids[self._start : self._done])
        after = self._decode(self._ids[self._start :])
        if after.endswith("\ufffd") or len(after) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return after[len(before) :]


class AnswerView:
    """Shows one answer. Call it as the decode loop's watcher, inside a `with` block."""

    def __init__(
        self,
        console: Console,
        decode: Callable[[Sequence[int]], str],
        stops: frozenset[int],
        plain_rate: float | None = None,
    ) -> None:
        self._text, self._stops, self._plain_rate = Detokenizer(decode), stops, plain_rate
        self._line = Text()
        self._stopped = False
        self._since = 0.0
        self.tokens, self.rounds, self.extra_stages, self.seconds = 0, 0, 0, 0.0
        self._live = Live(console=console, auto_refresh=False, get_renderable=self._show)

    def __enter__(self) -> AnswerView:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()
        if not self._live.console.is_terminal:
            self._live.console.print()

    def __call__(self, tokens: Sequence[int], accepted_by_stage: Sequence[int] | None) -> None:
        """Show what a round emitted: what each stage had accepted, then the target's own token."""
        if accepted_by_stage is not None:
            # The clock stands still while this class draws: only decoding counts.
            self.seconds += time.perf_counter() - self._since
            self.rounds += 1
            self.extra_stages += len(accepted_by_stage) - 1
            self.tokens += len(tokens)
        for token, style in zip(tokens, styles(accepted_by_stage or ()), strict=True):
            self._stopped = self._stopped or token in self._stops
            if not self._stopped:
                self._write(self._text.add(token), style)
        self._live.refresh()
        self._since = time.perf_counter()

    def _write(self, words: str, style: str) -> None:
        *finished, rest = words.split("\n")
        for part in finished:
            self._line.append(part, style)
            self._live.console.print(self._line)
            self._line = Text()
        self._line.append(rest, style)

    def _show(self) -> Group:
        return Group(self._line, Text(self.summary(), style="dim"))

    def summary(self) -> str:
        """Acceptance length, additional stages and speed so far."""
        if not self.rounds or not self.seconds:
            return ""
        rate = self.tokens / self.seconds
        parts = [
            f"τ {self.tokens / self.rounds:.2f}",
            f"{self.rounds} rounds, {self.extra_stages} additional stage{'s' * (self.extra_stages != 1)}",
            f"{rate:.0f} tokens/s",
        ]
        if self._plain_rate:
            parts[-1] += f" (autoregressive {self._plain_rate:.0f}: {rate / self._plain_rate:.2f}x)"
        return " · ".join(parts)


def styles(accepted_by_stage: Sequence[int]) -> list[str]:
    """One style a token of a round: the stages' accepted ones in order, the target's own at the end."""
    drafted = [
        STAGES[min(stage, len(STAGES) - 1)] for stage, count in enumerate(accepted_by_stage) for _ in range(count)
    ]
    return [*drafted, TARGET]


def legend() -> Text:
    """What the colours mean."""
    words = ("first stage", "first additional stage", "later stages")
    parts = [part for style, name in zip(STAGES, words, strict=True) for part in ((name, style), "  ")]
    return Text.assemble("tokens by who proposed them: ", *parts, ("the target itself", TARGET))
