"""Every program of the programming domains does what its question asks for."""

import math
import random
import re
from itertools import islice

import pytest

from dloop.demo.programs import COMPLETIONS, FUNCTIONS, INPUT_PROGRAMS

CHANGES = {
    "": lambda x: x,
    "the double of ": lambda x: x + x,
    "the triple of ": lambda x: x + x + x,
    "the square of ": lambda x: x**2,
    "the half of ": lambda x: x / 2,
    "the opposite of ": lambda x: 0 - x,
}
TESTS = {
    "above": lambda x, limit: x > limit,
    "below": lambda x, limit: x < limit,
    "divisible by": lambda x, limit: x // limit * limit == x,
    "other than": lambda x, limit: x != limit,
}
COLLECTIONS = {"sum": sum, "product": math.prod, "list": list, "set": set}


def _expected(text: str, values: list[int]) -> object:
    found = re.search(r"the (sum|product|list|set) of ((?:the \w+ of )?)all \w+ (\w+(?: by| than)?) (\d+)", text)
    assert found, text
    collection, change, test, limit = found.groups()
    return COLLECTIONS[collection](CHANGES[change](x) for x in values if TESTS[test](x, int(limit)))


def _code(answer: str) -> str:
    return answer.split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize("pattern", [*COMPLETIONS, *FUNCTIONS], ids=["complete", "write"])
def test_functions_return_what_is_asked(pattern):
    rng = random.Random(1)
    for [(question, answer)] in islice(pattern.stream(rng), 200):
        values = [rng.randint(-40, 40) for _ in range(12)]
        scope: dict[str, object] = {}
        exec(_code(answer), scope)
        function = next(value for name, value in scope.items() if name != "__builtins__")
        assert function(values) == _expected(question, values)


def test_completions_begin_with_what_they_complete():
    for [(question, answer)] in islice(COMPLETIONS[0].stream(random.Random(2)), 50):
        assert _code(answer).startswith(_code(question))


def test_input_programs_print_what_is_asked(monkeypatch, capsys):
    rng = random.Random(3)
    for [(question, answer)] in islice(INPUT_PROGRAMS[0].stream(rng), 100):
        values = [rng.randint(-40, 40) for _ in range(12)]
        monkeypatch.setattr("builtins.input", lambda line=" ".join(map(str, values)): line)
        exec(_code(answer), {})
        assert capsys.readouterr().out == f"{_expected(question, values)}\n"
