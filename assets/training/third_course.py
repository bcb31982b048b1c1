"""The documents of the third course: tools in many more words, between documents of the first two courses."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random

from assets.training.corpus import THIRD_EMPHASIS, Document, Emphasis, draw_question
from assets.training.second_course import Shares, make_second_course_document
from assets.training.small_talk import UNKNOWN_ANSWER
from assets.training.tool_lessons import (
    ARITHMETIC,
    answered,
    called,
    draw_made_up,
    draw_name,
    draw_parallel_calls,
    draw_system,
    loosely,
    rivals,
    shuffled,
)
from assets.training.tool_skills import SKILLS, Ask, Drawn, draw_ask, draw_tool, fitting
from assets.training.tool_wordings import WORDINGS, describe, describe_parameter, ways_to_ask
from assets.training.tools import (
    NO_TOOL_ANSWER,
    Call,
    Called,
    Exchange,
    ParameterType,
    Said,
    Tool,
    ToolConversation,
    tool_document,
)

# What is easily confused, beside what one question could mean as well.
_ALIKE = (
    {"weather", "time", "population", "horoscope", "stock"},
    {"weather", "time", "distance", "delivery"},
    {"add", "subtract", "multiply", "divide"},
    {"convert", "currency", "translate"},
    {"message", "note", "file"},
    {"message", "remind", "timer"},
    {"timer", "light", "music", "remind"},
    {"order", "delivery", "stock"},
    {"distance", "flight", "table"},
    {"dice", "coin", "random"},
    {"user", "message", "delivery"},
)
_ORDINARY: Emphasis = {
    **THIRD_EMPHASIS, "unknown": 8.0, "manners": 8.0, "identity": 8.0, "who_it_is": 8.0, "spell": 1.0, "repeat": 2.0,
    "capital": 8.0, "colour": 3.0,
}  # fmt: skip
_DECISION_WEIGHT = 3.0
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
    if name in WORDINGS and (held_out or choice < 0.78):
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
    wordings = ways_to_ask(name, held_out=False) if name in WORDINGS and rng.random() < 0.6 else ()
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


def _ordinary(rng: Random) -> Exchange:
    question = draw_question(rng, _ORDINARY, held_out=False)
    return Said(question.text), Said(question.answer)


def make_reworded_conversation(rng: Random) -> ToolConversation:
    """One question or several, each for one of the tools, for none of them, or one that needs no tool."""
    if rng.random() < 0.04:
        return ToolConversation("tool_none", (), (_missing([], rng, UNKNOWN_ANSWER),), draw_system(rng))
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
            exchanges.append(_ordinary(rng))
        else:
            which = rng.randrange(len(drawn))
            ask = _ask(names[which], drawn[which], rng)
            if count == 0 and rng.random() < 0.5:
                exchanges.append((Said(loosely(ask.text, rng)), called(drawn[which], ask)))
            else:
                exchanges += answered(drawn[which], ask)
    tools = shuffled([one.tool for one in drawn], rng)
    return ToolConversation("tool_reworded", tools, tuple(exchanges), draw_system(rng))


def _draw_unseen(rng: Random) -> tuple[str, Drawn, Ask]:
    """Description, question and values are from the held-out side; the name may be from either."""
    while True:
        name = draw_name(rng)
        drawn = reworded(name, draw_tool(SKILLS[name], rng, held_out=None), rng, held_out=True)
        wordings = fitting(ways_to_ask(name, held_out=True), drawn)
        if wordings:
            return name, drawn, draw_ask(drawn, rng, held_out=True, wordings=wordings)


def draw_reworded_call(rng: Random, *, held_out: bool) -> ToolConversation:
    """One call by a tool among up to three others, in words that were never seen in training."""
    assert held_out, "training draws conversations of several questions"
    name, drawn, ask = _draw_unseen(rng)
    names = [name]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        names.append(_draw_beside(names, rng))
    tools = [drawn.tool, *(_draw_skilled(other, rng).tool for other in names[1:])]
    exchange = (Said(ask.text), called(drawn, ask))
    return ToolConversation("tool_reworded", _distinct(tools, rng), (exchange,), draw_system(rng))


def draw_reworded_missing(rng: Random, *, held_out: bool) -> ToolConversation:
    """A question in unseen words, for a tool that is not among the one to three that are there."""
    assert held_out, "training draws conversations of several questions"
    while True:
        name, _, ask = _draw_unseen(rng)
        if name not in ARITHMETIC:
            break
    names = [name]
    for _ in range(rng.choice((1, 1, 2, 3))):
        names.append(_draw_beside(names, rng))
    tools = [_draw_skilled(other, rng).tool for other in names[1:]]
    exchange = (Said(ask.text), Said(NO_TOOL_ANSWER))
    return ToolConversation("tool_reworded_missing", _distinct(tools, rng), (exchange,), draw_system(rng))


def _distinct(tools: list[Tool], rng: Random) -> tuple[Tool, ...]:
    """Of tools of one name only the first, in any order."""
    by_name = {tool.name: tool for tool in reversed(tools)}
    return shuffled(list(by_name.values()), rng)


# As the documentation of Quire and of well-known clients has them.
_FIRST_DESCRIPTIONS = (
    "The weather in a city.", "Get the weather in a city.", "Get the current weather in a given location",
    "Get current temperature for a given location.", "Get the weather for a city", "Returns the weather.", "",
    "Get weather for the given city.", "Call this to find out what the weather is like in a city", "weather",
)  # fmt: skip
_FIRST_QUESTIONS = (
    "What is the weather like in {}?", "What's the weather like in {} today?", "What is the weather in {}?",
    "How is the weather in {}?", "What's the weather in {}?", "What will the weather be in {}?", "Weather in {}?",
    "What is the weather like today in {}?", "what is the weather in {}", "Tell me the weather in {}.",
)  # fmt: skip


def draw_first_try(rng: Random, *, held_out: bool) -> ToolConversation:
    """What a newcomer tries first. Most of these words were seen in training, not all of them."""
    parameter = rng.choice(("city", "location"))
    notes = {parameter: rng.choice(("The city", "The city and state, e.g. San Francisco, CA"))}
    parameters: dict[str, ParameterType] = {parameter: "string"}
    has_unit = rng.random() < 0.3
    if has_unit:
        parameters["unit"] = ("celsius", "fahrenheit")
    tool = Tool(
        rng.choice(("get_weather", "get_current_weather", "weather")),
        rng.choice(_FIRST_DESCRIPTIONS),
        parameters,
        notes if rng.random() < 0.5 else {},
        frozenset({"unit"} if has_unit else ()),
    )
    city = rng.choice(("Paris", "Rome", "Boston", "Tokyo", "Berlin", "London", "San Francisco", "New York", "Oslo"))
    exchange = (Said(rng.choice(_FIRST_QUESTIONS).format(city)), Called((Call(tool.name, {parameter: city}),)))
    return ToolConversation("tool_first_try", (tool,), (exchange,))


THIRD_COURSE_TOOL_KINDS: dict[str, Callable[..., ToolConversation]] = {
    "tool_first_try": draw_first_try,
    "tool_reworded": draw_reworded_call,
    "tool_reworded_missing": draw_reworded_missing,
}
"""What is measured of this course."""


def make_third_course_document(rng: Random, emphasis: Emphasis, shares: Shares) -> Document:
    """`shares.tools` are conversations in new words; the rest is the second course's, with few tools of its own."""
    choice = rng.random()
    if choice < shares.tools * 0.9:
        return tool_document(make_reworded_conversation(rng), _DECISION_WEIGHT)
    if choice < shares.tools:
        return tool_document(draw_parallel_calls(rng, held_out=False), _DECISION_WEIGHT)
    return make_second_course_document(rng, emphasis, Shares(old=shares.old, tools=0.08))


def third_course_documents(seed: int, emphasis: Emphasis, shares: Shares) -> Iterator[Document]:
    """An endless stream, the same for the same seed, emphasis and shares."""
    rng = Random(seed)
    while True:
        yield make_third_course_document(rng, emphasis, shares)
