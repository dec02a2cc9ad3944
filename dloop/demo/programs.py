"""The three programming domains of the demo: complete a function, write a function, read a program's standard input.

All three share one family of loops: a collection of those items that pass a comparison, each item changed first.
Every program is right (the tests run it) and a function of its question. Knows no file and no model.
Used by `dloop.demo.corpus`.
"""

from typing import NamedTuple

from dloop.demo.pattern import Pattern, Turns
from dloop.demo.words import NAMES


class Collection(NamedTuple):
    """What a loop collects: the noun, its first value, the statement that takes one more value in."""

    noun: str
    empty: str
    take: str


class Comparison(NamedTuple):
    """Which items a loop keeps: how English says it, its one-word name, and the Python test."""

    words: str
    name: str
    test: str


ITEMS = {"ages": "age", "numbers": "number", "prices": "price", "scores": "score", "sizes": "size", "weights": "weight"}
COLLECTIONS = (
    Collection("sum", "0", "result += {}"),
    Collection("product", "1", "result *= {}"),
    Collection("list", "[]", "result.append({})"),
    Collection("set", "set()", "result.add({})"),
)
COMPARISONS = (
    Comparison("above", "above", "{} > {}"),
    Comparison("below", "below", "{} < {}"),
    Comparison("divisible by", "divisible", "{} % {} == 0"),
    Comparison("other than", "other", "{} != {}"),
)
CHANGES = {
    "": "{}",
    "the double of ": "2 * {}",
    "the triple of ": "3 * {}",
    "the square of ": "{0} * {0}",
    "the half of ": "{} / 2",
    "the opposite of ": "-{}",
}
"""How English says what happens to an item first, and the Python expression."""


class Task(NamedTuple):
    """One loop: what to collect from the items that pass `comparison` with `limit`, each put through `change`."""

    items: str
    collection: Collection
    change: str
    comparison: Comparison
    limit: int

    @property
    def words(self) -> str:
        """The task as a noun phrase: `the sum of the double of all prices above 7`."""
        return f"the {self.collection.noun} of {self.change}all {self.items} {self.kept}"

    @property
    def kept(self) -> str:
        """Which items count: `above 7`."""
        return f"{self.comparison.words} {self.limit}"

    def loop(self, indent: str) -> str:
        """The Python lines that compute `result`."""
        item = ITEMS[self.items]
        lines = (
            f"result = {self.collection.empty}",
            f"for {item} in {self.items}:",
            f"    if {self.comparison.test.format(item, self.limit)}:",
            f"        {self.collection.take.format(CHANGES[self.change].format(item))}",
        )
        return "\n".join(indent + line for line in lines)


def _complete_function(**slots: object) -> Turns:
    task = Task(**slots)  # type: ignore[arg-type]
    head = (
        f'```python\ndef {task.collection.noun}_{task.comparison.name}({task.items}):\n    """Return {task.words}."""\n'
    )
    answer = (
        f"{head}{task.loop('    ')}\n    return result\n```\n"
        f"The loop visits all {task.items} and takes those {task.kept}."
    )
    return [(f"Complete this function:\n{head}```", answer)]


def _write_function(container: str, **slots: object) -> Turns:
    task = Task(**slots)  # type: ignore[arg-type]
    function = f"find_{task.collection.noun}"
    question = f"Write a function to find {task.words} in a {container}."
    answer = (
        f"```python\ndef {function}({task.items}):\n{task.loop('    ')}\n    return result\n```\n"
        f"This is a function to find {task.words} in a {container}."
    )
    return [(question, answer)]


def _read_input(name: str, **slots: object) -> Turns:
    task = Task(**slots)  # type: ignore[arg-type]
    question = (
        f"Write a program for {name}. The input is one line with the {task.items}, separated by spaces. "
        f"Print {task.words}."
    )
    answer = (
        f"```python\ndef main():\n    {task.items} = [int(word) for word in input().split()]\n"
        f"{task.loop('    ')}\n    print(result)\n\n\nmain()\n```\n"
        f"This is a program for {name}. It reads the {task.items} and prints {task.words}."
    )
    return [(question, answer)]


_TASK = {
    "items": tuple(ITEMS),
    "collection": COLLECTIONS,
    "change": tuple(CHANGES),
    "comparison": COMPARISONS,
    "limit": range(2, 31),
}

COMPLETIONS = (Pattern(_complete_function, _TASK),)
FUNCTIONS = (Pattern(_write_function, {**_TASK, "container": ("list", "tuple")}),)
INPUT_PROGRAMS = (Pattern(_read_input, {**_TASK, "name": NAMES}),)
