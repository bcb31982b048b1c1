"""Documents of the fourth course: what visitors ask first, in the many ways in which they type it.

Nearly all of it is a table of `data/visitors.toml`: groups of wordings, each with its answer or with several
alternative answers. The split uses the wording; the first one of a group is never held out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from assets.training import corpus
from assets.training.conversations import Conversation, Document, Exchange, document
from assets.training.corpus import FACTS, NUMBER_WORDS, QUESTION_KINDS, DrawConversation, Question, draw, items, pairs

_DATA: dict[str, Any] = corpus.load("visitors")
_FIRST_WORDS = pairs(_DATA["first_words"])
# The key of what is not held out.
_TRAINED = ""


# Questions that mean the same, their answers, and how one asks for another answer once one was given.
Group = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]


def _group(asks: str, values: Iterable[str], *answers: str, more: str = "") -> Group:
    """The ways to ask, with each value in turn; ` / ` ends a line of an answer."""
    filled = (corpus.sentence_case(ask.replace("{x}", value)) for value in values for ask in items(asks))
    return tuple(filled), tuple(answer.replace(" / ", "\n") for answer in answers), items(more)


def _groups() -> Iterator[tuple[str, Group]]:
    for names, answer in _DATA["concepts"]["of"].items():
        for kind in ("concept", "simply"):
            yield kind, _group(_DATA["concepts"][kind], items(names), answer.strip())
    for kind in ("again", "asked"):
        for answer, asks in _DATA[kind].items():
            yield kind, (items(asks), (answer,), ())
    for of in _DATA["several"]:
        topics = pairs(of.get("topics", ""))
        answers = items(of["answer"]) if "answer" in of else (text for _, text in topics)
        yield "asked", _group(of["ask"], [""], *answers, more=of.get("more", ""))
        for topic, text in topics:
            yield "about", _group(of["about"], [topic], text)
    listed, translated = _DATA["lists"], _DATA["translations"]
    for names, values in pairs(listed["of"]):
        (several, one), members = names.split(", "), corpus.sentence_case(values).split(", ")
        yield "list", _group(listed["one"], [one], members[0] + ".")
        for count in range(2, len(members) + 1):
            numbers, answer = (NUMBER_WORDS[count], str(count)), ", ".join(members[:count]) + "."
            yield "list", _group(listed["ask"].replace("{s}", several), numbers, answer)
    for word, values in pairs(translated["words"]):
        for language, y in zip(items(translated["languages"]), values.split(", "), strict=True):
            answer = f"In {language}, {word} is {y}."
            yield "translate", _group(translated["ask"].replace("{l}", language), [word], answer)
    for count in range(3, 21):
        answer = ", ".join(map(str, range(1, count + 1))) + "."
        yield "count", _group(_DATA["counting"]["ask"], (NUMBER_WORDS[count], str(count)), answer)


GROUPS: dict[str, list[Group]] = {}
for _kind, _made in _groups():
    GROUPS.setdefault(f"visitor_{_kind}", []).append(_made)
_ALTERNATIVES = {answer: answers for _, answers, _ in GROUPS["visitor_asked"] for answer in answers}


def as_typed(text: str, rng: Random) -> str:
    """Often in small letters, without the mark at the end, or with "what's"."""
    if rng.random() < 0.15:
        text = text.replace("What is ", "What's ")
    if rng.random() < 0.3:
        text = text.lower()
    return text.rstrip("?.!") if rng.random() < 0.35 else text


def _grouped(kind: str, rng: Random) -> Question:
    asks, answers, _ = rng.choice(GROUPS[kind])
    which = 0 if rng.random() < 0.15 else rng.randrange(len(asks))
    return Question(kind, asks[which], rng.choice(answers), asks[which] if which else _TRAINED)


def _times(kind: str, rng: Random) -> Question:
    of, count = _DATA["times"], rng.randint(2, 5)
    is_common = rng.random() < 0.6
    words = items(of["words"]) if is_common else (rng.choice(corpus.WORDS), corpus.made_up_word(rng))
    word = rng.choice(words)
    n = rng.choice((str(count), NUMBER_WORDS[count]))
    key = _TRAINED if word == "hello" else f"times {word} {count}"
    return Question(kind, rng.choice(items(of["ask"])).format(x=word, n=n), " ".join([word] * count), key)


def _unknown(kind: str, rng: Random) -> Question:
    asks = items(_DATA["unknown"]["ask"])
    ask = rng.choice(asks)
    name = rng.choice((rng.choice(corpus.NAMES), corpus.made_up_word(rng).title()))
    text = ask.format(Name=name, word=corpus.made_up_word(rng))
    return Question(kind, text, corpus.UNKNOWN_ANSWER, _TRAINED if ask == asks[0] else text)


def _tight_sum(kind: str, rng: Random) -> Question:
    """Without spaces around the sign."""
    while True:
        question = QUESTION_KINDS[rng.choice(("addition", "subtraction", "multiplication"))](rng)
        tight = re.sub(" ([-+*=]) ", r"\1", question.text)
        if tight != question.text:
            return replace(question, kind=kind, text=tight)


def _old(kind: str, rng: Random) -> Question:
    return replace(QUESTION_KINDS[rng.choice((*FACTS, "identity", "manners", "about_itself"))](rng), kind=kind)


_OTHERS = {"visitor_times": _times, "visitor_unknown": _unknown, "visitor_sum": _tight_sum, "visitor_typed": _old}


def _draw(kind: str, rng: Random, *, held_out: bool) -> Question:
    question = draw(partial(_OTHERS.get(kind, _grouped), kind), rng, held_out=held_out)
    if kind == "visitor_times":
        return replace(question, text=corpus.loosely(question.text, rng, 0.3))
    text = as_typed(question.text, rng)
    return replace(question, text=text.lower() if kind == "visitor_typed" and rng.random() < 0.6 else text)


def _single(kind: str, rng: Random, *, held_out: bool) -> Conversation:
    return _draw(kind, rng, held_out=held_out).conversation()


def _follow_up(rng: Random, *, held_out: bool) -> Conversation:
    """ "And of Spain?" after a question about another capital."""
    of = _DATA["follow_ups"]
    kind = rng.choice(items(of["kinds"]))
    first = draw(QUESTION_KINDS[kind], rng, held_out=False)
    exchanges: list[Exchange] = [(as_typed(first.text, rng), first.answer)]
    for _ in range(rng.choice((1, 1, 2))):
        (x, y), ask = corpus.draw_side(
            lambda: (rng.choice(FACTS[kind]), rng.choice(items(of["ask"]))),
            lambda drawn: f"{drawn[1]} {drawn[0][0]}", held_out=held_out,
        )  # fmt: skip
        exchanges.append((as_typed(ask.format(x=x), rng), corpus.fact_answer(kind, x, y)))
    return Conversation("visitor_follow_up", (), tuple(exchanges))


def _another(rng: Random, *, held_out: bool) -> Conversation:
    """ "Another one." after a joke."""
    while True:
        first, answers, more = rng.choice([group for group in GROUPS["visitor_asked"] if group[2]])
        asks = [rng.choice(first), *rng.choices(more, k=rng.choice((1, 1, 2)))]
        if corpus.is_held_out(" ".join(asks[:2])) is held_out and (held_out or not corpus.is_held_out(asks[0])):
            turns = zip(asks, rng.sample(answers, len(asks)), strict=True)
            return Conversation("visitor_another", (), tuple((as_typed(ask, rng), answer) for ask, answer in turns))


_SHARES = {name: corpus.weights(text) for name, text in _DATA["shares"].items()}
VISITOR_KINDS: dict[str, DrawConversation] = {
    **{kind: partial(_single, kind) for kind in _SHARES["again"]},
    "visitor_follow_up": _follow_up, "visitor_another": _another,
}  # fmt: skip


def accepted_answers(conversation: Conversation) -> tuple[str, ...]:
    """The correct last answers: for a visitor's question each answer of its group that was not given before."""
    answer, given = conversation.last_answer(), [done for _, done in conversation.exchanges[:-1]]
    if conversation.kind not in ("visitor_asked", "visitor_another"):
        return (answer,)
    return tuple(other for other in _ALTERNATIVES[answer] if other not in given)


def draw_first_words(rng: Random) -> tuple[Conversation, tuple[str, ...]]:
    """A first question of visitors of the page, and the words; the answer must contain one of them."""
    chat, words = rng.choice(_FIRST_WORDS)
    *before, asked = chat.split(" > ")
    exchanges = (*zip(before[::2], before[1::2], strict=True), (asked, ""))
    return Conversation("first_words", (), exchanges), tuple(words.split(" or "))


def _is_known(story: corpus.Story) -> bool:
    """By its names."""
    return {story.slots["name"], story.slots["friend"]} <= {*corpus.NAMES}


def _exchanges(shares: Mapping[str, float], rng: Random) -> tuple[Exchange, ...]:
    if rng.random() < 0.25:
        return (corpus.draw_exchange(rng, "fifth"),)
    choice = rng.random()
    kind = "visitor_follow_up" if choice < 0.1 else "visitor_another" if choice < 0.15 else corpus.choose(shares, rng)
    return VISITOR_KINDS[kind](rng, held_out=False).exchanges


def make_visitor_document(rng: Random, asked: str) -> Document:
    """`asked` names the shares of kinds."""
    shares, choice = _SHARES[asked], rng.random()
    if choice < 0.03:
        story = corpus.draw_until(_is_known, lambda: corpus.draw_story(rng, held_out=False))
        return document(Conversation("story", (), ((as_typed(story.request(rng), rng), story.text),)))
    if choice < 0.08:
        return corpus.plain_question_document(_draw(corpus.choose(shares, rng), rng, held_out=False))
    if choice < 0.5:
        kind = corpus.choose({**shares, "visitor_follow_up": 10, "visitor_another": 4}, rng)
        exchanges = VISITOR_KINDS[kind](rng, held_out=False).exchanges
    else:
        exchanges = tuple(each for _ in range(rng.randint(2, 4)) for each in _exchanges(shares, rng))
    system = rng.choice(corpus.SYSTEM_PROMPTS) if rng.random() < 0.25 else None
    return document(Conversation("visitor", (), exchanges, system))
