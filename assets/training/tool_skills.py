"""What tools there are: how they are named, what they take, how users ask for them and what they return.

A skill is a family of tools (`data/skills.toml`): each draw gives another name, description and names of parameters.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from assets.training.conversations import CallValue, ParameterType, Tool, to_json
from assets.training.data import items, load
from assets.training.questions import LISTS, NAMES, TABLES, WORDS, is_held_out, made_up_word

_CITIES = (*(city for _, city in TABLES["capitals"]), *LISTS["cities"])
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
MADE_UP = "made up"
Result = str | dict[str, CallValue]


def _strange_word(rng: Random) -> str:
    """Letters in an order that no list has, so that copying letter by letter is learnt."""
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 7)))


def any_word(rng: Random) -> str:
    choice = rng.random()
    if choice < 0.45:
        return rng.choice(WORDS)
    if choice < 0.85:
        return made_up_word(rng)
    return made_up_word(rng) + made_up_word(rng) if choice < 0.92 else _strange_word(rng)


def _phrase(rng: Random, most: int = 4) -> str:
    return " ".join(any_word(rng) for _ in range(rng.randint(1, most)))


def place(rng: Random) -> str:
    if rng.random() < 0.5:
        return rng.choice(_CITIES)
    name = any_word(rng).title()
    return f"{rng.choice(('New', 'San', 'Port', 'East'))} {name}" if rng.random() < 0.15 else name


def person(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else any_word(rng).title()


def number(rng: Random) -> int:
    """Of any length, since numbers are only copied."""
    return rng.randrange(10 ** rng.randint(1, 4))


def small_number(rng: Random) -> int:
    return rng.randint(1, 30)


def _amount(rng: Random) -> int | float:
    return number(rng) + 1 if rng.random() < 0.75 else round(rng.uniform(0.1, 99), rng.randint(1, 2))


def identifier(rng: Random) -> str:
    digits = str(rng.randrange(10 ** rng.randint(2, 6)))
    prefixes = ("order_", "A-", "ID", "", "X", f"{_strange_word(rng)}_", f"{_strange_word(rng).upper()}-")
    return rng.choice(prefixes) + digits


def clock(rng: Random) -> str:
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}"


def _file_name(rng: Random) -> str:
    folder = f"{any_word(rng)}/" if rng.random() < 0.3 else ""
    return f"{folder}{any_word(rng)}.{rng.choice(('txt', 'md', 'py', 'json', 'csv', 'log'))}"


def _ticker(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(("AAPL", "MSFT", "GOOG", "TSLA", "NVDA", "AMZN"))
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(3, 4))).upper()


def _expression(rng: Random) -> str:
    text = str(number(rng))
    for _ in range(rng.choice((1, 1, 2))):
        text += f" {rng.choice('+-*/')} {number(rng)}"
    return text


def one_of(*values: str) -> Callable[[Random], str]:
    return lambda rng: rng.choice(values)


def _weather_result(rng: Random) -> Result:
    degrees, sky = rng.randint(-9, 39), rng.choice(LISTS["skies"])
    which = rng.randrange(6)
    if which == 2:
        return {"temperature": degrees, rng.choice(("condition", "conditions", "description", "weather")): sky}
    if which == 3:
        return {"temperature": degrees, "unit": rng.choice(("celsius", "fahrenheit", "C", "F"))}
    if which == 4:
        return {rng.choice(("temperature", "temp", "temp_c")): degrees}
    if which == 5:
        return rng.choice((str(degrees), f"{degrees}°C", f"{degrees} C", sky))
    return f"{degrees} degrees and {sky}" if which else f"{sky}, {degrees} degrees"


def _value_result(
    draw: Callable[[Random], str | int | float], keys: tuple[str, ...], share: float
) -> Callable[[Random], Result]:
    """A value, in an object by a share of all times."""

    def result(rng: Random) -> Result:
        value = draw(rng)
        return {rng.choice(keys): value} if rng.random() < share else str(value)

    return result


_number_result = _value_result(_amount, ("result", "value", "answer", "total"), 0.3)
_text_result = _value_result(_phrase, ("result", "text", "title", "answer"), 0.4)


def _clock_result(rng: Random) -> Result:
    return {"time": clock(rng)} if rng.random() < 0.3 else clock(rng)


def _done(rng: Random) -> Result:
    if rng.random() < 0.4:
        return {"status": rng.choice(("ok", "done", "sent", "success", any_word(rng)))}
    return rng.choice(DONE)


DONE = ("ok", "done", "success", "true", "OK", "Done", "null")

# Values that are texts of which there are enough to split them.
_TEXTS: dict[str, Callable[[Random], CallValue]] = {
    "place": place, "person": person, "any_word": any_word, "identifier": identifier,
    "topic": lambda rng: rng.choice(LISTS["topics"]) if rng.random() < 0.4 else _phrase(rng),
    "sentence": lambda rng: rng.choice(LISTS["sentences"]) if rng.random() < 0.5 else _phrase(rng, 5),
    "file_name": _file_name,
}  # fmt: skip
_VALUES: dict[str, Callable[[Random], CallValue]] = {
    **_TEXTS, "number": number, "small_number": small_number, "amount": _amount, "clock": clock, "ticker": _ticker,
    "expression": _expression,
    **{name: one_of(*LISTS[name]) for name in ("units", "currencies", "languages", "rooms", "signs", "days")},
}  # fmt: skip
_RESULTS = {
    "weather": _weather_result, "number": _number_result, "text": _text_result, "clock": _clock_result, "done": _done,
    "coin": one_of("heads", "tails"),
}  # fmt: skip
_SKILL_LISTS = ("verbs", "nouns", "descriptions", "questions", "does", "things", "more")
_GET = "get | get | fetch | return | look up | find | retrieve | show | give | tell | check | provide"


@dataclass(frozen=True, slots=True)
class Role:
    """A parameter by its part in the question; `names` are what tools call it, `is_split` whether its values are."""

    names: tuple[str, ...]
    draw: Callable[[Random], CallValue]
    kind: ParameterType
    is_split: bool


@dataclass(frozen=True, slots=True)
class Skill:
    """`topic` is what the answer speaks about once a result is there; questions name the roles that they fill in.

    Attributes:
        verbs, nouns: A name is a verb and a noun, or a noun alone where a verb is empty.
        does, things: A description of the third course says that a tool does something to a thing.
        more: More ways to ask, for the third course.
        narrow: No question of the old kinds could be meant for this tool.
    """

    name: str
    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    roles: Mapping[str, Role]
    questions: tuple[str, ...]
    topic: str
    result: Callable[[Random], Result]
    does: tuple[str, ...] = ()
    things: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    narrow: bool = True


def _role(drawn: str, kind: str, names: str) -> Role:
    values = items(kind) if " | " in kind else None
    draw = one_of(*values) if values else _VALUES[drawn]
    return Role(items(names), draw, values or kind, drawn in _TEXTS)


def _skill(name: str, of: Mapping[str, Any]) -> Skill:
    lists = {key: items({"does": _GET, **of}[key]) for key in _SKILL_LISTS}
    roles = {key: _role(*role) for key, role in of.get("roles", {}).items()}
    return Skill(name, **lists, roles=roles, topic=of["topic"], result=_RESULTS[of["result"]], narrow="broad" not in of)


SKILLS: dict[str, Skill] = {name: _skill(name, of) for name, of in load("skills").items()}

_COLOURS = one_of(*sorted({colour for _, colour in TABLES["colours"]}))
_MADE_UP = load("tools")["made_up"]
_MADE_UP_ROLES: tuple[tuple[str, Callable[[Random], CallValue]], ...] = (
    ("string", any_word), ("string", person), ("string", identifier), ("integer", number), ("number", _amount),
    ("integer", small_number), ("string", _COLOURS),
)  # fmt: skip


def made_up_skill(rng: Random) -> Skill:
    """A tool that no list contains; its questions name the parameters."""
    verb = rng.choice(LISTS["made_up_verbs"]) if rng.random() < 0.7 else _strange_word(rng)
    noun = any_word(rng)
    names = list(dict.fromkeys(any_word(rng) for _ in range(rng.randint(1, 3))))
    kinds = [rng.choice(_MADE_UP_ROLES) for _ in names]
    # Roles are numbered, since a made-up name need not suit str.format.
    roles = {
        f"r{i}": Role((name,), draw, kind, draw in _TEXTS.values())
        for i, (name, (kind, draw)) in enumerate(zip(names, kinds, strict=True))
    }
    filled = " and ".join(f"{name} {{r{i}}}" for i, name in enumerate(names))
    slots = {"verb": verb, "Verb": verb.title(), "noun": noun, "filled": filled}
    asks, descriptions = (tuple(text.format(**slots) for text in items(_MADE_UP[key])) for key in ("ask", "describe"))
    return Skill(MADE_UP, (verb,), (noun,), descriptions, roles, asks, "The result", _number_result)


def _name_of(words: str, rng: Random) -> str:
    parts = words.split()
    if rng.random() < 0.75:
        return "_".join(parts)
    return parts[0] + "".join(part.title() for part in parts[1:])


@dataclass(frozen=True, slots=True)
class Drawn:
    """One tool of a skill; `roles` says by which parameter it takes a role. Not every tool takes every role."""

    skill: Skill
    tool: Tool
    roles: Mapping[str, str]


# Names that everyone uses are for training, wherever the hash would put them.
_TRAINED_NAMES = ("calculate", "calculator")


def name_is_held_out(words: str) -> bool:
    return words not in _TRAINED_NAMES and is_held_out(f"function {words}")


def has_held_out_name(skill: Skill) -> bool:
    names = (f"{verb} {noun}".strip() for verb in skill.verbs for noun in skill.nouns)
    return any(name_is_held_out(name) for name in names)


def draw_tool(skill: Skill, rng: Random, *, held_out: bool | None) -> Drawn:
    """The split looks at the words of the name, however it is written. None draws from both sides of it."""
    while True:
        words = f"{rng.choice(skill.verbs)} {rng.choice(skill.nouns)}".strip()
        if words and (held_out is None or name_is_held_out(words) is held_out):
            break
    wanted = set(skill.roles)
    if "unit" in wanted and rng.random() < 0.5:
        wanted.remove("unit")
    if {"count", "sides"} <= wanted and rng.random() < 0.3:
        wanted.remove(rng.choice(("count", "sides")))
    while True:
        roles = {role: rng.choice(skill.roles[role].names) for role in skill.roles if role in wanted}
        if len(set(roles.values())) == len(roles):
            break
    description = rng.choice(skill.descriptions)
    if rng.random() < 0.05:
        description = ""
    parameters = {name: _kind(skill.roles[role].kind, rng) for role, name in roles.items()}
    return Drawn(skill, Tool(_name_of(words, rng), description, parameters), roles)


def _kind(kind: ParameterType, rng: Random) -> ParameterType:
    if isinstance(kind, tuple):
        return kind if rng.random() < 0.8 else "string"
    return rng.choice(("integer", "number")) if kind == "number" and rng.random() < 0.3 else kind


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for a drawn tool, the values of its roles, and what comes back."""

    text: str
    values: Mapping[str, CallValue]
    arguments: Mapping[str, CallValue]
    result: str
    answer: str


def _fields_of(question: str, skill: Skill) -> set[str]:
    return {role for role in skill.roles if f"{{{role}}}" in question}


def _draw_value(role: Role, rng: Random, *, held_out: bool, integer: bool) -> CallValue:
    """Texts are split too, where enough of them exist."""
    while True:
        value = role.draw(rng)
        if integer and isinstance(value, float):
            continue
        if not role.is_split or is_held_out(f"value {value}") is held_out:
            return value


def fitting(questions: tuple[str, ...], drawn: Drawn) -> tuple[str, ...]:
    """Those of a skill's questions that the drawn tool can answer."""
    return tuple(text for text in questions if _fields_of(text, drawn.skill) <= set(drawn.roles))


def draw_ask(drawn: Drawn, rng: Random, *, held_out: bool, wordings: tuple[str, ...] = ()) -> Ask:
    """Asks in one of `wordings`, or in the skill's own where there are none for the drawn roles."""
    skill, tool = drawn.skill, drawn.tool
    question = rng.choice(fitting(wordings, drawn) or fitting(skill.questions, drawn))
    filled = _fields_of(question, skill)
    values = {
        role: _draw_value(skill.roles[role], rng, held_out=held_out, integer=tool.parameters[name] == "integer")
        for role, name in drawn.roles.items()
        if role in filled
    }
    arguments = {drawn.roles[role]: value for role, value in values.items()}
    result, answer = _outcome(skill, values, rng)
    return Ask(question.format(**values), values, arguments, result, answer)


# Keys that say nothing about their value.
_PLAIN_KEYS = frozenset(("result", "value", "answer", "total", "text", "title", "time"))


def _outcome(skill: Skill, values: Mapping[str, CallValue], rng: Random) -> tuple[str, str]:
    """What the tool returns, and the sentence that says so."""
    if rng.random() < 0.04:
        reason = rng.choice(("not found", "no network", "timeout", any_word(rng)))
        return f"error: {reason}", f"That did not work: {reason}."
    result = skill.result(rng)
    subject = skill.topic.format(**values)
    if isinstance(result, str):
        return result, "Done." if result in DONE else f"{subject} is {result}."
    echoed = {}
    if values and rng.random() < 0.4:
        role = rng.choice(list(values))
        echoed = {rng.choice(skill.roles[role].names): values[role]}
    told = {key: value for key, value in result.items() if key not in echoed} or result
    separators = (",", ":") if rng.random() < 0.1 else (", ", ": ")
    returned = to_json(echoed | result, separators)
    if len(told) == 1 and not _PLAIN_KEYS.isdisjoint(told):
        return returned, f"{subject} is {next(iter(told.values()))}."
    said = " and ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in told.items())
    return returned, f"{subject}: {said}."
