"""The first course: questions, stories and small talk, one document after the other from a seed.

Their parts are in `data`: TOML files whose longer strings are lists. A hash splits training from measuring.
"""

import hashlib
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random
from typing import Any, TypeVar

from assets.training.conversations import BOS, DATA, EOS, PROMPT_WEIGHT, Conversation, Document, document


def load(name: str) -> dict[str, Any]:
    """A file of `data`, by its name without the ending."""
    return tomllib.loads((DATA / f"{name}.toml").read_text())


@lru_cache(4096)
def items(text: str) -> tuple[str, ...]:
    """Items separated by ` | ` and line ends; `_` is an empty item."""
    return tuple("" if item == "_" else item for line in text.strip().splitlines() for item in line.split(" | "))


def lists(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: items(text) for name, text in table.items()}


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Items of the form `left: right`."""
    return tuple((left, right) for left, _, right in (item.partition(": ") for item in items(text)))


def weights(text: str) -> dict[str, float]:
    return {left: float(right) for left, right in pairs(text)}


_WORDS = load("words")
TABLES = {name: pairs(text) for name, text in _WORDS.items() if ": " in text}
LISTS = lists({name: text for name, text in _WORDS.items() if name not in TABLES})
WORDS, NAMES, DAYS, NUMBER_WORDS = (LISTS[name] for name in ("words", "names", "days", "number_words"))
WORDINGS = load("questions")
UNKNOWN_ANSWER = WORDINGS["replies"]["unknown"]
_CHAT = lists(WORDINGS["chat"])
SYSTEM_PROMPTS = _CHAT["systems"]


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

    def conversation(self, system: str | None = None) -> Conversation:
        return Conversation(self.kind, (), ((self.text, self.answer),), system)


Drawn = TypeVar("Drawn")
MakeQuestion = Callable[[Random], Question]
DrawConversation = Callable[..., Conversation]


def is_held_out(key: str) -> bool:
    """True for eight of a hundred keys, by a hash of only the key, so it is the same for every seed and machine."""
    digest = hashlib.blake2b(key.lower().encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % 100 < 8


def draw_until(fits: Callable[[Drawn], bool], make: Callable[[], Drawn]) -> Drawn:
    """Draws until a value fits, and returns it."""
    return next(drawn for drawn in iter(make, None) if fits(drawn))


def draw_side(make: Callable[[], Drawn], key: Callable[[Drawn], str], *, held_out: bool) -> Drawn:
    """Draws until something falls on the wanted side of the split."""
    return draw_until(lambda drawn: is_held_out(key(drawn)) is held_out, make)


def draw(make: MakeQuestion, rng: Random, *, held_out: bool) -> Question:
    return draw_side(lambda: make(rng), lambda question: question.key, held_out=held_out)


def choose(shares: Mapping[str, float], rng: Random) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


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


def loosely(text: str, rng: Random, share: float = 0.06) -> str:
    """Now and then as people type: in lower case at the start, without the mark at the end."""
    if rng.random() < share:
        text = text[:1].lower() + text[1:]
    return text.rstrip("?.") if rng.random() < share else text


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

# Values for the slots of a wording.
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


def _fact(facts: Sequence[tuple[str, str]]) -> Callable[[Random], Values]:
    return lambda rng: dict(zip("xy", rng.choice(facts), strict=True))


_VALUES: dict[str, Callable[[Random], Values]] = {
    **{kind: _fact(facts) for kind, facts in FACTS.items()},
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
# How often a kind is asked, where 1.0 does not suit it.
_EMPHASES: dict[str, dict[str, float]] = {}
for _name, _text in load("courses")["emphasis"].items():
    _weights = dict(pairs(_text))
    _EMPHASES[_name] = {**_EMPHASES.get(_weights.pop("like", ""), {}), **{k: float(v) for k, v in _weights.items()}}


def draw_question(rng: Random, emphasis: str = "first", *, held_out: bool = False) -> Question:
    """A question of any kind, emphasized kinds more often."""
    kind = choose({kind: _EMPHASES[emphasis].get(kind, 1.0) for kind in QUESTION_KINDS}, rng)
    return draw(QUESTION_KINDS[kind], rng, held_out=held_out)


def draw_exchange(rng: Random, emphasis: str, *, held_out: bool = False) -> tuple[str, str]:
    question = draw_question(rng, emphasis, held_out=held_out)
    return question.text, question.answer


def _named(rng: Random, given: str, asked: str, *, held_out: bool) -> tuple[str, ...]:
    """A name, how it is given, and how it is asked for."""
    return draw_side(
        lambda: (draw_name(rng), rng.choice(_CHAT[given]), rng.choice(_CHAT[asked])), " ".join, held_out=held_out
    )


def draw_name_memory(rng: Random, emphasis: str = "first", *, held_out: bool) -> Conversation:
    """The user tells a name, asks up to two other things, then asks for the name."""
    name, tell, ask = _named(rng, "tell_name", "ask_name", held_out=held_out)
    between = [draw_exchange(rng, emphasis) for _ in range(rng.randint(0, 2))]
    told, asked = (tell.format(x=name), f"Nice to meet you, {name}!"), (ask, f"Your name is {name}.")
    return Conversation("name_memory", (), (told, *between, asked))


def draw_given_name(rng: Random, *, held_out: bool) -> Conversation:
    """The system prompt gives the model another name."""
    name, give, ask = _named(rng, "give_name", "ask_given_name", held_out=held_out)
    return Conversation("given_name", (), ((ask, f"I am {name}."),), give.format(x=name))


def plain_question_document(question: Question) -> Document:
    """The form for prompts without a chat template."""
    prompt = f"Question: {question.text}\nAnswer:"
    return (BOS, 0.0), (prompt, PROMPT_WEIGHT), (f" {question.answer}{EOS}", 1.0)


_STORIES: dict[str, str] = load("stories")
# For each plot its sentences, and for each sentence its alternatives.
_PLOTS = [
    [tuple(re.split(r"\s+\| ", sentence)) for sentence in re.split(r"\n(?!\| )", plot)]
    for plot in _STORIES.pop("plots").split("\n\n")
]
_PARTS = lists(_STORIES)


@dataclass(frozen=True, slots=True)
class Story:
    """Wholly decided by its draws; `request` asks for it."""

    slots: Mapping[str, str]
    text: str

    def request(self, rng: Random) -> str:
        if rng.random() < 0.2:
            return rng.choice(_PARTS["open_requests"])
        named = f" named {self.slots['name']}" if rng.random() < 0.4 else ""
        return rng.choice(_PARTS["requests"]).format(x=with_article(self.slots["animal"]) + named)


def _slots(rng: Random) -> tuple[dict[str, str], int]:
    """Values for the slots of a plot's sentences, and the plot."""
    name = draw_name(rng)
    friend = draw_until(lambda other: other != name, lambda: draw_name(rng))
    animal, friend_animal = rng.sample(_PARTS["animals"], 2)
    slots = {"name": name, "friend": friend, "animal": animal, "friend_animal": friend_animal}
    slots |= {"a_friend": with_article(friend_animal), "a_adj": with_article(rng.choice(_PARTS["adjectives"]))}
    slots |= {part: rng.choice(_PARTS[f"{part}s"]) for part in ("place", "home", "thing", "colour", "food", "feature")}
    return slots, rng.randrange(len(_PLOTS))


def draw_story(rng: Random, *, held_out: bool) -> Story:
    """The split looks at plot, hero and place: a held-out story has a mixture of them that training never shows."""
    slots, plot = draw_side(
        lambda: _slots(rng), lambda drawn: "story {1} {0[name]} {0[animal]} {0[place]} {0[thing]}".format(*drawn),
        held_out=held_out,
    )  # fmt: skip
    variants = [rng.choice(sentence) for sentence in _PLOTS[plot]]
    setting = [rng.choice(_PARTS["settings"])] if rng.random() < 0.7 else []
    sentences = [rng.choice(_PARTS["openings"]), *setting, *variants, rng.choice(_PARTS["endings"])]
    return Story(slots, " ".join(sentences).format(**slots))


def make_document(rng: Random, emphasis: str) -> Document:
    """One of the first course, never from the held-out side."""
    choice = rng.random()
    if choice < 0.06:
        story = draw_story(rng, held_out=False)
        if choice < 0.035:
            return (BOS, 0.0), (story.text + EOS, 0.5)
        return document(Conversation("story", (), ((story.request(rng), story.text),)))
    if choice < 0.16:
        return plain_question_document(draw_question(rng, emphasis))
    if choice < 0.19:
        return document(draw_name_memory(rng, emphasis, held_out=False))
    if choice < 0.205:
        return document(draw_given_name(rng, held_out=False))
    if choice < 0.32:
        system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
        exchanges = tuple(draw_exchange(rng, emphasis) for _ in range(rng.randint(2, 5)))
        return document(Conversation("several", (), exchanges, system))
    text, answer = draw_exchange(rng, emphasis)
    asked = (loosely(text, rng, 0.08), answer)
    system = "You are a helpful assistant." if rng.random() < 0.1 else None
    return document(Conversation("single", (), (asked,), system))


def held_out_texts(seed: int, count: int) -> list[str]:
    """Plain texts from the held-out side, for perplexity: stories, and questions with answers."""
    rng = Random(seed)
    return [
        "Question: {}\nAnswer: {}".format(*draw_exchange(rng, "first", held_out=True))
        if i % 3
        else draw_story(rng, held_out=True).text
        for i in range(count)
    ]
