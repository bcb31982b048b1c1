"""The tools: their names, their parameters, the questions of users, and their results.

A skill is a family of tools (`data/skills.toml`): each draw gives another name, description and names of parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from random import Random

from assets.training.conversations import Call, CallValue, Exchange, ParameterType, Tool, to_json
from assets.training.corpus import LISTS, NAMES, TABLES, WORDS, is_held_out, items, load, made_up_word, pairs

MADE_UP = "made up"
Result = str | dict[str, CallValue]
Draw = Callable[[Random], CallValue]


def one_of(values: Iterable[str]) -> Callable[[Random], str]:
    return lambda rng, among=tuple(values): rng.choice(among)


_letter, _city = one_of("abcdefghijklmnopqrstuvwxyz"), one_of((*(y for _, y in TABLES["capitals"]), *LISTS["cities"]))


def _strange_word(rng: Random) -> str:
    """Letters in an order that no list has, so that copying letter by letter is learnt."""
    return "".join(_letter(rng) for _ in range(rng.randint(2, 7)))


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
        return _city(rng)
    name = any_word(rng).title()
    return f"{rng.choice(('New', 'San', 'Port', 'East'))} {name}" if rng.random() < 0.15 else name


def person(rng: Random) -> str:
    return rng.choice(NAMES) if rng.random() < 0.5 else any_word(rng).title()


def number(rng: Random) -> int:
    """A number of any length, since numbers are only copied."""
    return rng.randrange(10 ** rng.randint(1, 4))


def identifier(rng: Random) -> str:
    digits = str(rng.randrange(10 ** rng.randint(2, 6)))
    prefixes = ("order_", "A-", "ID", "", "X", f"{_strange_word(rng)}_", f"{_strange_word(rng).upper()}-")
    return rng.choice(prefixes) + digits


def _file_name(rng: Random) -> str:
    folder = f"{any_word(rng)}/" if rng.random() < 0.3 else ""
    return f"{folder}{any_word(rng)}.{rng.choice(('txt', 'md', 'py', 'json', 'csv', 'log'))}"


def _ticker(rng: Random) -> str:
    if rng.random() < 0.3:
        return rng.choice(("AAPL", "MSFT", "GOOG", "TSLA", "NVDA", "AMZN"))
    return "".join(_letter(rng) for _ in range(rng.randint(3, 4))).upper()


def _expression(rng: Random) -> str:
    text = str(number(rng))
    for _ in range(rng.choice((1, 1, 2))):
        text += f" {rng.choice('+-*/')} {number(rng)}"
    return text


# Values that are texts, enough of them for a split.
_TEXTS: dict[str, Draw] = {
    "place": place, "person": person, "any_word": any_word, "identifier": identifier,
    "topic": lambda rng: rng.choice(LISTS["topics"]) if rng.random() < 0.4 else _phrase(rng),
    "sentence": lambda rng: rng.choice(LISTS["sentences"]) if rng.random() < 0.5 else _phrase(rng, 5),
    "file_name": _file_name,
}  # fmt: skip
VALUES: dict[str, Draw] = {
    **_TEXTS, "number": number, "ticker": _ticker, "expression": _expression,
    "small_number": lambda rng: rng.randint(1, 30), "age": lambda rng: rng.randint(1, 99),
    "amount": lambda rng: number(rng) + 1 if rng.random() < 0.75 else round(rng.uniform(0.1, 99), rng.randint(1, 2)),
    "clock": lambda rng: f"{rng.randrange(24):02}:{rng.randrange(60):02}",
    "colour": one_of(sorted({colour for _, colour in TABLES["colours"]})),
    "animal": one_of(animal for animal, _ in TABLES["young"]),
    **{name: one_of(LISTS[name]) for name in ("units", "currencies", "languages", "rooms", "signs", "days", "jobs")},
}  # fmt: skip


def _weather_result(rng: Random) -> Result:
    degrees, sky = rng.randint(-9, 39), rng.choice(LISTS["skies"])
    which = rng.randrange(6)
    if which < 2:
        return f"{degrees} degrees and {sky}" if which else f"{sky}, {degrees} degrees"
    if which == 2:
        return {"temperature": degrees, rng.choice(("condition", "conditions", "description", "weather")): sky}
    if which == 3:
        return {"temperature": degrees, "unit": rng.choice(("celsius", "fahrenheit", "C", "F"))}
    if which == 4:
        return {rng.choice(("temperature", "temp", "temp_c")): degrees}
    return rng.choice((str(degrees), f"{degrees}°C", f"{degrees} C", sky))


def _value_result(draw: Draw, keys: str, share: float) -> Callable[[Random], Result]:
    """A value, in an object by a share of all times."""

    def result(rng: Random) -> Result:
        value = draw(rng)
        return {rng.choice(keys.split()): value} if rng.random() < share else str(value)

    return result


DONE = ("ok", "done", "success", "true", "OK", "Done", "null")


def _done(rng: Random) -> Result:
    is_bare = rng.random() >= 0.4
    return rng.choice(DONE) if is_bare else {"status": rng.choice(("ok", "done", "sent", "success", any_word(rng)))}


_RESULTS: dict[str, Callable[[Random], Result]] = {
    "weather": _weather_result, "number": _value_result(VALUES["amount"], "result value answer total", 0.3),
    "text": _value_result(_phrase, "result text title answer", 0.4), "done": _done, "coin": one_of(("heads", "tails")),
    "clock": lambda rng: {"time": VALUES["clock"](rng)} if rng.random() < 0.3 else str(VALUES["clock"](rng)),
}  # fmt: skip
_GET = "get | get | fetch | return | look up | find | retrieve | show | give | tell | check | provide"


@dataclass(frozen=True, slots=True)
class Role:
    """A parameter by its part in the question: how it is drawn, its type or its values, and what tools call it."""

    drawn: str
    kind: str
    names: str

    def value(self, rng: Random, *, held_out: bool, integer: bool) -> CallValue:
        """Texts are split too, where enough of them exist."""
        values = items(self.kind)
        while True:
            value = rng.choice(values) if len(values) > 1 else VALUES[self.drawn](rng)
            is_on_side = self.drawn not in _TEXTS or is_held_out(f"value {value}") is held_out
            if is_on_side and not (integer and isinstance(value, float)):
                return value

    def draw_type(self, rng: Random) -> ParameterType:
        values = items(self.kind)
        if len(values) > 1:
            return values if rng.random() < 0.8 else "string"
        return rng.choice(("integer", "number")) if self.kind == "number" and rng.random() < 0.3 else self.kind


@dataclass(frozen=True, slots=True)
class Skill:
    """`data/skills.toml` says what the fields of `data` are; questions name the roles that they fill in."""

    name: str
    data: Mapping[str, str]
    roles: Mapping[str, Role]

    def each(self, key: str) -> tuple[str, ...]:
        return items(self.data[key])

    def fields(self, question: str) -> set[str]:
        return {role for role in self.roles if f"{{{role}}}" in question}

    @property
    def narrow(self) -> bool:
        """No question of the old kinds could be meant for this tool."""
        return self.name not in _BROAD.split()


SKILLS: dict[str, Skill] = {
    name: Skill(name, {"does": _GET, **data}, {role: Role(*of) for role, of in data.get("roles", {}).items()})
    for name, data in load("skills").items()
}
_MADE_UP, _BROAD = (load("tools")[name] for name in ("made_up", "broad"))


def _made_up_skill(rng: Random) -> Skill:
    """A tool that no list contains; its questions name the parameters."""
    verb = rng.choice(LISTS["made_up_verbs"]) if rng.random() < 0.7 else _strange_word(rng)
    noun = any_word(rng)
    names = list(dict.fromkeys(any_word(rng) for _ in range(rng.randint(1, 3))))
    # Roles are numbered, since a made-up name need not suit str.format.
    roles = {f"r{i}": Role(*rng.choice(pairs(_MADE_UP["roles"])), name) for i, name in enumerate(names)}
    filled = " and ".join(f"{name} {{r{i}}}" for i, name in enumerate(names))
    data = {key: text.format(verb=verb, Verb=verb.title(), noun=noun, filled=filled) for key, text in _MADE_UP.items()}
    return Skill(MADE_UP, data, roles)


def _name_is_held_out(words: str) -> bool:
    """Names that everyone uses are for training, wherever the hash would put them."""
    return words not in ("calculate", "calculator") and is_held_out(f"function {words}")


def has_held_out_name(skill: Skill) -> bool:
    return any(
        _name_is_held_out(f"{verb} {noun}".strip()) for verb in skill.each("verbs") for noun in skill.each("nouns")
    )


@dataclass(frozen=True, slots=True)
class Ask:
    """A question for a drawn tool, the call that answers it, what comes back, and that in words."""

    text: str
    call: Call
    result: str
    answer: str

    def asked(self) -> Exchange:
        return self.text, (self.call,)

    def exchanges(self) -> tuple[Exchange, Exchange]:
        return self.asked(), ((self.result,), self.answer)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One tool of a skill; `roles` says by which parameter it takes a role. Not every tool takes every role."""

    skill: Skill
    tool: Tool
    roles: Mapping[str, str]

    def fitting(self, questions: tuple[str, ...]) -> tuple[str, ...]:
        """The questions of the skill that this tool can answer."""
        return tuple(text for text in questions if self.skill.fields(text) <= set(self.roles))

    def ask(self, rng: Random, *, held_out: bool, wordings: tuple[str, ...] = ()) -> Ask:
        """Asks in one of `wordings`, or in the skill's own where there are none for the drawn roles."""
        question = rng.choice(self.fitting(wordings) or self.fitting(self.skill.each("questions")))
        filled = self.skill.fields(question)
        values: dict[str, CallValue] = {}
        for role, name in self.roles.items():
            if role in filled:
                integer = self.tool.parameters[name] == "integer"
                values[role] = self.skill.roles[role].value(rng, held_out=held_out, integer=integer)
        arguments = {self.roles[role]: value for role, value in values.items()}
        outcome = _outcome(self.skill, values, rng)
        return Ask(question.format(**values), Call(name=self.tool.name, arguments=arguments), *outcome)


def draw_tool(skill: Skill, rng: Random, *, held_out: bool | None = None) -> Drawn:
    """The split looks at the words of the name, however it is written. None draws from both sides of it."""
    while True:
        words = f"{rng.choice(skill.each('verbs'))} {rng.choice(skill.each('nouns'))}".split()
        if words and (held_out is None or _name_is_held_out(" ".join(words)) is held_out):
            break
    wanted = set(skill.roles)
    if "unit" in wanted and rng.random() < 0.5:
        wanted.remove("unit")
    if {"count", "sides"} <= wanted and rng.random() < 0.3:
        wanted.remove(rng.choice(("count", "sides")))
    while True:
        roles = {role: rng.choice(items(skill.roles[role].names)) for role in skill.roles if role in wanted}
        if len(set(roles.values())) == len(roles):
            break
    description = rng.choice(skill.each("descriptions"))
    if rng.random() < 0.05:
        description = ""
    parameters = {name: skill.roles[role].draw_type(rng) for role, name in roles.items()}
    name = "_".join(words) if rng.random() < 0.75 else words[0] + "".join(word.title() for word in words[1:])
    return Drawn(skill, Tool(name, description, parameters), roles)


def draw_made_up(rng: Random) -> Drawn:
    return draw_tool(_made_up_skill(rng), rng)


def _outcome(skill: Skill, values: Mapping[str, CallValue], rng: Random) -> tuple[str, str]:
    """The tool's result, and the sentence that reports it."""
    if rng.random() < 0.04:
        reason = rng.choice(("not found", "no network", "timeout", any_word(rng)))
        return f"error: {reason}", f"That did not work: {reason}."
    kind, _, topic = skill.data["result"].partition(": ")
    result, subject = _RESULTS[kind](rng), topic.format(**values)
    if isinstance(result, str):
        return result, "Done." if result in DONE else f"{subject} is {result}."
    echoed = {}
    if values and rng.random() < 0.4:
        role = rng.choice(list(values))
        echoed = {rng.choice(items(skill.roles[role].names)): values[role]}
    told = {key: value for key, value in result.items() if key not in echoed} or result
    returned = to_json(echoed | result, (",", ":") if rng.random() < 0.1 else (", ", ": "))
    # These keys say nothing about their value.
    if len(told) == 1 and next(iter(told)) in ("result", "value", "answer", "total", "text", "title", "time"):
        return returned, f"{subject} is {next(iter(told.values()))}."
    said = " and ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in told.items())
    return returned, f"{subject}: {said}."
