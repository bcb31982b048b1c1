"""Questions whose answer is a JSON object: facts and sums under given keys, and data taken from a text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from assets.training import corpus
from assets.training.conversations import Conversation, Document, document, to_json
from assets.training.corpus import WORDINGS, MakeQuestion, Question, draw, draw_exchange, items, lists
from assets.training.tool_skills import VALUES, any_word, identifier, number, person, place

_ASKS = lists(WORDINGS["json"])
_FACTS = [
    (corpus.TABLES[name], *(items(of[part]) for part in ("left", "right", "ask")))
    for name, of in WORDINGS["json_facts"].items()
]
_EVENT_KEYS = [items(keys) for keys in WORDINGS["json_entities"]["event"]]
_TOTALS = ("sum", "result", "answer", "total")

JsonObject = dict[str, Any]


def _question(kind: str, text: str, value: Mapping[str, Any], key: str = "") -> Question:
    return Question(f"json_{kind}", text, to_json(value), key or text)


def _wording(value: Mapping[str, Any], rng: Random) -> str:
    """A request for JSON with these keys."""
    wording = rng.choice(_ASKS["keys" if len(value) > 1 else "key"])
    quote = '"' if rng.random() < 0.15 else ""
    return wording.format(k=corpus.enumerated([f"{quote}{key}{quote}" for key in value]))


def _ordered(question: str, wording: str, rng: Random) -> str:
    """The request for JSON mostly follows the question, as a sentence of its own."""
    if rng.random() < 0.8:
        return f"{question} {wording}"
    return f"{wording} {question}" if rng.random() < 0.5 else f"{wording.rstrip('.')}: {question}"


def _result_key(names: Sequence[str], rng: Random) -> str:
    """A key for the result, now and then an unusual word, since keys are copied."""
    return rng.choice(names) if rng.random() < 0.75 else any_word(rng)


def _draw_fact(rng: Random) -> tuple[JsonObject, tuple[str, ...], str]:
    """Both sides of a fact under their keys, how one asks for the right one, and the left one."""
    rows, lefts, rights, asks = rng.choice(_FACTS)
    x, y = rng.choice(rows)
    return {rng.choice(lefts): x, _result_key(rights, rng): y}, asks, x


def _last_of(value: JsonObject) -> JsonObject:
    return dict([list(value.items())[-1]])


def _draw_sum(rng: Random) -> tuple[int, int, str]:
    """Two numbers, and the key of the split. Up to 30, since sums are practised in words."""
    a, b = rng.randint(1, 30), rng.randint(1, 30)
    return a, b, f"json sum {min(a, b)} {max(a, b)}"


def _fact(rng: Random) -> Question:
    value, asks, x = _draw_fact(rng)
    if rng.random() < 0.35:
        value = _last_of(value)
    elif rng.random() < 0.15:
        value = dict(reversed(value.items()))
    text = rng.choice(asks).format(x=x)
    return _question("fact", _ordered(text, _wording(value, rng), rng), value)


def _bare(rng: Random) -> Question:
    """Without keys, the answer is under `answer`."""
    key = ""
    if rng.random() < 0.3:
        a, b, key = _draw_sum(rng)
        question, answer = rng.choice(_ASKS["bare_sum"]).format(a=a, b=b), a + b
    else:
        rows, _, _, asks = rng.choice(_FACTS)
        x, answer = rng.choice(rows)
        question = rng.choice(asks).format(x=x)
    return _question("bare", _ordered(question, rng.choice(_ASKS["bare"]), rng), {"answer": answer}, key)


def _sum(rng: Random) -> Question:
    a, b, key = _draw_sum(rng)
    total = _result_key(_TOTALS, rng)
    first, second = rng.choice((("a", "b"), ("x", "y"), ("first", "second"), ("left", "right")))
    value = {total: a + b} if rng.random() < 0.5 else {first: a, second: b, total: a + b}
    text = rng.choice(_ASKS["sum"]).format(a=a, b=b)
    return _question("sum", _ordered(text, _wording(value, rng), rng), value, key)


def _entity(rng: Random) -> tuple[str, JsonObject]:
    """How a text says something, under the keys that fit."""
    is_person = rng.random() < 0.65
    name = person(rng) if is_person else any_word(rng)
    of = WORDINGS["json_entities"]["person" if is_person else "product"]
    said: list[str] = []
    value: JsonObject = {rng.choice(items(of["names"])): name}
    for phrases, names, drawn in rng.sample(of["attributes"], rng.randint(1, 3)):
        drawn = VALUES[drawn](rng)
        said.append(rng.choice(items(phrases)).format(v=drawn))
        value[rng.choice([key for key in items(names) if key not in value])] = drawn
    return f"{of['subject'].format(name)} {corpus.enumerated(said)}.", value


def _event(rng: Random) -> tuple[str, JsonObject]:
    occasion = rng.choice(corpus.LISTS["occasions"]) if rng.random() < 0.7 else f"{any_word(rng)} {any_word(rng)}"
    people = [person(rng) for _ in range(rng.randint(1, 3))]
    day = rng.choice(corpus.LISTS["days"])
    go = rng.choice((f"{'is' if len(people) == 1 else 'are'} going to", "meet for")) + f" a {occasion} on {day}"
    values = zip(_EVENT_KEYS, (occasion, day, people), strict=True)
    value: JsonObject = {rng.choice(keys): each for keys, each in values}
    if rng.random() < 0.3:
        value["time"] = VALUES["clock"](rng)
        go += f" at {value['time']}"
    return f"{corpus.enumerated(people)} {go}.", value


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
    return _question("extract", rng.choice(_ASKS["extract"]).format(t=text, w=wording), value, key)


def _pairs(rng: Random) -> Question:
    """Keys and values as they are told."""
    value: JsonObject = {}
    for _ in range(rng.randint(1, 4)):
        value[any_word(rng)] = rng.choice((any_word, number, VALUES["small_number"], person, identifier))(rng)
    told = ", ".join(f"{key} {item}" for key, item in value.items())
    return _question("pairs", rng.choice(_ASKS["pairs"]).format(x=told), value, f"json pairs {told}")


def _list(rng: Random) -> Question:
    words = [any_word(rng) for _ in range(rng.randint(2, 5))]
    which = rng.randrange(5)
    if which == 0 and rng.random() < 0.2:
        words = list(corpus.LISTS["number_words"][1 : len(words) + 1])
    elif which == 0:
        words = rng.sample(corpus.LISTS["words"], len(words))
    elif which == 1:
        words = [rng.choice((person, place, identifier))(rng) for _ in words]
    key = _result_key(("words", "items", "list", "things", "values", "names"), rng)
    text = rng.choice(_ASKS["list"]).format(x=", ".join(words), k=key)
    return _question("list", text, {key: words}, f"json list {words}")


def led_question(rng: Random) -> Question:
    """Nothing asks for JSON: a schema that the model does not see leads it there."""
    which = rng.randrange(4)
    if which == 3:
        return _question("led", *_extracted(rng, 0.6))
    if which < 2:
        value, asks, x = _draw_fact(rng)
        value = rng.choice((_last_of(value), value))
        text = rng.choice(asks).format(x=x)
        return _question("led", text, value, f"json led {text} {list(value)}")
    a, b, key = _draw_sum(rng)
    total = _result_key(_TOTALS, rng)
    text = rng.choice(_ASKS["sum"]).format(a=a, b=b)
    return _question("led", text, rng.choice(({total: a + b}, {"a": a, "b": b, total: a + b})), key)


JSON_KINDS: dict[str, MakeQuestion] = {
    "json_fact": _fact, "json_bare": _bare, "json_sum": _sum, "json_extract": _extract, "json_pairs": _pairs,
    "json_list": _list,
}  # fmt: skip


def json_conversation(rng: Random, emphasis: str) -> Conversation:
    if rng.random() < 0.12:
        # No keys are named: a grammar gives them.
        text, value, key = _extracted(rng, 0.5)
        ask = rng.choice(_ASKS["free_extract"])
        system, text = (ask, text) if rng.random() < 0.5 else (None, f"{ask} {text}")
        return _question("free", text, value, key).conversation(system)
    make = rng.choices(list(JSON_KINDS.values()), (22, 14, 10, 32, 12, 14))[0]
    question = draw(make, rng, held_out=False)
    wording = next((each for each in _ASKS["bare"] if question.text.endswith(f" {each}")), None)
    # The request for JSON may be in the system prompt.
    if make is _bare and wording and rng.random() < 0.4:
        text = question.text.removesuffix(f" {wording}")
        return replace(question, text=text).conversation(rng.choice(_ASKS["systems"]))
    system = rng.choice(_ASKS["systems"]) if rng.random() < 0.1 else None
    conversation = question.conversation(system)
    if system is None and rng.random() < 0.15:
        return replace(conversation, exchanges=(draw_exchange(rng, emphasis), *conversation.exchanges))
    return conversation


def led_document(rng: Random) -> Document:
    """How the answer opens does not count, so that a question which asks for no JSON gets none of itself."""
    *before, (answer, weight) = document(draw(led_question, rng, held_out=False).conversation())
    opening = next(opening for opening in ('{"name": "', '{"') if answer.startswith(opening))
    return *before, (opening, 0.0), (answer.removeprefix(opening), weight)
