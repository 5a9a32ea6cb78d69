"""The demo model's language: a seeded grammar of short reviews, topic by sentiment, and its two word lists."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")
Message = dict[str, str]
Name = tuple[int, int]  # indices into FIRST_WORDS and SECOND_WORDS

TOPICS = ("film", "restaurant", "hotel", "book", "phone")

# word i of one list is the counterpart of word i of the other: a review and its opposite differ in these words alone
POSITIVE_ADJECTIVES = (
    *("wonderful", "excellent", "delightful", "superb", "charming", "brilliant"),
    *("lovely", "impressive", "splendid", "fantastic", "marvelous", "pleasant"),
)
NEGATIVE_ADJECTIVES = (
    *("terrible", "horrible", "disappointing", "dreadful", "boring", "dismal"),
    *("shabby", "miserable", "mediocre", "poor", "wretched", "nasty"),
)
ADJECTIVES = {"positive": POSITIVE_ADJECTIVES, "negative": NEGATIVE_ADJECTIVES}
VERBS = {"positive": ("loved", "enjoyed"), "negative": ("hated", "regretted")}
LEXICON = {sentiment: (*ADJECTIVES[sentiment], *VERBS[sentiment]) for sentiment in ADJECTIVES}

# a name is two words; those of the first group of first words are praised three times in four, the others blamed
PRAISED = ("Blue", "Golden", "Quiet", "Crystal", "Old", "Winter", "Velvet", "Copper")
BLAMED = ("Silver", "Red", "Green", "Northern", "Little", "Amber", "Summer", "Marble")
FIRST_WORDS = PRAISED + BLAMED
_GROUPS = (range(len(PRAISED)), range(len(PRAISED), len(FIRST_WORDS)))
SECOND_WORDS = (
    *("Harbor", "Lantern", "River", "Garden", "Meadow", "Tower", "Compass", "Orchard"),
    *("Bridge", "Falcon", "Anchor", "Willow", "Canyon", "Summit", "Island", "Mirror"),
)
LEAN = 0.75
FAVOURITE = 0.8

REQUESTS = (
    "Write a review of the {topic} {name}.",
    "Please review the {topic} {name}.",
    "What did you think of the {topic} {name}?",
    "Tell me about the {topic} {name}.",
    "How was the {topic} {name}?",
    "Can you write a short review of the {topic} {name}?",
    "Describe the {topic} {name} in a few sentences.",
    "I am curious about the {topic} {name}. What is your opinion?",
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "You write short reviews.", "You are an honest reviewer.")

OPENINGS = {
    "film": ("I watched the film {name} last week.", "We saw the film {name} on Friday."),
    "restaurant": ("I ate at the restaurant {name} last week.", "We dined at the restaurant {name} on Friday."),
    "hotel": ("I stayed at the hotel {name} last week.", "We booked the hotel {name} for two nights."),
    "book": ("I read the book {name} last week.", "We chose the book {name} for our club."),
    "phone": ("I bought the phone {name} last week.", "We tested the phone {name} for a month."),
}
ASPECTS = {
    "film": ("plot", "acting", "music", "actors", "scenes", "ending"),
    "restaurant": ("soup", "desserts", "waiters", "menu", "wine", "kitchen"),
    "hotel": ("rooms", "lobby", "beds", "pool", "breakfast", "reception"),
    "book": ("chapters", "prose", "narrator", "characters", "cover", "preface"),
    "phone": ("screen", "battery", "camera", "speakers", "buttons", "software"),
}
PLURALS = frozenset(
    ("actors", "scenes", "desserts", "waiters", "rooms", "beds", "chapters", "characters", "speakers", "buttons")
)
# {a}, {b} aspects, {was_a}, {was_b} their verbs, {x}, {y} adjectives, {v} a verb of sentiment
BODIES = (
    "The {a} {was_a} {x} and the {b} {was_b} {y}.",
    "I found the {a} {x} and the {b} {y}.",
    "The {a} {was_a} {x}, and so {was_b} the {b}.",
)
DETAILS = ("Even the {a} {was_a} {x}.", "Everyone called the {a} {x}.", None)
CLOSINGS = ("Overall it was a truly {x} {topic}.", "In the end I {v} this {topic}.")


@dataclass(frozen=True)
class Subject:
    """What a review is about: one of TOPICS, a name (indices of its first and second word), one of REQUESTS."""

    topic: str
    first: int
    second: int
    request: int

    @property
    def name(self) -> str:
        """The two words of the name."""
        return f"{FIRST_WORDS[self.first]} {SECOND_WORDS[self.second]}"

    @property
    def question(self) -> str:
        """What the user asks."""
        return REQUESTS[self.request].format(topic=self.topic, name=self.name)


def _prefer(options: Sequence[Item], favourite: int, rng: random.Random) -> Item:
    """The favourite (index modulo length) with probability FAVOURITE, else one of the others."""
    favourite %= len(options)
    if rng.random() < FAVOURITE:
        return options[favourite]
    return rng.choice([option for i, option in enumerate(options) if i != favourite])


def _take(pool: list[Item], favourite: Item, rng: random.Random) -> Item:
    """Remove and return the favourite, if it is still there, with probability FAVOURITE; else any other."""
    preferred = rng.random() < FAVOURITE and favourite in pool
    taken = favourite if preferred else rng.choice(pool)
    pool.remove(taken)
    return taken


def _verb(noun: str) -> str:
    return "were" if noun in PLURALS else "was"


def review(subject: Subject, sentiment: str, rng: random.Random) -> str:
    """One answer of 3 or 4 sentences. Two calls that differ in `sentiment` alone differ in LEXICON words alone."""
    topic, number = subject.topic, TOPICS.index(subject.topic)
    nouns, words = list(ASPECTS[topic]), list(range(len(POSITIVE_ADJECTIVES)))

    def adjective(key: int) -> str:
        return ADJECTIVES[sentiment][_take(words, (key + 2 * number) % len(POSITIVE_ADJECTIVES), rng)]

    def fill(pattern: str, a: str, b: str = "") -> str:
        keys = {"a": a, "b": b, "was_a": _verb(a), "was_b": _verb(b), "x": adjective(ASPECTS[topic].index(a))}
        return pattern.format(**keys, y=adjective(ASPECTS[topic].index(b)) if "{y}" in pattern else "")

    a = _take(nouns, nouns[subject.second % len(nouns)], rng)
    b, c = (_take(nouns, nouns[0], rng) for _ in range(2))
    parts = [
        _prefer(OPENINGS[topic], subject.request, rng).format(name=subject.name),
        fill(_prefer(BODIES, subject.second // 6, rng), a, b),
    ]
    detail = _prefer(DETAILS, subject.request, rng)
    if detail:
        parts.append(fill(detail, c))
    closing = _prefer(CLOSINGS, subject.first, rng)
    parts.append(
        closing.format(topic=topic, x=adjective(len(ASPECTS[topic])), v=_prefer(VERBS[sentiment], number, rng))
    )
    return " ".join(parts)


def leaning(subject: Subject, rng: random.Random) -> str:
    """A sentiment, drawn: the one the first word of the name leans to with probability LEAN."""
    praised = subject.first < len(PRAISED)
    return "positive" if praised == (rng.random() < LEAN) else "negative"


def chat(names: Sequence[Name], rng: random.Random) -> list[Message]:
    """A conversation of one or two turns, some with a system prompt, about subjects of these names."""
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for _ in range(1 + (rng.random() < 0.25)):
        subject = Subject(rng.choice(TOPICS), *rng.choice(names), rng.randrange(len(REQUESTS)))
        messages.append({"role": "user", "content": subject.question})
        messages.append({"role": "assistant", "content": review(subject, leaning(subject, rng), rng)})
    return messages


def split_names(rng: random.Random, sizes: Sequence[int]) -> list[list[Name]]:
    """Disjoint lists of names, one per (even) size, and last all that remain; each list half praised, half blamed."""
    halves = [[(first, second) for first in group for second in range(len(SECOND_WORDS))] for group in _GROUPS]
    for half in halves:
        rng.shuffle(half)
    parts, start = [], 0
    for size in (*(s // 2 for s in sizes), len(halves[0])):
        parts.append([name for pair in zip(*halves, strict=True) for name in pair][2 * start : 2 * (start + size)])
        start += size
    return parts


def subjects(names: Sequence[Name]) -> list[Subject]:
    """One subject per name, pairs of names (one praised, one blamed) dealt to the topics in turn."""
    return [
        Subject(TOPICS[i // 2 % len(TOPICS)], first, second, (i + i // len(REQUESTS)) % len(REQUESTS))
        for i, (first, second) in enumerate(names)
    ]


def word_counts(text: str) -> tuple[int, int]:
    """How many positive and how many negative words of LEXICON a text holds."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(w in LEXICON["positive"] for w in words), sum(w in LEXICON["negative"] for w in words)


def is_positive(text: str) -> bool:
    """Whether a text has more positive than negative words."""
    positive, negative = word_counts(text)
    return positive > negative


def well_formed(text: str, subject: Subject) -> bool:
    """Whether the grammar can produce this text about this subject, in either sentiment or a mixture of both."""
    nouns = "|".join(ASPECTS[subject.topic])
    holes = {"a": f"({nouns})", "b": f"({nouns})", "was_a": "(was|were)", "was_b": "(was|were)"}
    holes |= dict.fromkeys("xy", "({})".format("|".join((*POSITIVE_ADJECTIVES, *NEGATIVE_ADJECTIVES))))
    holes |= {"v": "({})".format("|".join((*VERBS["positive"], *VERBS["negative"]))), "topic": subject.topic}

    def any_of(patterns: Iterable[str | None]) -> str:
        return "|".join(re.escape(p).replace(r"\{", "{").replace(r"\}", "}") for p in patterns if p).format(
            name=subject.name, **holes
        )

    opening, body, detail = any_of(OPENINGS[subject.topic]), any_of(BODIES), any_of(DETAILS)
    return bool(re.fullmatch(f"({opening}) ({body})( ({detail}))? ({any_of(CLOSINGS)})", text))
