"""Every equation and every result in the mathematical domains is right."""

import random
import re
from itertools import islice

import pytest

from dloop.demo.problems import ALGEBRA, COUNTING, WORD_PROBLEMS


def _recurrence(marks: int, start: int, add: int, terms: int) -> int:
    value = start
    for _ in range(terms - 1):
        value = (2 * value + add) % marks
    return value


# What the integers of a question, in their order, lead to.
ORACLES = {
    "_gets_more": lambda have, more: have + more,
    "_gives_away": lambda have, gives: have - gives,
    "_fills_boxes": lambda boxes, each: boxes * each,
    "_fills_bags_and_finds": lambda bags, each, more: bags * each + more,
    "_linear": lambda factor, add, total, then: (total - add) // factor + then,
    "_square": lambda exponent, add, at: at**exponent + add,
    "_dial": lambda marks, start, step, times: (start + step * times) % marks,
    "_recurrence": _recurrence,
}
PATTERNS = (*WORD_PROBLEMS, *ALGEBRA, *COUNTING)


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.write.__name__)
def test_results_are_right(pattern):
    for [(question, answer)] in islice(pattern.stream(random.Random(1)), 200):
        expected = ORACLES[pattern.write.__name__](*map(int, re.findall(r"\d+", question)))
        assert answer.endswith((f"#### {expected}", f"\\boxed{{{expected}}}.")), question


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.write.__name__)
def test_equations_on_the_way_are_right(pattern):
    for [(_, answer)] in islice(pattern.stream(random.Random(2)), 200):
        equations = re.findall(r"(\d+(?: [-+*^] \d+|\^\d+| mod \d+)+) = (\d+)(?!\d*[a-z^])", answer)
        assert equations
        for left, right in equations:
            assert eval(left.replace("^", "**").replace("mod", "%")) == int(right), answer
