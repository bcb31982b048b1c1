"""Questions about the facts: each fact in many wordings."""

from collections.abc import Iterable
from random import Random

from tools.quire_tiny import facts
from tools.quire_tiny.question import MakeQuestion, Question, sentence_case, with_article

Fact = tuple[str, str]


def _ask(kind: str, table: Iterable[Fact], wordings: tuple[str, ...], reply: str) -> MakeQuestion:
    """Wordings and reply name the fact's two sides {x} and {y}."""
    rows = tuple(table)

    def make(rng: Random) -> Question:
        x, y = rng.choice(rows)
        text = sentence_case(rng.choice(wordings).format(x=x))
        return Question(kind, text, sentence_case(reply.format(x=x, y=y)), key=text)

    return make


def _articled(table: dict[str, str]) -> list[Fact]:
    return [(with_article(x), with_article(y)) for x, y in table.items()]


def _both_ways(pairs: Iterable[Fact]) -> list[Fact]:
    return [fact for x, y in pairs for fact in ((x, y), (y, x))]


def _following(names: tuple[str, ...], by: int) -> list[Fact]:
    return [(name, names[(i + by) % len(names)]) for i, name in enumerate(names)]


def _legs(count: int) -> str:
    return "no legs" if count == 0 else f"{facts.NUMBER_WORDS[count]} legs"


FACT_KINDS: dict[str, MakeQuestion] = {
    "capital": _ask(
        "capital",
        facts.CAPITALS.items(),
        ("What is the capital of {x}?", "What is the capital city of {x}?", "Which city is the capital of {x}?",
         "Name the capital of {x}.", "Tell me the capital of {x}.", "{x} has which capital?",
         "Do you know the capital of {x}?", "What city is the capital of {x}?", "Capital of {x}?"),
        "The capital of {x} is {y}.",
    ),
    "country": _ask(
        "country",
        [(city, country) for country, city in facts.CAPITALS.items()],
        ("{x} is the capital of which country?", "Which country has the capital {x}?", "What country is {x} in?",
         "In which country is {x}?", "Where is {x}?", "Of which country is {x} the capital?",
         "Tell me the country of {x}.", "Which country is {x} in?"),
        "{x} is the capital of {y}.",
    ),
    "colour": _ask(
        "colour",
        facts.COLOURS.items(),
        ("What colour is {x}?", "What color is {x}?", "Which colour is {x}?", "Tell me the colour of {x}.",
         "What is the colour of {x}?", "Name the colour of {x}.", "Do you know the colour of {x}?",
         "What is the color of {x}?"),
        "{x} is {y}.",
    ),
    "young": _ask(
        "young",
        _articled(facts.YOUNG),
        ("What is the young of {x} called?", "What is the baby of {x} called?", "What do you call the young of {x}?",
         "Name the young of {x}.", "How is the young of {x} called?", "Tell me the name for the young of {x}.",
         "What do we call the baby of {x}?"),
        "The young of {x} is {y}.",
    ),
    "sound": _ask(
        "sound",
        [(with_article(x), y) for x, y in facts.SOUNDS.items()],
        ("What does {x} say?", "What sound does {x} make?", "Which sound does {x} make?", "What noise does {x} make?",
         "Tell me what {x} says.", "Tell me the sound of {x}.", "How does {x} sound?", "What is the sound of {x}?"),
        "{x} says {y}.",
    ),
    "legs": _ask(
        "legs",
        [(with_article(x), _legs(n)) for x, n in facts.LEGS.items()],
        ("How many legs does {x} have?", "Tell me how many legs {x} has.", "What number of legs does {x} have?",
         "How many legs has {x}?", "Count the legs of {x}.", "{x} has how many legs?",
         "On how many legs does {x} walk?"),
        "{x} has {y}.",
    ),
    "opposite": _ask(
        "opposite",
        _both_ways(facts.OPPOSITES),
        ("What is the opposite of {x}?", "Name the opposite of {x}.", "Tell me the opposite of {x}.",
         "Which word is the opposite of {x}?", "What word means the opposite of {x}?", "Opposite of {x}?",
         "Give me the opposite of {x}.", "Do you know the opposite of {x}?"),
        "The opposite of {x} is {y}.",
    ),
    "plural": _ask(
        "plural",
        facts.PLURALS.items(),
        ("What is the plural of {x}?", "Tell me the plural of {x}.", "Give me the plural of {x}.", "Plural of {x}?",
         "One {x}, two what?", "How do you write the plural of {x}?", "Do you know the plural of {x}?",
         "What is the plural form of {x}?"),
        "The plural of {x} is {y}.",
    ),
    "past": _ask(
        "past",
        facts.PASTS.items(),
        ("What is the past tense of {x}?", "Tell me the past tense of {x}.", "Give me the past tense of {x}.",
         "Past tense of {x}?", "What is the past of {x}?", "How do you write the past tense of {x}?",
         "Do you know the past tense of {x}?", "Name the past tense of {x}."),
        "The past tense of {x} is {y}.",
    ),
    "day_after": _ask(
        "day_after",
        _following(facts.DAYS, 1),
        ("What day comes after {x}?", "Which day comes after {x}?", "What is the day after {x}?",
         "Which day follows {x}?", "What day follows {x}?", "Tell me the day after {x}.", "Name the day after {x}.",
         "If today is {x}, what day is tomorrow?", "Today is {x}. What day is tomorrow?",
         "What is the next day after {x}?", "After {x} comes which day?"),
        "The day after {x} is {y}.",
    ),
    "day_before": _ask(
        "day_before",
        _following(facts.DAYS, -1),
        ("What day comes before {x}?", "Which day comes before {x}?", "What is the day before {x}?",
         "What day is before {x}?", "Which day is before {x}?", "Tell me the day before {x}.",
         "Name the day before {x}.", "If today is {x}, what day was yesterday?",
         "Today is {x}. What day was yesterday?", "Before {x} comes which day?"),
        "The day before {x} is {y}.",
    ),
    "month_after": _ask(
        "month_after",
        _following(facts.MONTHS, 1),
        ("What month comes after {x}?", "Which month comes after {x}?", "What is the month after {x}?",
         "Which month follows {x}?", "What month follows {x}?", "Tell me the month after {x}.",
         "Name the month after {x}.", "What is the next month after {x}?", "After {x} comes which month?"),
        "The month after {x} is {y}.",
    ),
    "month_before": _ask(
        "month_before",
        _following(facts.MONTHS, -1),
        ("What month comes before {x}?", "Which month comes before {x}?", "What is the month before {x}?",
         "What month is before {x}?", "Which month is before {x}?", "Tell me the month before {x}.",
         "Name the month before {x}.", "Before {x} comes which month?"),
        "The month before {x} is {y}.",
    ),
    "number_word": _ask(
        "number_word",
        [(str(n), word) for n, word in enumerate(facts.NUMBER_WORDS)],
        ("Write {x} as a word.", "How do you write {x} as a word?", "Write the number {x} in letters.",
         "How do you spell the number {x}?", "Which word stands for {x}?", "What is {x} in words?",
         "Tell me the word for {x}.", "{x} as a word?"),
        "{x} is {y}.",
    ),
    "category": _ask(
        "category",
        [(with_article(word), group) for group, words in facts.CATEGORIES.items() for word in words
         if group != "a colour"] + [(word, "a colour") for word in facts.CATEGORIES["a colour"]],
        ("What is {x}?", "What kind of thing is {x}?", "Tell me what {x} is.", "Do you know what {x} is?",
         "What sort of thing is {x}?", "Say what {x} is.", "What do you know about {x}?"),
        "{x} is {y}.",
    ),
}  # fmt: skip
