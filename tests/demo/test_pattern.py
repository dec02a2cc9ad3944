import random
from itertools import islice

from dloop.demo.pattern import Pattern


def _pattern() -> Pattern:
    return Pattern(lambda word, number: [(f"{word} {number}", "yes")], {"word": ("a", "b", "c"), "number": range(7)})


def test_every_combination_is_one_conversation():
    pattern = _pattern()
    questions = [pattern.conversation(number)[0][0] for number in range(pattern.size)]
    assert sorted(questions) == sorted(f"{word} {number}" for word in "abc" for number in range(7))


def test_a_stream_has_no_repetition_and_an_end():
    pattern = _pattern()
    questions = [turns[0][0] for turns in pattern.stream(random.Random(3))]
    assert len(set(questions)) == len(questions) == pattern.size


def test_a_stream_depends_on_its_seed_alone():
    pattern = _pattern()
    assert list(islice(pattern.stream(random.Random(3)), 5)) == list(pattern.stream(random.Random(3)))[:5]
    assert list(pattern.stream(random.Random(3))) != list(pattern.stream(random.Random(4)))
