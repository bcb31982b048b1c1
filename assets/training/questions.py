"""Questions and their answers: facts, sums, instructions and small talk, as `data/questions.toml` words them."""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from assets.training.data import items, load, pairs

_DATA = load("words")
TABLES = {
    name: pairs(_DATA[name])
    for name in ("capitals", "colours", "young", "sounds", "legs", "opposites", "plurals", "pasts")
}
LISTS = {name: items(text) for name, text in _DATA.items() if name != "categories" and name not in TABLES}
WORDS, NAMES, DAYS, NUMBER_WORDS = (LISTS[name] for name in ("words", "names", "days", "number_words"))
WORDINGS = load("questions")
UNKNOWN_ANSWER = WORDINGS["replies"]["unknown"]

HELD_OUT_PERCENT = 8


@dataclass(frozen=True, slots=True)
class Question:
    """`key` is what the split looks at: questions with equal keys are on the same side of it.

    For a fact the key is the wording, so a held-out question asks for a known fact in words never seen with it. For
    arithmetic it is the operands, so a held-out sum was never seen in any wording.
    """

    kind: str
    text: str
    answer: str
    key: str


MakeQuestion = Callable[[Random], Question]


def is_held_out(key: str) -> bool:
    """Decides by a hash of the key alone, so it holds for every seed and on every machine."""
    digest = hashlib.blake2b(key.lower().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def draw(make: MakeQuestion, rng: Random, *, held_out: bool) -> Question:
    """Draws until a question falls on the wanted side of the split."""
    while True:
        question = make(rng)
        if is_held_out(question.key) is held_out:
            return question


def with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def sentence_case(text: str) -> str:
    return text[:1].upper() + text[1:]


def enumerated(words: list[str]) -> str:
    """ "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def made_up_word(rng: Random) -> str:
    """A word that no list contains, so that copying is learnt and not the list."""
    syllables = (rng.choice("bdfghklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 3)))
    return "".join(syllables) + rng.choice(("", "n", "r", "s", "l", "x", "t"))


def draw_name(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.7 else made_up_word(rng).title()


Fact = tuple[str, str]


def _following(names: tuple[str, ...], by: int) -> list[Fact]:
    return [(name, names[(i + by) % len(names)]) for i, name in enumerate(names)]


def _legs(count: str) -> str:
    return "no legs" if count == "0" else f"{NUMBER_WORDS[int(count)]} legs"


def _articled(table: str) -> list[Fact]:
    return [(with_article(x), y) for x, y in TABLES[table]]


def _categories() -> list[Fact]:
    groups = {group: items(text) for group, text in _DATA["categories"].items()}
    colours = [(colour, "a colour") for colour in groups.pop("a colour")]
    return [(with_article(word), group) for group, words in groups.items() for word in words] + colours


_FACTS: dict[str, Iterable[Fact]] = {
    "capital": TABLES["capitals"],
    "country": [(city, country) for country, city in TABLES["capitals"]],
    "colour": TABLES["colours"],
    "young": [(x, with_article(y)) for x, y in _articled("young")],
    "sound": _articled("sounds"),
    "legs": [(x, _legs(y)) for x, y in _articled("legs")],
    "opposite": [fact for x, y in TABLES["opposites"] for fact in ((x, y), (y, x))],
    "plural": TABLES["plurals"],
    "past": TABLES["pasts"],
    "day_after": _following(DAYS, 1),
    "day_before": _following(DAYS, -1),
    "month_after": _following(LISTS["months"], 1),
    "month_before": _following(LISTS["months"], -1),
    "number_word": [(str(n), word) for n, word in enumerate(NUMBER_WORDS)],
    "category": _categories(),
}


def _fact_kind(kind: str) -> MakeQuestion:
    rows, asks, reply = tuple(_FACTS[kind]), items(WORDINGS["facts"][kind]["ask"]), WORDINGS["facts"][kind]["reply"]

    def make(rng: Random) -> Question:
        x, y = rng.choice(rows)
        text = sentence_case(rng.choice(asks).format(x=x))
        return Question(kind, text, sentence_case(reply.format(x=x, y=y)), key=text)

    return make


Values = Mapping[str, Any]


def numbers(a: int, b: int) -> Values:
    """Two operands and what is made of them."""
    return {
        "a": a, "b": b, "low": min(a, b), "high": max(a, b), "sum": a + b, "difference": a - b, "product": a * b,
    }  # fmt: skip


def _ordered(rng: Random) -> Values:
    b, a = sorted((rng.randrange(100), rng.randrange(100)))
    return numbers(a, b)


def _gaining(rng: Random) -> Values:
    operands = numbers(rng.randint(2, 20), rng.randint(2, 20))
    return {**operands, "name": rng.choice(NAMES), "things": rng.choice(LISTS["things"])}


def _losing(rng: Random) -> Values:
    a, name, things = rng.randint(4, 30), rng.choice(NAMES), rng.choice(LISTS["things"])
    return {**numbers(a, rng.randint(2, a - 2)), "name": name, "things": things}


def _number(rng: Random) -> Values:
    n = rng.randrange(100)
    return {"n": n, "next": n + 1, "parity": "odd" if n % 2 else "even"}


def _range(rng: Random) -> Values:
    a = rng.randint(0, 50)
    b = a + rng.randint(2, 12)
    return {"a": a, "b": b, "listed": ", ".join(map(str, range(a, b + 1)))}


def _any_words(rng: Random) -> Values:
    makes = range(rng.randint(1, 5))
    words = (rng.choice((rng.choice(WORDS), rng.choice(WORDS), rng.choice(NAMES), made_up_word(rng))) for _ in makes)
    return {"x": " ".join(words)}


def _times(rng: Random) -> Values:
    word, count = rng.choice(WORDS), rng.randint(2, 5)
    return {"x": word, "n": rng.choice((str(count), NUMBER_WORDS[count])), "count": count,
            "said": " ".join([word] * count)}  # fmt: skip


def _first_of(rng: Random) -> Values:
    words, count = rng.sample(WORDS, rng.randint(4, 6)), rng.choice((2, 3))
    return {"x": ", ".join(words), "n": NUMBER_WORDS[count], "first": ", ".join(words[:count])}


def _listed(least: int, most: int) -> Callable[[Random], Values]:
    def draw_list(rng: Random) -> Values:
        words = rng.sample(WORDS, rng.randint(least, most))
        return {"x": ", ".join(words), "last": words[-1], "reversed": ", ".join(reversed(words))}

    return draw_list


def _word(rng: Random) -> Values:
    word = rng.choice(WORDS)
    return {"x": word, "upper": word.upper(), "spelled": "-".join(word), "first": word[0], "last": word[-1],
            "length": NUMBER_WORDS[len(word)]}  # fmt: skip


def _computed(
    kind: str, draw_values: Callable[[Random], Values], *wordings: str, choose: Callable[[Random], int] = lambda _: 0
) -> MakeQuestion:
    """Questions of one of several `wordings`, by default of those that have the name of the kind."""
    forms = [WORDINGS["computed"][name] for name in wordings or (kind,)]
    asks = [items(form["ask"]) for form in forms]

    def make(rng: Random) -> Question:
        values = draw_values(rng)
        which = choose(rng)
        text, form = rng.choice(asks[which]).format(**values), forms[which]
        key = form["key"].format(**values) if "key" in form else text
        return Question(kind, text, form["reply"].format(**values), key)

    return make


_WORD_PROBLEMS = (_computed("word_problem", _gaining, "gaining"), _computed("word_problem", _losing, "losing"))


def _word_problem(rng: Random) -> Question:
    return rng.choice(_WORD_PROBLEMS)(rng)


def _small_talk(kind: str) -> MakeQuestion:
    groups = [(items(asks), WORDINGS["replies"][reply]) for reply, asks in WORDINGS["small_talk"][kind].items()]

    def make(rng: Random) -> Question:
        asks, answer = rng.choice(groups)
        text = rng.choice(asks)
        return Question(kind, text, answer, key=text)

    return make


_UNKNOWN_ASKS = items(WORDINGS["small_talk"]["unknown"]["unknown"])


def _unknown(rng: Random) -> Question:
    text = rng.choice(_UNKNOWN_ASKS).format(x=rng.choice(LISTS["unknown_things"]))
    return Question("unknown", text, UNKNOWN_ANSWER, key=text)


QUESTION_KINDS: dict[str, MakeQuestion] = {
    **{kind: _fact_kind(kind) for kind in _FACTS},
    "addition": _computed("addition", lambda rng: numbers(rng.randrange(100), rng.randrange(100))),
    "subtraction": _computed("subtraction", _ordered),
    # Times tables are learnt by heart, so their wording is what is held out.
    "multiplication": _computed("multiplication", lambda rng: numbers(rng.randint(0, 10), rng.randint(0, 10))),
    "word_problem": _word_problem,
    "comparison": _computed(
        "comparison", lambda rng: numbers(*rng.sample(range(100), 2)), "bigger", "smaller",
        choose=lambda rng: int(rng.random() >= 0.5),
    ),
    "parity": _computed("parity", _number),
    "next_number": _computed("next_number", _number),
    "count": _computed("count", _range),
    "repeat": _computed("repeat", _any_words),
    "say_times": _computed("say_times", _times),
    "first_of": _computed("first_of", _first_of),
    "last_of": _computed("last_of", _listed(3, 5)),
    "reverse_order": _computed("reverse_order", _listed(2, 4)),
    **{kind: _computed(kind, _word) for kind in ("uppercase", "spell", "first_letter", "last_letter", "length")},
    "identity": _small_talk("identity"),
    "manners": _small_talk("manners"),
    "unknown": _unknown,
    "about_itself": _small_talk("about_itself"),
    "who_it_is": _small_talk("who_it_is"),
}  # fmt: skip
"""The kinds of the first course, with two that come later. Their order decides what a seed draws."""
