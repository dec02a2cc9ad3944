"""The unroll length of a step."""

from collections import Counter

from dloop.hosts.unroll.schedule import unroll_length


def test_lengths_are_uniform_and_follow_from_seed_and_step_alone():
    drawn = [unroll_length((7, 14, 21), 42, step) for step in range(3000)]
    assert drawn == [unroll_length([7, 14, 21], 42, step) for step in range(3000)]
    assert all(900 < count < 1100 for count in Counter(drawn).values())
    assert drawn != [unroll_length((7, 14, 21), 43, step) for step in range(3000)]


def test_one_length_is_always_drawn():
    assert {unroll_length((3,), 0, step) for step in range(20)} == {3}
