"""Make the smoke files: sentences of a small grammar whose entropy is known exactly.

    python make_materials.py            writes train_smoke.npy and val_smoke.npy

A sentence is

    determiner [adjective] noun [adverb] verb preposition place mark

and three choices are tied to an earlier word: the noun is singular or plural like the determiner,
the verb like the noun, and the place is mostly where that animal lives. The adjective and the
adverb come in between and tell nothing, so a model that looks at one word only (a bigram model)
guesses where a model that looks at the last four words knows. How well the best such model can do
is the entropy rate, and it follows from the weights below, not from the data:
``entropy_rate()``. A model's loss on these files can approach it and, on the average, not beat it.

Draws come from SHAKE-256, not from a random number generator, whose stream may change with the
version: the same files on every machine.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
FILES = {"train_smoke.npy": ("train", 64), "val_smoke.npy": ("val", 8)}
ROW_LEN = 4096

DETERMINERS = ("a", "every", "this", "that", "two", "some", "these", "those")
ADJECTIVES = ("small", "old", "quiet", "red", "quick", "clever", "hungry", "strange")
ANIMALS = ("fox", "bear", "trout", "crab", "owl", "hawk", "dog", "hen")
ADVERBS = ("often", "rarely", "always", "never")
VERBS = ("sing", "sleep", "wait", "dance", "hide", "dream")
PREPOSITIONS = ("near", "under", "behind", "above")
PLACES = ("forest", "cave", "river", "sea", "cliff", "cloud", "farm", "barn")
MARKS = (".", "!", "?", ";")

PLURALS = {"fox": "foxes", "trout": "trouts"}  # the others take an s
NOUNS = (ANIMALS, tuple(PLURALS.get(animal, animal + "s") for animal in ANIMALS))
FORMS = (tuple(verb + "s" for verb in VERBS), VERBS)  # the animal sings, the animals sing

WORDS = (*DETERMINERS, *ADJECTIVES, *NOUNS[0], *NOUNS[1], *ADVERBS, *FORMS[0], *FORMS[1],
         *PREPOSITIONS, *PLACES, *MARKS)  # fmt: skip
IDS = {word: token for token, word in enumerate(WORDS)}

# Weights sum to 16 and are scaled to 256, so that one byte of SHAKE-256 decides a draw exactly.
DRAWS = 256
EIGHT = (4, 3, 2, 2, 2, 1, 1, 1)
SIX = (6, 4, 2, 2, 1, 1)
FOUR = (8, 4, 3, 1)
AT_HOME, ELSEWHERE = (150, 70), 6  # where an animal lives there are two places; six are elsewhere

State = tuple[str, int, int]  # the slot to fill, the number (0 singular, 1 plural), the animal
Choice = tuple[str, int, State]  # a word, its weight in DRAWS, the state after it
START: State = ("determiner", 0, 0)


def choices(state: State) -> list[Choice]:
    """Return the words that can come next; their weights sum to DRAWS."""
    slot, number, animal = state
    if slot == "determiner":
        return [
            (word, DRAWS // 8, ("after determiner", k // 4, 0))
            for k, word in enumerate(DETERMINERS)
        ]
    if slot == "after determiner":
        adjectives = weighted(ADJECTIVES, EIGHT, DRAWS // 2, ("noun", number, 0))
        return adjectives + nouns(number, DRAWS // 2)
    if slot == "noun":
        return nouns(number, DRAWS)
    after_verb = ("preposition", 0, animal)
    if slot == "after noun":
        adverbs = weighted(ADVERBS, FOUR, DRAWS // 2, ("verb", number, animal))
        return adverbs + weighted(FORMS[number], SIX, DRAWS // 2, after_verb)
    if slot == "verb":
        return weighted(FORMS[number], SIX, DRAWS, after_verb)
    if slot == "preposition":
        return weighted(PREPOSITIONS, FOUR, DRAWS, ("place", 0, animal))
    if slot == "place":
        return [
            (word, weight, ("mark", 0, 0))
            for word, weight in zip(PLACES, place_weights(animal), strict=True)
        ]
    return weighted(MARKS, FOUR, DRAWS, START)


def weighted(
    words: Iterable[str], weights: Iterable[int], total: int, after: State
) -> list[Choice]:
    """Share ``total`` among words in proportion to weights that sum to 16."""
    return [
        (word, weight * total // 16, after) for word, weight in zip(words, weights, strict=True)
    ]


def nouns(number: int, total: int) -> list[Choice]:
    """Return the nouns of this number; each leads to a state that remembers the animal."""
    return [
        (word, EIGHT[k] * total // 16, ("after noun", number, k))
        for k, word in enumerate(NOUNS[number])
    ]


def place_weights(animal: int) -> list[int]:
    """Two animals each live in the forest, in water, on high and on the farm."""
    home = animal // 2 * 2
    weights = [ELSEWHERE] * len(PLACES)
    weights[home : home + 2] = AT_HOME
    return weights


def entropy_rate() -> float:
    """Return the least average loss a model can reach on this text, in nats per token.

    Every sentence starts afresh, so the rate is the entropy of one sentence over its mean length.
    """
    reached = visits()
    nats = sum(
        times * entropy([weight for _, weight, _ in choices(state)])
        for state, times in reached.items()
    )
    return nats / sum(reached.values())


def visits() -> dict[State, float]:
    """Return how often a sentence is expected to be in each state."""
    reached: dict[State, float] = defaultdict(float)
    waiting = {START: 1.0}
    while waiting:
        after: dict[State, float] = defaultdict(float)
        for state, chance in waiting.items():
            reached[state] += chance
            for _, weight, then in choices(state):
                if then != START:
                    after[then] += chance * weight / DRAWS
        waiting = after
    return reached


def entropy(weights: list[int]) -> float:
    """Return the entropy in nats of a draw with these weights, which sum to DRAWS."""
    return -sum(weight / DRAWS * math.log(weight / DRAWS) for weight in weights)


def make_tokens(split: str, rows: int) -> np.ndarray:
    """Return ``(rows, ROW_LEN)`` uint16 token ids; each row begins with a new sentence."""
    return np.array([make_row(f"npydata smoke {split} {row}") for row in range(rows)], np.uint16)


def make_row(key: str) -> list[int]:
    """Draw one row of sentences, cut at the row's end: one byte of hash per word."""
    state, row = START, []
    for draw in hashlib.shake_256(key.encode()).digest(ROW_LEN):
        word, state = pick(choices(state), draw)
        row.append(IDS[word])
    return row


def pick(options: list[Choice], draw: int) -> tuple[str, State]:
    """Return the option into whose share of DRAWS the draw falls."""
    for word, weight, after in options:
        draw -= weight
        if draw < 0:
            return word, after
    raise AssertionError("the weights of the options do not sum to DRAWS")


def main() -> None:
    for name, (split, rows) in FILES.items():
        np.save(HERE / name, make_tokens(split, rows))
    print(f"{', '.join(FILES)}: entropy rate {entropy_rate():.4f} nats/token")


if __name__ == "__main__":
    main()
