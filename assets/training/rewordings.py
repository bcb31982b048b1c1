"""Conversations of the third course: tools described and asked for in many more words, and what newcomers try first.

The split looks at the description and at the wording of the question, so that both can be measured unseen.
"""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from assets.training.conversations import (
    NO_TOOL_ANSWER,
    Call,
    Called,
    Conversation,
    Exchange,
    ParameterType,
    Said,
    Tool,
)
from assets.training.corpus import loosely
from assets.training.data import items
from assets.training.questions import UNKNOWN_ANSWER, WORDINGS, is_held_out, sentence_case
from assets.training.tool_lessons import (
    ARITHMETIC,
    answered,
    called,
    draw_made_up,
    draw_name,
    draw_system,
    ordinary_exchange,
    rivals,
    shuffled,
)
from assets.training.tool_skills import SKILLS, Ask, Drawn, draw_ask, draw_tool, fitting

# What documentation shows is never held out.
_ALWAYS_TRAINED = {
    "The weather in a city.", "Get the weather in a city.", "Get the current weather in a city.", "The time in a city.",
    "Get current temperature for a given location.", "What is the weather like in {place}?", "Add two numbers.",
    "What is the weather in {place}?", "Set a timer for {minutes} minutes.",
}  # fmt: skip
_DOUBLED = {"get", "set", "put", "flip"}


def third_person(phrase: str) -> str:
    """ "look up" becomes "looks up"."""
    verb, *rest = phrase.split(" ")
    if verb.endswith(("ch", "sh", "ss", "x", "o")):
        verb += "es"
    elif verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ies"
    else:
        verb += "s"
    return " ".join((verb, *rest))


def gerund(phrase: str) -> str:
    """ "look up" becomes "looking up"."""
    verb, *rest = phrase.split(" ")
    if verb in _DOUBLED:
        verb += verb[-1]
    elif verb.endswith("e"):
        verb = verb[:-1]
    return " ".join((f"{verb}ing", *rest))


# How a description says what a tool does, and how often; the first ones are the usual ones.
_STYLES = {
    "{verb} {thing}": 6.0, "{thing}": 5.0, "{does} {thing}": 4.0, "use this to {verb} {thing}": 1.5,
    "use this tool to {verb} {thing}": 1.0, "useful for {doing} {thing}": 1.0, "useful to {verb} {thing}": 0.7,
    "a tool to {verb} {thing}": 1.0, "a tool that {does} {thing}": 0.7, "a function that {does} {thing}": 0.7,
    "tool for {doing} {thing}": 0.7, "this tool {does} {thing}": 0.7, "call this to {verb} {thing}": 0.7,
    "call this when the user wants to {verb} {thing}": 0.7, "lets you {verb} {thing}": 0.7, "can {verb} {thing}": 0.7,
}  # fmt: skip
_TAILS = (" Returns text.", " Returns JSON.", " Call this whenever you need it.", " Use it when asked.",
          " Works for all of them.", " Never guess.", " Returns a short answer.")  # fmt: skip


def _is_unseen(text: str) -> bool:
    """One in six, of those that documentation does not show."""
    return text not in _ALWAYS_TRAINED and (is_held_out(f"wording {text}") or is_held_out(f"words {text}"))


def describe(name: str, rng: Random, *, held_out: bool) -> str:
    """A description of one line for a tool of the skill `name`."""
    skill = SKILLS[name]
    while True:
        verb, thing = rng.choice(skill.does), rng.choice(skill.things)
        (style,) = rng.choices(list(_STYLES), list(_STYLES.values()))
        said = style.format(verb=verb, thing=thing, does=third_person(verb), doing=gerund(verb))
        line = sentence_case(said) + "."
        if _is_unseen(line) is held_out:
            break
    choice = rng.random()
    if choice < 0.08:
        return line + rng.choice(_TAILS)
    if choice < 0.4:
        return line.rstrip(".")
    return line[:1].lower() + line[1:].rstrip(".") if choice < 0.48 else line


def ways_to_ask(name: str, *, held_out: bool) -> tuple[str, ...]:
    return tuple(text for text in SKILLS[name].more if _is_unseen(text) is held_out)


_PLACE_NOTES = (
    "The city and state, e.g. San Francisco, CA", "The city", "The name of the city", "City and country",
    "City and country e.g. Bogota, Colombia", "A city, such as Paris", "The city to look up", "Name of the place",
)  # fmt: skip


def describe_parameter(parameter: str, role: str, rng: Random) -> str:
    if role in ("place", "origin", "destination") and rng.random() < 0.6:
        return rng.choice(_PLACE_NOTES)
    words = parameter.replace("_", " ")
    note = rng.choice(("The {}", "{}", "The {} to use", "{} of it", "The {} as given", "Which {}", "the {}", "A {}"))
    return sentence_case(note.format(words)) + rng.choice(("", "", "."))


# What is easily confused, beside what one question could mean as well.
_ALIKE = tuple(
    set(group.split())
    for group in (
        "weather time population horoscope stock", "weather time distance delivery", "add subtract multiply divide",
        "convert currency translate", "message note file", "message remind timer", "timer light music remind",
        "order delivery stock", "distance flight table", "dice coin random", "user message delivery",
    )
)  # fmt: skip
_MADE_UP = "made up"
_EXTRAS: dict[str, ParameterType] = {
    "limit": "integer", "lang": ("en", "fr"), "verbose": "boolean", "format": ("short", "long"),
    "units": ("metric", "imperial"), "country": "string", "days": "integer", "max_results": "integer",
}  # fmt: skip


def reworded(name: str, drawn: Drawn, rng: Random, *, held_out: bool) -> Drawn:
    """The same tool with another description; some of its parameters are described, some may be left out."""
    tool = drawn.tool
    description, notes, optional = tool.description, dict[str, str](), set[str]()
    parameters = dict(tool.parameters)
    choice = rng.random()
    if name in SKILLS and (held_out or choice < 0.78):
        description = describe(name, rng, held_out=held_out)
    elif choice < 0.9:
        description = ""
    if "unit" in drawn.roles and rng.random() < 0.7:
        optional.add(drawn.roles["unit"])
    if rng.random() < 0.1:
        extra = rng.choice(list(_EXTRAS))
        if extra not in parameters:
            parameters[extra] = _EXTRAS[extra]
            optional.add(extra)
    if rng.random() < 0.35:
        roles = {parameter: role for role, parameter in drawn.roles.items()}
        notes = {
            parameter: describe_parameter(parameter, roles.get(parameter, parameter), rng)
            for parameter, kind in parameters.items()
            if isinstance(kind, str) and rng.random() < 0.9
        }
    return replace(drawn, tool=Tool(tool.name, description, parameters, notes, frozenset(optional)))


def _draw_skilled(name: str, rng: Random) -> Drawn:
    if name == _MADE_UP:
        return reworded(name, draw_made_up(rng), rng, held_out=False)
    return reworded(name, draw_tool(SKILLS[name], rng, held_out=False), rng, held_out=False)


def _ask(name: str, drawn: Drawn, rng: Random) -> Ask:
    wordings = ways_to_ask(name, held_out=False) if name in SKILLS and rng.random() < 0.6 else ()
    return draw_ask(drawn, rng, held_out=False, wordings=wordings)


def _alike(name: str) -> list[str]:
    return sorted(set().union(*(group for group in _ALIKE if name in group)) - {name})


def _fits_beside(name: str, names: list[str]) -> bool:
    return not any(rivals(name, other) for other in names)


def _draw_beside(names: list[str], rng: Random) -> str:
    """Another skill, often one that is easily confused with those there are."""
    while True:
        if rng.random() < 0.12:
            return _MADE_UP
        alike = _alike(rng.choice(names)) if names else []
        name = rng.choice(alike) if alike and rng.random() < 0.5 else draw_name(rng)
        if _fits_beside(name, names):
            return name


def _toolbox(rng: Random) -> tuple[list[str], list[Drawn]]:
    """One to four tools; of two of one name only the first."""
    names = [_MADE_UP if rng.random() < 0.12 else draw_name(rng)]
    for _ in range(rng.choices((0, 1, 2, 3), (35, 30, 20, 15))[0]):
        names.append(_draw_beside(names, rng))
    drawn = {one.tool.name: (name, one) for name, one in ((name, _draw_skilled(name, rng)) for name in names)}
    return [name for name, _ in drawn.values()], [one for _, one in drawn.values()]


def _missing(names: list[str], rng: Random, answer: str) -> Exchange:
    """A question for which there is no tool, often like one for which there is."""
    while True:
        name = _draw_beside(names, rng)
        if name not in ARITHMETIC and _fits_beside(name, [one for one in names if one != _MADE_UP]):
            return Said(loosely(_ask(name, _draw_skilled(name, rng), rng).text, rng)), Said(answer)


def make_reworded_conversation(rng: Random) -> Conversation:
    """One question or several, each for one of the tools, for none of them, or one that needs no tool."""
    if rng.random() < 0.04:
        return Conversation("tool_none", (), (_missing([], rng, UNKNOWN_ANSWER),), draw_system(rng))
    names, drawn = _toolbox(rng)
    narrow = all(name == _MADE_UP or SKILLS[name].narrow for name in names)
    exchanges: list[Exchange] = []
    count = rng.choices((1, 2, 3, 4), (45, 27, 18, 10))[0]
    while count:
        count -= 1
        choice = rng.random()
        if choice < 0.3:
            exchanges.append(_missing(names, rng, NO_TOOL_ANSWER))
        elif choice < 0.45 and narrow:
            exchanges.append(ordinary_exchange(rng, "beside_reworded"))
        else:
            which = rng.randrange(len(drawn))
            ask = _ask(names[which], drawn[which], rng)
            if count == 0 and rng.random() < 0.5:
                exchanges.append((Said(loosely(ask.text, rng)), called(drawn[which], ask)))
            else:
                exchanges += answered(drawn[which], ask)
    tools = shuffled([one.tool for one in drawn], rng)
    return Conversation("tool_reworded", tools, tuple(exchanges), draw_system(rng))


def _draw_unseen(rng: Random) -> tuple[str, Drawn, Ask]:
    """Description, question and values are from the held-out side; the name may be from either."""
    while True:
        name = draw_name(rng)
        drawn = reworded(name, draw_tool(SKILLS[name], rng, held_out=None), rng, held_out=True)
        wordings = fitting(ways_to_ask(name, held_out=True), drawn)
        if wordings:
            return name, drawn, draw_ask(drawn, rng, held_out=True, wordings=wordings)


def _draw_choice(kind: str, counts: tuple[int, ...], *, is_there: bool) -> Callable[..., Conversation]:
    """A question in words that were never seen in training, for a tool among as many others, or that is not there."""

    def draw(rng: Random, *, held_out: bool) -> Conversation:
        assert held_out, "training draws conversations of several questions"
        while True:
            name, drawn, ask = _draw_unseen(rng)
            if is_there or name not in ARITHMETIC:
                break
        names = [name]
        for _ in range(rng.choice(counts)):
            names.append(_draw_beside(names, rng))
        tools = [_draw_skilled(other, rng).tool for other in names[1:]]
        if is_there:
            tools = [drawn.tool, *tools]
        # Of tools of one name only the first, in any order.
        by_name = {tool.name: tool for tool in reversed(tools)}
        done = called(drawn, ask) if is_there else Said(NO_TOOL_ANSWER)
        return Conversation(kind, shuffled(list(by_name.values()), rng), ((Said(ask.text), done),), draw_system(rng))

    return draw


# As the documentation of Quire and of well-known clients has them.
_FIRST = {name: items(text) for name, text in WORDINGS["first_try"].items()}


def draw_first_try(rng: Random, *, held_out: bool) -> Conversation:
    """What a newcomer tries first. Most of these words were seen in training, not all of them."""
    parameter = rng.choice(("city", "location"))
    notes = {parameter: rng.choice(("The city", "The city and state, e.g. San Francisco, CA"))}
    parameters: dict[str, ParameterType] = {parameter: "string"}
    has_unit = rng.random() < 0.3
    if has_unit:
        parameters["unit"] = ("celsius", "fahrenheit")
    tool = Tool(
        rng.choice(("get_weather", "get_current_weather", "weather")),
        rng.choice(_FIRST["descriptions"]),
        parameters,
        notes if rng.random() < 0.5 else {},
        frozenset({"unit"} if has_unit else ()),
    )
    city = rng.choice(_FIRST["cities"])
    exchange = (Said(rng.choice(_FIRST["questions"]).format(city)), Called((Call(tool.name, {parameter: city}),)))
    return Conversation("tool_first_try", (tool,), (exchange,))


REWORDED_KINDS: dict[str, Callable[..., Conversation]] = {
    "tool_first_try": draw_first_try,
    "tool_reworded": _draw_choice("tool_reworded", (0, 1, 1, 2, 3), is_there=True),
    "tool_reworded_missing": _draw_choice("tool_reworded_missing", (1, 1, 2, 3), is_there=False),
}
"""What is measured of the third course."""
