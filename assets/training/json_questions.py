"""Questions whose answer is a JSON object: facts and sums under given keys, and data taken from a text."""

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from assets.training.data import items
from assets.training.questions import (
    DAYS,
    LISTS,
    NUMBER_WORDS,
    TABLES,
    WORDINGS,
    WORDS,
    MakeQuestion,
    Question,
    draw,
    enumerated,
)
from assets.training.tool_skills import any_word, clock, identifier, number, person, place, small_number

_ASKS = {name: items(text) for name, text in WORDINGS["json"].items()}
JSON_SYSTEM_PROMPTS = _ASKS["systems"]
_FACTS = [
    (TABLES[name], *(items(of[part]) for part in ("left", "right", "ask")))
    for name, of in WORDINGS["json_facts"].items()
]
_TOTALS = ("sum", "result", "answer", "total")

JsonObject = dict[str, Any]


def _question(kind: str, text: str, value: Mapping[str, Any], key: str = "") -> Question:
    return Question(kind, text, json.dumps(value, ensure_ascii=False), key or text)


def _wording(value: Mapping[str, Any], rng: Random) -> str:
    """A request for JSON with these keys."""
    wording = rng.choice(_ASKS["keys" if len(value) > 1 else "key"])
    quote = '"' if rng.random() < 0.15 else ""
    return wording.format(k=enumerated([f"{quote}{key}{quote}" for key in value]))


def _ordered(question: str, wording: str, rng: Random) -> str:
    """The request for JSON mostly follows the question, as a sentence of its own."""
    if rng.random() < 0.8:
        return f"{question} {wording}"
    return f"{wording} {question}" if rng.random() < 0.5 else f"{wording.rstrip('.')}: {question}"


def _result_key(names: Sequence[str], rng: Random) -> str:
    """Now and then a word that nobody would use: keys are copied."""
    return rng.choice(names) if rng.random() < 0.75 else any_word(rng)


def _sum_key(a: int, b: int) -> str:
    return f"json sum {min(a, b)} {max(a, b)}"


def _fact(rng: Random) -> Question:
    rows, lefts, rights, asks = rng.choice(_FACTS)
    x, y = rng.choice(rows)
    left, right = rng.choice(lefts), _result_key(rights, rng)
    if rng.random() < 0.35:
        value = {right: y}
    else:
        value = {left: x, right: y}
        if rng.random() < 0.15:
            value = {right: y, left: x}
    question = rng.choice(asks).format(x=x)
    return _question("json_fact", _ordered(question, _wording(value, rng), rng), value)


def _bare(rng: Random) -> Question:
    """Without keys, the answer is under `answer`. Sums up to 30, since sums are practised in words."""
    key = ""
    if rng.random() < 0.3:
        a, b = small_number(rng), small_number(rng)
        question, answer, key = rng.choice(_ASKS["bare_sum"]).format(a=a, b=b), a + b, _sum_key(a, b)
    else:
        rows, _, _, asks = rng.choice(_FACTS)
        x, answer = rng.choice(rows)
        question = rng.choice(asks).format(x=x)
    return _question("json_bare", _ordered(question, rng.choice(_ASKS["bare"]), rng), {"answer": answer}, key)


def _sum(rng: Random) -> Question:
    a, b = small_number(rng), small_number(rng)
    total = _result_key(_TOTALS, rng)
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    value = {total: a + b} if rng.random() < 0.5 else {first: a, second: b, total: a + b}
    question = rng.choice(_ASKS["sum"]).format(a=a, b=b)
    return _question("json_sum", _ordered(question, _wording(value, rng), rng), value, _sum_key(a, b))


def _one_of(values: Sequence[str]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


# How a text says something, the keys that fit, and the values.
_Attribute = tuple[str, str, Callable[[Random], Any]]
_PERSON: tuple[_Attribute, ...] = (
    ("is {v} years old | is {v} | has an age of {v}", "age | years | age_years", lambda rng: rng.randint(1, 99)),
    ("lives in {v} | comes from {v} | is from {v}", "city | home | place | location | town", place),
    ("works as a {v} | is a {v}", "job | work | profession | occupation", _one_of(LISTS["jobs"])),
    ("likes {v} | loves {v}", "likes | hobby | favourite | interest", any_word),
    ("has a {v} | owns a {v}", "pet | animal | owns", _one_of([animal for animal, _ in TABLES["young"]])),
)
_PRODUCT: tuple[_Attribute, ...] = (
    ("costs {v} dollars | costs {v} euros | is sold for {v} dollars", "price | cost | amount", number),
    ("is {v}", "colour | color", _one_of(sorted({colour for _, colour in TABLES["colours"]}))),
    ("has the number {v} | has the id {v}", "id | number | code | sku", identifier),
    ("weighs {v} kg | weighs {v} grams", "weight | mass", small_number),
)


def _entity(rng: Random) -> tuple[str, JsonObject]:
    if rng.random() < 0.65:
        name, attributes, key = person(rng), _PERSON, rng.choice(("name", "person", "first_name", "who"))
        subject = name
    else:
        name, attributes, key = any_word(rng), _PRODUCT, rng.choice(("name", "product", "item", "thing"))
        subject = f"The {name}"
    said: list[str] = []
    value: JsonObject = {key: name}
    for phrases, keys, make in rng.sample(attributes, rng.randint(1, min(3, len(attributes)))):
        drawn = make(rng)
        said.append(rng.choice(items(phrases)).format(v=drawn))
        value[rng.choice([k for k in items(keys) if k not in value])] = drawn
    return f"{subject} {enumerated(said)}.", value


def _event(rng: Random) -> tuple[str, JsonObject]:
    occasion = rng.choice(LISTS["occasions"]) if rng.random() < 0.7 else f"{any_word(rng)} {any_word(rng)}"
    people = [person(rng) for _ in range(rng.randint(1, 3))]
    day = rng.choice(DAYS)
    verb = "is" if len(people) == 1 else "are"
    go = rng.choice((f"{verb} going to a {occasion} on {day}", f"meet for a {occasion} on {day}"))
    value: JsonObject = {
        rng.choice(("name", "event", "title", "what")): occasion,
        rng.choice(("date", "day", "when")): day,
        rng.choice(("participants", "people", "guests", "who")): people,
    }
    if rng.random() < 0.3:
        at = clock(rng)
        go, value = f"{go} at {at}", {**value, "time": at}
    return f"{enumerated(people)} {go}.", value


def _extracted(rng: Random, share_of_entities: float) -> tuple[str, JsonObject, str]:
    """A text, what is to be taken from it, in some order and now and then not all of it, and the key of the split."""
    text, value = _entity(rng) if rng.random() < share_of_entities else _event(rng)
    keys = list(value)
    if rng.random() < 0.4:
        rng.shuffle(keys)
    if len(keys) > 1 and rng.random() < 0.3:
        keys = keys[:-1]
    return text, {key: value[key] for key in keys}, f"json extract {next(iter(value.values()))}"


def _extract(rng: Random) -> Question:
    text, value, key = _extracted(rng, 0.7)
    wording = _wording(value, rng)
    return _question("json_extract", rng.choice(_ASKS["extract"]).format(t=text, w=wording), value, key)


def make_free_extract(rng: Random) -> tuple[str | None, Question]:
    """No keys are named: a grammar gives them. The system prompt, and the question."""
    text, value, key = _extracted(rng, 0.5)
    ask = rng.choice(_ASKS["free_extract"])
    system, text = (ask, text) if rng.random() < 0.5 else (None, f"{ask} {text}")
    return system, _question("json_free", text, value, key)


def _pairs(rng: Random) -> Question:
    """Keys and values as they are told."""
    value: JsonObject = {}
    for _ in range(rng.randint(1, 4)):
        value[any_word(rng)] = rng.choice((any_word, number, small_number, person, identifier))(rng)
    told = ", ".join(f"{key} {item}" for key, item in value.items())
    return _question("json_pairs", rng.choice(_ASKS["pairs"]).format(x=told), value, f"json pairs {told}")


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
    text = rng.choice(_ASKS["list"]).format(x=", ".join(words), k=key)
    return _question("json_list", text, {key: words}, f"json list {words}")


def _led(rng: Random) -> Question:
    """Nothing asks for JSON: a schema that the model does not see leads it there."""
    match rng.randrange(4):
        case 0 | 1:
            rows, lefts, rights, asks = rng.choice(_FACTS)
            x, y = rng.choice(rows)
            left, right = rng.choice(lefts), _result_key(rights, rng)
            value = rng.choice(({right: y}, {left: x, right: y}))
            text = rng.choice(asks).format(x=x)
            return _question("json_led", text, value, f"json led {text} {list(value)}")
        case 2:
            a, b = small_number(rng), small_number(rng)
            total = _result_key(_TOTALS, rng)
            question = rng.choice(_ASKS["sum"])
            value = rng.choice(({total: a + b}, {"a": a, "b": b, total: a + b}))
            return _question("json_led", question.format(a=a, b=b), value, _sum_key(a, b))
        case _:
            return _question("json_led", *_extracted(rng, 0.6))


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
    if question.kind == "json_bare":
        for wording in _ASKS["bare"]:
            if question.text.endswith(f" {wording}"):
                return question.text.removesuffix(f" {wording}")
    return None
