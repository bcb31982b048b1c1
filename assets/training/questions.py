"""Questions and their answers: facts, sums, instructions and small talk, as `data/questions.toml` words them."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, TypeVar

from assets.training.data import items, lists, load, pairs

_DATA = load("words")
TABLES = {name: pairs(text) for name, text in _DATA.items() if ": " in text}
LISTS = lists({name: text for name, text in _DATA.items() if name not in TABLES})
WORDS, NAMES, DAYS, NUMBER_WORDS = (LISTS[name] for name in ("words", "names", "days", "number_words"))
WORDINGS = load("questions")
UNKNOWN_ANSWER = WORDINGS["replies"]["unknown"]


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


Drawn = TypeVar("Drawn")
MakeQuestion = Callable[[Random], Question]


def is_held_out(key: str) -> bool:
    """Eight of a hundred, by a hash of the key alone, so it holds for every seed and on every machine."""
    digest = hashlib.blake2b(key.lower().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < 8


def draw_until(fits: Callable[[Drawn], bool], make: Callable[[], Drawn]) -> Drawn:
    """The first that fits of as many as that takes."""
    return next(drawn for drawn in iter(make, None) if fits(drawn))


def draw_side(make: Callable[[], Drawn], key: Callable[[Drawn], str], *, held_out: bool) -> Drawn:
    """Draws until something falls on the wanted side of the split."""
    return draw_until(lambda drawn: is_held_out(key(drawn)) is held_out, make)


def draw(make: MakeQuestion, rng: Random, *, held_out: bool) -> Question:
    return draw_side(lambda: make(rng), lambda question: question.key, held_out=held_out)


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


def fact_answer(kind: str, x: str, y: str) -> str:
    return sentence_case(WORDINGS["facts"][kind]["reply"].format(x=x, y=y))


def _following(names: tuple[str, ...], by: int) -> list[tuple[str, str]]:
    return [(name, names[(i + by) % len(names)]) for i, name in enumerate(names)]


FACTS: dict[str, Sequence[tuple[str, str]]] = {
    "capital": TABLES["capitals"],
    "country": [(city, country) for country, city in TABLES["capitals"]],
    "colour": TABLES["colours"],
    "young": [(with_article(x), with_article(y)) for x, y in TABLES["young"]],
    "sound": [(with_article(x), y) for x, y in TABLES["sounds"]],
    "legs": TABLES["legs"],
    "opposite": [fact for x, y in TABLES["opposites"] for fact in ((x, y), (y, x))],
    "plural": TABLES["plurals"],
    "past": TABLES["pasts"],
    "day_after": _following(DAYS, 1),
    "day_before": _following(DAYS, -1),
    "month_after": _following(LISTS["months"], 1),
    "month_before": _following(LISTS["months"], -1),
    "number_word": [(str(n), word) for n, word in enumerate(NUMBER_WORDS)],
    "category": TABLES["categories"],
}

# What fills the slots of a wording.
Values = Mapping[str, Any]


def _numbers(a: int, b: int, **more: str) -> Values:
    """Two operands and what is made of them."""
    results = {"low": min(a, b), "high": max(a, b), "sum": a + b, "difference": a - b, "product": a * b}
    return {"a": a, "b": b, **results, **more}


def _word_problem(rng: Random) -> Values:
    form = rng.choice(("gaining", "losing"))
    a, b = (rng.randint(2, 20), rng.randint(2, 20)) if form == "gaining" else (rng.randint(4, 30), None)
    name, things = rng.choice(NAMES), rng.choice(LISTS["things"])
    return _numbers(a, b or rng.randint(2, a - 2), form=form, name=name, things=things)


def _number(rng: Random) -> Values:
    n = rng.randrange(100)
    return {"n": n, "next": n + 1, "parity": "odd" if n % 2 else "even"}


def _range(rng: Random) -> Values:
    a = rng.randint(0, 50)
    b = a + rng.randint(2, 12)
    return {"a": a, "b": b, "listed": ", ".join(map(str, range(a, b + 1)))}


def _any_word(rng: Random) -> str:
    return rng.choice((rng.choice(WORDS), rng.choice(WORDS), rng.choice(NAMES), made_up_word(rng)))


def _times(rng: Random) -> Values:
    word, count = rng.choice(WORDS), rng.randint(2, 5)
    n = rng.choice((str(count), NUMBER_WORDS[count]))
    return {"x": word, "n": n, "count": count, "said": " ".join([word] * count)}


def _listed(rng: Random, least: int, most: int, counts: Sequence[int] = (1,)) -> Values:
    words, count = rng.sample(WORDS, rng.randint(least, most)), rng.choice(counts) if len(counts) > 1 else 1
    backwards = ", ".join(reversed(words))
    listed = {"x": ", ".join(words), "last": words[-1], "reversed": backwards}
    return {**listed, "n": NUMBER_WORDS[count], "first": ", ".join(words[:count])}


def _word(rng: Random) -> Values:
    word = rng.choice(WORDS)
    letters = {"upper": word.upper(), "spelled": "-".join(word), "first": word[0], "last": word[-1]}
    return {"x": word, "length": NUMBER_WORDS[len(word)], **letters}


_VALUES: dict[str, Callable[[Random], Values]] = {
    **{kind: lambda rng, facts=facts: dict(zip("xy", rng.choice(facts), strict=True)) for kind, facts in FACTS.items()},
    "addition": lambda rng: _numbers(rng.randrange(100), rng.randrange(100)),
    "subtraction": lambda rng: _numbers(*sorted((rng.randrange(100), rng.randrange(100)), reverse=True)),
    # Times tables are learnt by heart, so their wording is what is held out.
    "multiplication": lambda rng: _numbers(rng.randint(0, 10), rng.randint(0, 10)),
    "word_problem": _word_problem,
    "comparison": lambda rng: _numbers(*rng.sample(range(100), 2), form="bigger" if rng.random() < 0.5 else "smaller"),
    "parity": _number,
    "next_number": _number,
    "count": _range,
    "repeat": lambda rng: {"x": " ".join([_any_word(rng) for _ in range(rng.randint(1, 5))])},
    "say_times": _times,
    "first_of": lambda rng: _listed(rng, 4, 6, (2, 3)),
    "last_of": lambda rng: _listed(rng, 3, 5),
    "reverse_order": lambda rng: _listed(rng, 2, 4),
    **dict.fromkeys(("uppercase", "spell", "first_letter", "last_letter", "length"), _word),
}


def _worded(kind: str, rng: Random) -> Question:
    """In a wording that has the name of the kind, or of that which the values name as their form."""
    values = _VALUES[kind](rng)
    form = WORDINGS["facts"].get(kind) or WORDINGS["computed"][values.get("form", kind)]
    case = sentence_case if kind in FACTS else str
    text = case(rng.choice(items(form["ask"])).format(**values))
    return Question(kind, text, case(form["reply"].format(**values)), form.get("key", text).format(**values))


def _small_talk(kind: str, rng: Random) -> Question:
    groups = list(WORDINGS["small_talk"][kind].items())
    reply, asks = rng.choice(groups) if len(groups) > 1 else groups[0]
    text = rng.choice(items(asks))
    if "{x}" in text:
        text = text.format(x=rng.choice(LISTS["unknown_things"]))
    return Question(kind, text, WORDINGS["replies"][reply], key=text)


_SMALL_TALK = ("identity", "manners", "unknown", "about_itself", "who_it_is")
QUESTION_KINDS: dict[str, MakeQuestion] = {
    **{kind: partial(_worded, kind) for kind in _VALUES},
    **{kind: partial(_small_talk, kind) for kind in _SMALL_TALK},
}
"""The kinds of the first course, with two that come later. Their order decides what a seed draws."""
