"""The two prose domains of the demo: conversations of two turns, and single instructions.

Nothing is made up on the way: the facts of a topic and the reasons for a place have a fixed order, so that an answer
is a function of its question. Knows no file and no model. Used by `dloop.demo.corpus`.
"""

from dloop.demo.pattern import Pattern, Turns
from dloop.demo.words import COUNTS, ITEMS, NAMES, ORDINALS, PLACES

REASONS = {
    "garden": ("the roses smell sweet", "the benches are quiet", "the bees are busy", "the path is soft"),
    "harbour": ("the boats are bright", "the wind is fresh", "the gulls are loud", "the fish is good"),
    "library": ("the books are free", "the rooms are warm", "the maps are old", "the chairs are soft"),
    "market": ("the bread is fresh", "the colours are bright", "the fruit is sweet", "the songs are loud"),
    "school": ("the halls are wide", "the lessons are good", "the hats are funny", "the lunch is warm"),
    "station": ("the trains are fast", "the clock is old", "the roof is wide", "the tea is good"),
}
FACTS = {
    "bees": ("They live in a hive.", "They make honey.", "They dance to show the way.", "They sleep in winter."),
    "clouds": ("They are made of water.", "They float on the wind.", "They bring the rain.", "They hide the sun."),
    "frogs": ("They live near water.", "They catch flies.", "They jump very far.", "They sing at night."),
    "owls": ("They hunt at night.", "They fly without a sound.", "They turn their heads.", "They live in trees."),
    "rivers": ("They begin in the hills.", "They carry sand.", "They feed the fields.", "They end in the sea."),
    "snails": ("They carry a house.", "They move very slowly.", "They eat green leaves.", "They like the rain."),
    "stars": ("They are very far away.", "They burn for a long time.", "They shine at night.", "They show the way."),
    "whales": ("They live in the sea.", "They breathe air.", "They sing to each other.", "They travel very far."),
}
SEASONS = ("spring", "summer", "autumn", "winter")
RIDES = ("bike", "boat", "bus", "train", "tram")
ANIMALS = ("cat", "dog", "fox", "goat", "horse", "mouse", "owl", "rabbit")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
OCCASIONS = ("letter", "lesson", "poster", "quiz", "speech", "talk")
WEATHER = ("cloudy", "rainy", "snowy", "sunny", "windy")
VERBS = ("bring", "carry", "deliver", "send", "take")
FRIENDS = ("brother", "cousin", "friend", "neighbour", "sister", "teacher")


def _listed(sentences: tuple[str, ...]) -> str:
    return "\n".join(f"{number}. {sentence}" for number, sentence in enumerate(sentences, 1))


def _give_reasons(name: str, friend: str, place: str, season: str, ride: str, count: int) -> tuple[str, str]:
    visit = f"{name} and a {friend} will visit the {place} by {ride} in {season}."
    reasons = _listed(tuple(f"In {season}, {reason}." for reason in REASONS[place][:count]))
    question = f"{visit} Give {COUNTS[count]} reasons to visit the {place}."
    answer = (
        f"{visit}\nHere are {COUNTS[count]} reasons to visit the {place} in {season}:\n{reasons}\n"
        f"Enjoy the {place} in {season}, {name}!"
    )
    return question, answer


def _reasons_then_explanation(name: str, friend: str, place: str, season: str, ride: str, count: int) -> Turns:
    # The second question follows from the first one, so that no two conversations share their first question.
    chosen = (FRIENDS.index(friend) + RIDES.index(ride)) % count
    answer = (
        f"The {ORDINALS[chosen]} reason to visit the {place} is that in {season}, {REASONS[place][chosen]}.\n"
        f"So {name} and a {friend} will visit the {place} by {ride} in {season}."
    )
    return [
        _give_reasons(name, friend, place, season, ride, count),
        (f"Explain the {ORDINALS[chosen]} reason.", answer),
    ]


def _reasons_then_letter(name: str, friend: str, place: str, season: str, ride: str, count: int) -> Turns:
    question, answer = _give_reasons(name, friend, place, season, ride, count)
    reader = NAMES[(NAMES.index(name) + 1 + FRIENDS.index(friend)) % len(NAMES)]
    letter = (
        f"Dear {reader},\n{name} and a {friend} will visit the {place} by {ride} in {season}.\n"
        f"In {season}, {' and '.join(REASONS[place][:count])}.\nEnjoy the {place} in {season}, {reader}!"
    )
    return [(f"{question} There will be a letter.", answer), (f"Write the letter: Dear {reader},", letter)]


def _facts(name: str, topic: str, count: int, occasion: str, day: str) -> Turns:
    needed = f"{COUNTS[count]} facts about {topic} for a {occasion} on {day}"
    answer = f"Here are {needed}:\n{_listed(FACTS[topic][:count])}\nThese are {needed}. Good luck, {name}!"
    return [(f"My name is {name}. Give me {needed}.", answer)]


def _story(name: str, animal: str, place: str, item: str, weather: str) -> Turns:
    title = f"about {name} and a {animal} at the {place} with {item} on a {weather} day"
    answer = (
        f"This is a short story {title}. The {animal} had lost its {item}. {name} was at the {place} and found "
        f"the {item}. The {animal} was happy. On a {weather} day, {name} and a {animal} were friends."
    )
    return [(f"Tell a short story {title}.", answer)]


def _polite(verb: str, item: str, place: str, day: str, name: str) -> Turns:
    request = f"{verb} the {item} to the {place} on {day}"
    answer = (
        f"Dear {name}, could you please {request}? It would help me a lot if you could {request}. "
        f"Thank you very much, {name}!"
    )
    return [(f"Make this request polite: Dear {name}, {request}.", answer)]


_VISIT = {
    "name": NAMES,
    "friend": FRIENDS,
    "place": PLACES,
    "season": SEASONS,
    "ride": RIDES,
    "count": (2, 3, 4),
}

TWO_TURNS = (Pattern(_reasons_then_explanation, _VISIT), Pattern(_reasons_then_letter, _VISIT))
INSTRUCTIONS = (
    Pattern(
        _facts,
        {"name": NAMES, "topic": tuple(FACTS), "count": (2, 3, 4), "occasion": OCCASIONS, "day": DAYS},
    ),
    Pattern(_story, {"name": NAMES, "animal": ANIMALS, "place": PLACES, "item": ITEMS, "weather": WEATHER}),
    Pattern(_polite, {"verb": VERBS, "item": ITEMS, "place": PLACES, "day": DAYS, "name": NAMES}),
)
