"""The small closed word classes of the demo's texts: few words, so that copying them is learnt early."""

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
ITEMS = ("apples", "cards", "coins", "maps", "pencils", "shells", "stamps", "tickets")
PLACES = ("garden", "harbour", "library", "market", "school", "station")
LETTERS = ("k", "n", "t", "x", "y", "z")
ORDINALS = ("first", "second", "third", "fourth")
COUNTS = {2: "two", 3: "three", 4: "four"}
