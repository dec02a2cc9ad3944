"""The three mathematical domains of the demo: word problems, algebra, and counting modulo a number line by line.

Numbers stay below 50, so that a tiny model can learn sums and products as tables, and an answer begins by saying the
question again. Every answer is right (the tests recompute it) and a function of its question. Knows no file and no
model. Used by `dloop.demo.corpus`.
"""

from dloop.demo.pattern import Pattern, Turns
from dloop.demo.words import ITEMS, LETTERS, NAMES, PLACES


def _gets_more(name: str, item: str, place: str, have: int, more: int) -> Turns:
    total = have + more
    story = f"{name} has {have} {item} and gets {more} more at the {place}."
    answer = f"{story}\nAdd: {have} + {more} = {total}.\nSo {name} has {total} {item} now.\n#### {total}"
    return [(f"{story} How many {item} does {name} have now?", answer)]


def _gives_away(name: str, item: str, place: str, gives: int, left: int) -> Turns:
    have = gives + left
    story = f"{name} has {have} {item} and gives {gives} away at the {place}."
    answer = f"{story}\nSubtract: {have} - {gives} = {left}.\nSo {name} has {left} {item} left.\n#### {left}"
    return [(f"{story} How many {item} does {name} have left?", answer)]


def _fills_boxes(name: str, item: str, place: str, boxes: int, each: int) -> Turns:
    total = boxes * each
    story = f"{name} fills {boxes} boxes with {each} {item} each at the {place}."
    answer = f"{story}\nMultiply: {boxes} * {each} = {total}.\nSo {name} has {total} {item} in total.\n#### {total}"
    return [(f"{story} How many {item} does {name} have in total?", answer)]


def _fills_bags_and_finds(name: str, item: str, place: str, bags: int, each: int, more: int) -> Turns:
    packed = bags * each
    total = packed + more
    story = f"{name} has {bags} bags with {each} {item} each and finds {more} more at the {place}."
    answer = (
        f"{story}\nMultiply: {bags} * {each} = {packed}.\nAdd: {packed} + {more} = {total}.\n"
        f"So {name} has {total} {item} in total.\n#### {total}"
    )
    return [(f"{story} How many {item} does {name} have in total?", answer)]


def _linear(letter: str, factor: int, root: int, add: int, then: int) -> Turns:
    product, result = factor * root, root + then
    known = f"{factor}{letter} + {add} = {product + add}"
    answer = (
        f"We know that {known}.\nSubtract {add} from both sides: {factor}{letter} = {product}.\n"
        f"Divide both sides by {factor}: {letter} = {root}.\n"
        f"Therefore {letter} + {then} = {root} + {then} = {result}.\nThe answer is \\boxed{{{result}}}."
    )
    return [(f"We know that {known}. What is {letter} + {then}?", answer)]


def _square(name: str, function: str, letter: str, add: int, at: int) -> Turns:
    square, value = at * at, at * at + add
    known = f"{name} defines {function}({letter}) = {letter}^2 + {add}."
    answer = (
        f"{known}\nSubstitute {at} for {letter}: {function}({at}) = {at}^2 + {add}.\n"
        f"The square is {at}^2 = {square}.\nTherefore {function}({at}) = {square} + {add} = {value}.\n"
        f"The answer is \\boxed{{{value}}}."
    )
    return [(f"{known} Find {function}({at}).", answer)]


def _dial(name: str, place: str, marks: int, start: int, step: int, times: int) -> Turns:
    known = f"The dial at the {place} counts modulo {marks}. {name} sets it to {start} and adds {step} each turn."
    at, lines = start, [known]
    for turn in range(1, times + 1):
        moved = at + step
        lines.append(f"Turn {turn}: {at} + {step} = {moved}, and {moved} mod {marks} = {moved % marks}.")
        at = moved % marks
    lines.append(f"The answer is \\boxed{{{at}}}.")
    return [(f"{known} Where is it after {times} turns?", "\n".join(lines))]


def _recurrence(name: str, letter: str, marks: int, start: int, add: int, terms: int) -> Turns:
    known = (
        f"The sequence {letter} of {name} counts modulo {marks}. It starts at {start}, "
        f"and the next term is twice the term plus {add}."
    )
    at, lines = start, [known]
    for term in range(2, terms + 1):
        value = 2 * at + add
        lines.append(f"Term {term}: 2 * {at} + {add} = {value}, and {value} mod {marks} = {value % marks}.")
        at = value % marks
    lines.append(f"The answer is \\boxed{{{at}}}.")
    return [(f"{known} What is term {terms}?", "\n".join(lines))]


_STORY = {"name": NAMES, "item": ITEMS, "place": PLACES}

WORD_PROBLEMS = (
    Pattern(_gets_more, {**_STORY, "have": range(2, 13), "more": range(2, 10)}),
    Pattern(_gives_away, {**_STORY, "gives": range(2, 10), "left": range(2, 13)}),
    Pattern(_fills_boxes, {**_STORY, "boxes": range(2, 10), "each": range(2, 6)}),
    Pattern(_fills_bags_and_finds, {**_STORY, "bags": range(2, 6), "each": range(2, 6), "more": range(2, 10)}),
)
ALGEBRA = (
    Pattern(
        _linear,
        {"letter": LETTERS, "factor": range(2, 5), "root": range(2, 10), "add": range(1, 10), "then": range(1, 10)},
    ),
    Pattern(
        _square,
        {"name": NAMES, "function": "fgh", "letter": LETTERS, "add": range(1, 10), "at": range(2, 7)},
    ),
)
COUNTING = (
    Pattern(
        _dial,
        {
            "name": NAMES,
            "place": PLACES,
            "marks": range(5, 9),
            "start": range(5),
            "step": range(2, 8),
            "times": range(3, 6),
        },
    ),
    Pattern(
        _recurrence,
        {
            "name": NAMES,
            "letter": LETTERS,
            "marks": range(5, 9),
            "start": range(5),
            "add": range(1, 7),
            "terms": range(4, 7),
        },
    ),
)
