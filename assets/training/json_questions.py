"""Questions whose answer is a JSON object: facts and sums under given keys, and data taken from a text."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from assets.training.questions import (
    CAPITALS,
    COLOURS,
    DAYS,
    NUMBER_WORDS,
    OPPOSITES,
    PASTS,
    PLURALS,
    SOUNDS,
    WORDS,
    YOUNG,
    MakeQuestion,
    Question,
    draw,
)
from assets.training.tool_skills import any_word, clock, identifier, number, person, place, small_number

KEYS_WORDINGS = (
    "Answer in JSON with the keys {k}.", "Answer in JSON with {k}.", "Give JSON with the keys {k}.",
    "Reply in JSON with the keys {k}.", "Answer as JSON with the keys {k}.", "Return JSON with the keys {k}.",
    "Answer with a JSON object with the keys {k}.", "Use JSON with the keys {k}.", "JSON keys: {k}.",
    "Respond in JSON with the keys {k}.", "Return a JSON object with {k}.",
)  # fmt: skip
KEY_WORDINGS = (
    "Answer in JSON with the key {k}.", "Give JSON with the key {k}.", "Reply in JSON with the key {k}.",
    "Answer as JSON with the key {k}.", "Return JSON with the key {k}.", "JSON key: {k}.", "Respond in JSON with {k}.",
)  # fmt: skip
BARE_WORDINGS = (
    "Answer in JSON.", "Reply in JSON.", "Answer as JSON.", "Give the answer in JSON.", "Return JSON.", "As JSON.",
    "Respond in JSON.", "Answer with JSON.", "Use JSON.",
)  # fmt: skip
JSON_SYSTEM_PROMPTS = (
    "Answer in JSON.", "You are a helpful assistant designed to output JSON.", "Always answer in JSON.",
    "Reply in JSON.", "You answer in JSON.", "Output JSON.",
)  # fmt: skip


def _text(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def _listed(keys: list[str], rng: Random) -> str:
    if rng.random() < 0.15:
        keys = [f'"{key}"' for key in keys]
    return keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + " and " + keys[-1]


def _ordered(question: str, wording: str, rng: Random) -> str:
    """The request for JSON mostly follows the question, as a sentence of its own."""
    if rng.random() < 0.8:
        return f"{question} {wording}"
    return f"{wording} {question}" if rng.random() < 0.5 else f"{wording.rstrip('.')}: {question}"


@dataclass(frozen=True, slots=True)
class _Table:
    rows: tuple[tuple[str, str], ...]
    left: tuple[str, ...]
    right: tuple[str, ...]
    questions: tuple[str, ...]


_TABLES = (
    _Table(tuple(CAPITALS.items()), ("country", "land", "nation", "state"),
           ("capital", "city", "capital_city", "answer"),
           ("What is the capital of {x}?", "Which city is the capital of {x}?", "Name the capital of {x}.")),
    _Table(tuple(COLOURS.items()), ("thing", "object", "name"), ("colour", "color", "answer"),
           ("What colour is {x}?", "What color is {x}?", "Tell me the colour of {x}.")),
    _Table(tuple(YOUNG.items()), ("animal", "parent", "name"), ("young", "baby", "child"),
           ("What is the young of a {x} called?", "Name the young of a {x}.")),
    _Table(tuple(SOUNDS.items()), ("animal", "name"), ("sound", "noise", "says"),
           ("What does a {x} say?", "What sound does a {x} make?")),
    _Table(OPPOSITES, ("word", "input", "term"), ("opposite", "antonym", "answer"),
           ("What is the opposite of {x}?", "Name the opposite of {x}.")),
    _Table(tuple(PLURALS.items()), ("word", "singular", "noun"), ("plural", "answer", "plural_form"),
           ("What is the plural of {x}?", "Tell me the plural of {x}.")),
    _Table(tuple(PASTS.items()), ("verb", "word", "present"), ("past", "past_tense", "answer"),
           ("What is the past tense of {x}?", "Give me the past tense of {x}.")),
)  # fmt: skip


def _result_key(names: tuple[str, ...], rng: Random) -> str:
    """Now and then a word that nobody would use: keys are copied."""
    return rng.choice(names) if rng.random() < 0.75 else any_word(rng)


def _fact(rng: Random) -> Question:
    table = rng.choice(_TABLES)
    x, y = rng.choice(table.rows)
    left, right = rng.choice(table.left), _result_key(table.right, rng)
    if rng.random() < 0.35:
        value = {right: y}
    else:
        value = {left: x, right: y}
        if rng.random() < 0.15:
            value = {right: y, left: x}
    wordings = KEYS_WORDINGS if len(value) > 1 else KEY_WORDINGS
    question = rng.choice(table.questions).format(x=x)
    text = _ordered(question, rng.choice(wordings).format(k=_listed(list(value), rng)), rng)
    return Question("json_fact", text, _text(value), key=f"{text}")


def _bare(rng: Random) -> Question:
    """Without keys, the answer is under `answer`. Sums up to 30, since sums are practised in words."""
    if rng.random() < 0.3:
        a, b = small_number(rng), small_number(rng)
        question, answer = rng.choice((f"What is {a} + {b}?", f"How much is {a} + {b}?", f"{a} + {b}")), a + b
        key = f"json sum {min(a, b)} {max(a, b)}"
    else:
        table = rng.choice(_TABLES)
        x, answer = rng.choice(table.rows)
        question = rng.choice(table.questions).format(x=x)
        key = ""
    text = _ordered(question, rng.choice(BARE_WORDINGS), rng)
    return Question("json_bare", text, _text({"answer": answer}), key=key or text)


def _sum(rng: Random) -> Question:
    a, b = small_number(rng), small_number(rng)
    total = _result_key(("sum", "result", "answer", "total"), rng)
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    value = {total: a + b} if rng.random() < 0.5 else {first: a, second: b, total: a + b}
    question = rng.choice(("What is {a} + {b}?", "How much is {a} + {b}?", "Add {a} and {b}.")).format(a=a, b=b)
    wordings = KEYS_WORDINGS if len(value) > 1 else KEY_WORDINGS
    text = _ordered(question, rng.choice(wordings).format(k=_listed(list(value), rng)), rng)
    return Question("json_sum", text, _text(value), key=f"json sum {min(a, b)} {max(a, b)}")


# How a text says something, the keys that fit, and the values.
_Attribute = tuple[tuple[str, ...], tuple[str, ...], Callable[[Random], Any]]

_JOBS = ("teacher", "doctor", "baker", "farmer", "painter", "nurse", "pilot", "cook", "singer", "writer", "driver")
_COLOUR_NAMES = tuple(sorted(set(COLOURS.values())))
_PERSON: tuple[_Attribute, ...] = (
    (("is {v} years old", "is {v}", "has an age of {v}"), ("age", "years", "age_years"),
     lambda rng: rng.randint(1, 99)),
    (("lives in {v}", "comes from {v}", "is from {v}"), ("city", "home", "place", "location", "town"), place),
    (("works as a {v}", "is a {v}"), ("job", "work", "profession", "occupation"), lambda rng: rng.choice(_JOBS)),
    (("likes {v}", "loves {v}"), ("likes", "hobby", "favourite", "interest"), any_word),
    (("has a {v}", "owns a {v}"), ("pet", "animal", "owns"), lambda rng: rng.choice(list(YOUNG))),
)  # fmt: skip
_PRODUCT: tuple[_Attribute, ...] = (
    (("costs {v} dollars", "costs {v} euros", "is sold for {v} dollars"), ("price", "cost", "amount"), number),
    (("is {v}",), ("colour", "color"), lambda rng: rng.choice(_COLOUR_NAMES)),
    (("has the number {v}", "has the id {v}"), ("id", "number", "code", "sku"), identifier),
    (("weighs {v} kg", "weighs {v} grams"), ("weight", "mass"), small_number),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Extract:
    text: str
    value: dict[str, Any]


def _entity(rng: Random) -> _Extract:
    if rng.random() < 0.65:
        name, attributes, key = person(rng), _PERSON, rng.choice(("name", "person", "first_name", "who"))
        subject = name
    else:
        name, attributes, key = any_word(rng), _PRODUCT, rng.choice(("name", "product", "item", "thing"))
        subject = f"The {name}"
    chosen = rng.sample(attributes, rng.randint(1, min(3, len(attributes))))
    said, value = [], {key: name}
    for phrases, keys, make in chosen:
        drawn = make(rng)
        said.append(rng.choice(phrases).format(v=drawn))
        value[rng.choice([k for k in keys if k not in value])] = drawn
    text = f"{subject} " + (said[0] if len(said) == 1 else ", ".join(said[:-1]) + " and " + said[-1]) + "."
    return _Extract(text, value)


_OCCASIONS = ("science fair", "concert", "meeting", "party", "picnic", "wedding", "football game", "dinner", "lecture")


def _event(rng: Random) -> _Extract:
    occasion = rng.choice(_OCCASIONS) if rng.random() < 0.7 else f"{any_word(rng)} {any_word(rng)}"
    people = [person(rng) for _ in range(rng.randint(1, 3))]
    day = rng.choice(DAYS)
    who = people[0] if len(people) == 1 else ", ".join(people[:-1]) + " and " + people[-1]
    verb = "is" if len(people) == 1 else "are"
    go = rng.choice((f"{verb} going to a {occasion} on {day}", f"meet for a {occasion} on {day}"))
    value: dict[str, Any] = {
        rng.choice(("name", "event", "title", "what")): occasion,
        rng.choice(("date", "day", "when")): day,
        rng.choice(("participants", "people", "guests", "who")): people,
    }
    if rng.random() < 0.3:
        at = clock(rng)
        go, value = f"{go} at {at}", {**value, "time": at}
    return _Extract(f"{who} {go}.", value)


_ASK_EXTRACT = ("{t} {w}", "{w} {t}", "Text: {t} {w}", "Extract the data. {t} {w}")


def _in_some_order(value: Mapping[str, Any], rng: Random) -> dict[str, Any]:
    keys = list(value)
    if rng.random() < 0.4:
        rng.shuffle(keys)
    if len(keys) > 1 and rng.random() < 0.3:
        keys = keys[:-1]
    return {key: value[key] for key in keys}


def _extract(rng: Random) -> Question:
    extract = _entity(rng) if rng.random() < 0.7 else _event(rng)
    value = _in_some_order(extract.value, rng)
    wording = rng.choice(KEYS_WORDINGS if len(value) > 1 else KEY_WORDINGS).format(k=_listed(list(value), rng))
    text = rng.choice(_ASK_EXTRACT).format(t=extract.text, w=wording)
    return Question("json_extract", text, _text(value), key=f"json extract {next(iter(extract.value.values()))}")


def make_free_extract(rng: Random) -> tuple[str | None, Question]:
    """No keys are named: a grammar gives them. The system prompt, and the question."""
    extract = _entity(rng) if rng.random() < 0.5 else _event(rng)
    value = _in_some_order(extract.value, rng)
    ask = rng.choice(
        ("Extract the event information.", "Extract the information.", "Extract the data.", "Answer in JSON.")
    )
    system, text = (ask, extract.text) if rng.random() < 0.5 else (None, f"{ask} {extract.text}")
    return system, Question("json_free", text, _text(value), key=f"json extract {next(iter(extract.value.values()))}")


def _pairs(rng: Random) -> Question:
    """Keys and values as they are told."""
    value: dict[str, Any] = {}
    for _ in range(rng.randint(1, 4)):
        value[any_word(rng)] = rng.choice((any_word, number, small_number, person, identifier))(rng)
    told = ", ".join(f"{key} {item}" for key, item in value.items())
    wordings = (
        "Write as JSON: {x}.",
        "Write in JSON: {x}.",
        "Make JSON of: {x}.",
        "Convert to JSON: {x}.",
        "JSON: {x}.",
    )
    return Question("json_pairs", rng.choice(wordings).format(x=told), _text(value), key=f"json pairs {told}")


def _list(rng: Random) -> Question:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    match rng.randrange(5):
        case 0:
            words = list(NUMBER_WORDS[1 : len(words) + 1]) if rng.random() < 0.2 else rng.sample(WORDS, len(words))
        case 1:
            words = [rng.choice((person, place, identifier))(rng) for _ in words]
        case _:
            pass
    key = _result_key(("words", "items", "list", "things", "values", "names"), rng)
    wording = rng.choice(
        ("Give the words {x} as a JSON list under the key {k}.", "Write {x} as a JSON list under the key {k}.",
         "Put {x} into a JSON list under the key {k}.", "Make a JSON list of {x} under the key {k}.")
    )  # fmt: skip
    text = wording.format(x=", ".join(words), k=key)
    return Question("json_list", text, _text({key: words}), key=f"json list {words}")


def _led(rng: Random) -> Question:
    """Nothing asks for JSON: a schema that the model does not see leads it there."""
    match rng.randrange(4):
        case 0 | 1:
            table = rng.choice(_TABLES)
            x, y = rng.choice(table.rows)
            left, right = rng.choice(table.left), _result_key(table.right, rng)
            value = rng.choice(({right: y}, {left: x, right: y}))
            text = rng.choice(table.questions).format(x=x)
            return Question("json_led", text, _text(value), key=f"json led {text} {list(value)}")
        case 2:
            a, b = small_number(rng), small_number(rng)
            total = _result_key(("sum", "result", "answer", "total"), rng)
            question = rng.choice(("What is {a} + {b}?", "How much is {a} + {b}?", "Add {a} and {b}."))
            value = rng.choice(({total: a + b}, {"a": a, "b": b, total: a + b}))
            key = f"json sum {min(a, b)} {max(a, b)}"
            return Question("json_led", question.format(a=a, b=b), _text(value), key=key)
        case _:
            extract = _entity(rng) if rng.random() < 0.6 else _event(rng)
            key = f"json extract {next(iter(extract.value.values()))}"
            return Question("json_led", extract.text, _text(_in_some_order(extract.value, rng)), key=key)


def make_led_answer(rng: Random, *, held_out: bool) -> tuple[Question, str]:
    """A question, and how its answer opens."""
    question = draw(_led, rng, held_out=held_out)
    return question, next(opening for opening in ('{"name": "', '{"') if question.answer.startswith(opening))


JSON_KINDS: dict[str, MakeQuestion] = {
    "json_fact": _fact,
    "json_bare": _bare,
    "json_sum": _sum,
    "json_extract": _extract,
    "json_pairs": _pairs,
    "json_list": _list,
}


def without_request(question: Question) -> str | None:
    """A bare question without its request for JSON, for a system prompt that has it; None for other kinds."""
    if question.kind != "json_bare":
        return None
    for wording in BARE_WORDINGS:
        if question.text.endswith(f" {wording}"):
            return question.text.removesuffix(f" {wording}")
    return None
