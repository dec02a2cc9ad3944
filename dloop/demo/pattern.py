"""A prompt pattern: a writer and the closed classes of words and numbers it draws from.

Every combination of slot values is one conversation with a number of its own, so that a draw without repetition is a
draw of numbers, and sets drawn one after the other have nothing in common. Knows no domain and no file.
Used by `dloop.demo.corpus`.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Turns = list[tuple[str, str]]
"""A conversation: (what the user says, what the assistant answers), one pair a turn."""


@dataclass(frozen=True)
class Pattern:
    """`write(**slots)` gives the turns; no two combinations of slot values may have the same first question."""

    write: Callable[..., Turns]
    slots: Mapping[str, Sequence[Any]]

    @property
    def size(self) -> int:
        """How many different conversations the pattern has."""
        return prod(len(choices) for choices in self.slots.values())

    def conversation(self, number: int) -> Turns:
        """The turns of combination `number` (0 <= number < size): its digits in the slots' mixed radix."""
        values = {}
        for slot, choices in self.slots.items():
            number, digit = divmod(number, len(choices))
            values[slot] = choices[digit]
        return self.write(**values)

    def stream(self, rng: random.Random) -> Iterator[Turns]:
        """All conversations in random order, one at a time: how many are taken does not change which come first."""
        drawn: set[int] = set()
        while len(drawn) < self.size:
            number = rng.randrange(self.size)
            if number not in drawn:
                drawn.add(number)
                yield self.conversation(number)
