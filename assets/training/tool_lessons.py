"""Conversations with tools: one call or several, results put into words, and questions that need no tool.

Those of the third course describe tools and ask for them in many more words. There the split looks at the description
and at the wording of the question, so that both can be measured unseen.
"""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from assets.training.conversations import (
    NO_TOOL_ANSWER,
    Call,
    Calls,
    Conversation,
    Exchange,
    ParameterType,
    Returned,
    Tool,
)
from assets.training.corpus import (
    EMPHASES,
    SYSTEM_PROMPTS,
    DrawConversation,
    choose,
    draw_question,
    exchange_of,
    loosely,
)
from assets.training.data import items, load
from assets.training.questions import UNKNOWN_ANSWER, WORDINGS, enumerated, is_held_out, sentence_case
from assets.training.tool_skills import (
    MADE_UP,
    SKILLS,
    Ask,
    Drawn,
    Skill,
    draw_ask,
    draw_tool,
    fitting,
    has_held_out_name,
    made_up_skill,
)

_DATA = load("tools")
_WORDS = {name: items(text) for name, text in _DATA["words"].items()}
_STYLES = _DATA["styles"]
_RIVALS, _ALIKE = ([set(group.split()) for group in items(_DATA[name])] for name in ("rivals", "alike"))
_SYSTEM_PROMPTS = (*SYSTEM_PROMPTS, *items(_DATA["systems"]))
_ARITHMETIC = _RIVALS[0]
_OFTEN = {"weather": 3.0, "add": 2.0, "multiply": 2.0, "calculate": 2.0, "search": 2.0}
_ALL = tuple(SKILLS.values())
_HELD_OUT_SKILLS = tuple(skill for skill in _ALL if has_held_out_name(skill))
# No two of these are rivals.
_LEARNT_TOGETHER = tuple(skill for skill in _ALL if skill.name not in ("calculate", "search", "note", "now"))
_SEVERAL = ("weather", "time", "population", "stock", "delivery", "user", "horoscope")


def _draw_skill(rng: Random, skills: tuple[Skill, ...] = _ALL) -> Skill:
    return rng.choices(skills, [_OFTEN.get(skill.name, 1.0) for skill in skills])[0]


def _draw_made_up(rng: Random) -> Drawn:
    return draw_tool(made_up_skill(rng), rng, held_out=None)


def _draw_drawn(rng: Random, *, held_out: bool) -> Drawn:
    return draw_tool(_draw_skill(rng, _HELD_OUT_SKILLS if held_out else _ALL), rng, held_out=held_out)


def _are_rivals(one: str, other: str) -> bool:
    return one == other or any(one in group and other in group for group in _RIVALS)


def _distinct(tools: Iterable[Tool]) -> list[Tool]:
    """Of tools of one name the last, where the first was."""
    return list({tool.name: tool for tool in tools}.values())


def _others(asked: str | None, rng: Random, count: int) -> list[Tool]:
    """Tools for none of which a question of the skill `asked` is meant; None stands for the old kinds of question."""
    skills: list[Skill] = []
    tools: list[Tool] = []
    while len(tools) < count:
        if asked is not None and rng.random() < 0.15:
            tools.append(_draw_made_up(rng).tool)
            continue
        skill = _draw_skill(rng)
        is_unfit = not skill.narrow if asked is None else _are_rivals(skill.name, asked)
        if not is_unfit and skill not in skills:
            skills.append(skill)
            tools.append(draw_tool(skill, rng, held_out=False).tool)
    return _distinct(tools)


def _among(drawn: Drawn, rng: Random) -> list[Tool]:
    """The drawn tool beside up to three others."""
    beside = _others(drawn.skill.name, rng, rng.choices((0, 1, 2, 3), (20, 30, 28, 22))[0])
    return [drawn.tool, *(tool for tool in beside if tool.name != drawn.tool.name)]


def _made(kind: str, tools: list[Tool], rng: Random, *exchanges: Exchange) -> Conversation:
    """With the tools in any order, and now and then with a system prompt."""
    rng.shuffle(tools)
    return Conversation(kind, tuple(tools), exchanges, rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.3 else None)


def _called(drawn: Drawn, ask: Ask) -> Calls:
    return (Call(drawn.tool.name, ask.arguments),)


def _answered(drawn: Drawn, ask: Ask) -> tuple[Exchange, Exchange]:
    return (ask.text, _called(drawn, ask)), (Returned((ask.result,)), ask.answer)


def draw_call(rng: Random, *, held_out: bool) -> Conversation:
    """One call, by a tool among up to three others."""
    drawn = _draw_drawn(rng, held_out=held_out)
    ask = draw_ask(drawn, rng, held_out=held_out)
    return _made("tool_call", _among(drawn, rng), rng, (ask.text, _called(drawn, ask)))


def draw_made_up_call(rng: Random, *, held_out: bool) -> Conversation:
    """A tool that nobody has heard of, among up to two others."""
    drawn = _draw_made_up(rng)
    ask = draw_ask(drawn, rng, held_out=held_out)
    tools = [drawn.tool, *_others(MADE_UP, rng, rng.choice((0, 1, 1, 2)))]
    return _made("tool_made_up", tools, rng, (ask.text, _called(drawn, ask)))


def _draw_parallel(rng: Random, *, held_out: bool) -> tuple[list[Tool], Exchange, Exchange]:
    """Two or three calls of one tool for one question, and their results."""
    while True:
        drawn = _draw_drawn(rng, held_out=held_out)
        if drawn.skill.name not in _SEVERAL:
            continue
        asks = [draw_ask(drawn, rng, held_out=held_out) for _ in range(rng.choice((2, 2, 3)))]
        first = asks[0]
        role = next(iter(first.values))
        values = [str(ask.values[role]) for ask in asks]
        if len(set(values)) == len(values) and first.text.count(values[0]) == 1:
            break
    text = first.text.replace(values[0], enumerated(values))
    calls = tuple(Call(drawn.tool.name, {**first.arguments, drawn.roles[role]: value}) for value in values)
    said = (Returned(tuple(ask.result for ask in asks)), " ".join(ask.answer for ask in asks))
    return _among(drawn, rng), (text, calls), said


def draw_parallel_calls(rng: Random, *, held_out: bool) -> Conversation:
    tools, asked, _ = _draw_parallel(rng, held_out=held_out)
    return _made("tool_parallel", tools, rng, asked)


def draw_answer(rng: Random, *, held_out: bool) -> Conversation:
    """A call, or several, and what came of it in words."""
    choice = rng.random()
    if choice < 0.12:
        tools, *exchanges = _draw_parallel(rng, held_out=held_out)
        return _made("tool_answer", tools, rng, *exchanges)
    drawn = _draw_made_up(rng) if choice < 0.25 else _draw_drawn(rng, held_out=held_out)
    ask = draw_ask(drawn, rng, held_out=held_out)
    return _made("tool_answer", _among(drawn, rng), rng, *_answered(drawn, ask))


def _ordinary_exchange(rng: Random, emphasis: str, *, held_out: bool = False) -> Exchange:
    """A question that needs no tool."""
    return exchange_of(draw_question(rng, EMPHASES[emphasis], held_out=held_out))


def draw_not_needed(rng: Random, *, held_out: bool) -> Conversation:
    """An ordinary question, asked beside tools."""
    exchange = _ordinary_exchange(rng, "beside_tools", held_out=held_out)
    return _made("tool_not_needed", _others(None, rng, rng.choice((1, 1, 2, 3))), rng, exchange)


def draw_missing(rng: Random, *, held_out: bool) -> Conversation:
    """A question for a tool that is not among those there are, or without any."""
    while True:
        drawn = _draw_drawn(rng, held_out=False)
        ask = draw_ask(drawn, rng, held_out=False)
        if is_held_out(ask.text) is held_out and drawn.skill.name not in _ARITHMETIC:
            break
    count = rng.choice((0, 0, 0, 1, 1, 2))
    exchange = (ask.text, NO_TOOL_ANSWER if count else UNKNOWN_ANSWER)
    return _made("tool_missing", _others(drawn.skill.name, rng, count), rng, exchange)


def _missing_for(skills: list[Skill], rng: Random) -> Exchange:
    """A question that none of the skills answers."""
    while True:
        skill = _draw_skill(rng)
        if skill.name not in _ARITHMETIC and not any(_are_rivals(skill.name, other.name) for other in skills):
            ask = draw_ask(draw_tool(skill, rng, held_out=False), rng, held_out=False)
            if not is_held_out(ask.text):
                return ask.text, NO_TOOL_ANSWER


def _long_conversation(rng: Random) -> Conversation:
    """Several questions, each for one of up to four tools or for none."""
    skills = rng.sample(_LEARNT_TOGETHER, rng.choices((1, 2, 3, 4), (15, 35, 30, 20))[0])
    choices = [draw_tool(skill, rng, held_out=False) for skill in skills]
    if rng.random() < 0.35:
        choices[-1] = _draw_made_up(rng)
    is_ordinary = not any(skill.name in ("search", *_ARITHMETIC) for skill in skills)
    exchanges: list[Exchange] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        chance = rng.random()
        if is_ordinary and chance < 0.12:
            exchanges.append(_ordinary_exchange(rng, "beside_tools"))
        elif chance > 0.94:
            exchanges.append(_missing_for(skills, rng))
        else:
            drawn = rng.choice(choices)
            exchanges += _answered(drawn, draw_ask(drawn, rng, held_out=False))
    return _made("tool_long", _distinct(drawn.tool for drawn in choices), rng, *exchanges)


TOOL_KINDS: dict[str, DrawConversation] = {
    "tool_call": draw_call, "tool_made_up": draw_made_up_call, "tool_parallel": draw_parallel_calls,
    "tool_answer": draw_answer, "tool_not_needed": draw_not_needed, "tool_missing": draw_missing,
}  # fmt: skip
_SHARES = dict(zip(TOOL_KINDS, (30, 14, 7, 25, 11, 16), strict=True))


def make_tool_conversation(rng: Random) -> Conversation:
    """One for training. Whoever asks loosely gets the same answer."""
    if rng.random() < 0.5:
        return _long_conversation(rng)
    conversation = TOOL_KINDS[choose(_SHARES, rng)](rng, held_out=False)
    (asked, done), *rest = conversation.exchanges
    assert isinstance(asked, str)
    return replace(conversation, exchanges=((loosely(asked, rng), done), *rest))


def _draw_call_among(some: bool) -> DrawConversation:
    def draw_one(rng: Random, *, held_out: bool) -> Conversation:
        while True:
            conversation = draw_call(rng, held_out=held_out)
            if (len(conversation.tools) > 1) is some:
                return conversation

    return draw_one


def _third_person(phrase: str) -> str:
    """ "look up" becomes "looks up"."""
    verb, *rest = phrase.split(" ")
    if verb.endswith("y") and verb[-2] not in "aeiou":
        verb = verb[:-1] + "ie"
    ending = "es" if verb.endswith(("ch", "sh", "ss", "x", "o")) else "s"
    return " ".join((verb + ending, *rest))


def _gerund(phrase: str) -> str:
    """ "look up" becomes "looking up"."""
    verb, *rest = phrase.split(" ")
    stem = verb + verb[-1] if verb in _WORDS["doubled"] else verb.removesuffix("e")
    return " ".join((f"{stem}ing", *rest))


def _is_unseen(text: str) -> bool:
    """One in six, of those that documentation does not show."""
    return text not in _WORDS["trained"] and (is_held_out(f"wording {text}") or is_held_out(f"words {text}"))


def _describe(skill: Skill, rng: Random, *, held_out: bool) -> str:
    """A description of one line for a tool of the skill."""
    while True:
        verb, thing = rng.choice(skill.does), rng.choice(skill.things)
        said = choose(_STYLES, rng).format(verb=verb, thing=thing, does=_third_person(verb), doing=_gerund(verb))
        line = sentence_case(said) + "."
        if _is_unseen(line) is held_out:
            break
    choice = rng.random()
    if choice < 0.08:
        return f"{line} {rng.choice(_WORDS['tails'])}"
    if choice < 0.4:
        return line.rstrip(".")
    return line[:1].lower() + line[1:].rstrip(".") if choice < 0.48 else line


def _ways_to_ask(skill: Skill, *, held_out: bool) -> tuple[str, ...]:
    return tuple(text for text in skill.more if _is_unseen(text) is held_out)


def _describe_parameter(parameter: str, role: str, rng: Random) -> str:
    if role in ("place", "origin", "destination") and rng.random() < 0.6:
        return rng.choice(_WORDS["place_notes"])
    note = rng.choice(_WORDS["notes"]).format(parameter.replace("_", " "))
    return sentence_case(note) + rng.choice(("", "", "."))


_EXTRAS: dict[str, ParameterType] = {
    "limit": "integer", "lang": ("en", "fr"), "verbose": "boolean", "format": ("short", "long"),
    "units": ("metric", "imperial"), "country": "string", "days": "integer", "max_results": "integer",
}  # fmt: skip


def _reworded(drawn: Drawn, rng: Random, *, held_out: bool = False) -> Drawn:
    """The same tool with another description; some of its parameters are described, some may be left out."""
    tool = drawn.tool
    description, notes, optional, parameters = tool.description, {}, set[str](), dict(tool.parameters)
    choice = rng.random()
    if drawn.skill.name != MADE_UP and (held_out or choice < 0.78):
        description = _describe(drawn.skill, rng, held_out=held_out)
    elif choice < 0.9:
        description = ""
    if "unit" in drawn.roles and rng.random() < 0.7:
        optional.add(drawn.roles["unit"])
    if rng.random() < 0.1 and (extra := rng.choice(list(_EXTRAS))) not in parameters:
        parameters[extra] = _EXTRAS[extra]
        optional.add(extra)
    if rng.random() < 0.35:
        roles = {parameter: role for role, parameter in drawn.roles.items()}
        notes = {
            parameter: _describe_parameter(parameter, roles.get(parameter, parameter), rng)
            for parameter, kind in parameters.items()
            if isinstance(kind, str) and rng.random() < 0.9
        }
    return replace(drawn, tool=Tool(tool.name, description, parameters, notes, frozenset(optional)))


def _draw_reworded(name: str, rng: Random) -> Drawn:
    return _reworded(_draw_made_up(rng) if name == MADE_UP else draw_tool(SKILLS[name], rng, held_out=False), rng)


def _ask(drawn: Drawn, rng: Random) -> Ask:
    is_more = drawn.skill.name != MADE_UP and rng.random() < 0.6
    return draw_ask(drawn, rng, held_out=False, wordings=_ways_to_ask(drawn.skill, held_out=False) if is_more else ())


def _fits_beside(name: str, names: list[str]) -> bool:
    return not any(_are_rivals(name, other) for other in names)


def _draw_beside(names: list[str], rng: Random) -> str:
    """Another skill, often one that is easily confused with those there are."""
    while True:
        if rng.random() < 0.12:
            return MADE_UP
        one = rng.choice(names) if names else ""
        alike = sorted(set[str]().union(*(group for group in _ALIKE if one in group)) - {one})
        name = rng.choice(alike) if alike and rng.random() < 0.5 else _draw_skill(rng).name
        if _fits_beside(name, names):
            return name


def _missing(names: list[str], rng: Random, answer: str) -> Exchange:
    """A question for which there is no tool, often like one for which there is."""
    while True:
        name = _draw_beside(names, rng)
        if name not in _ARITHMETIC and _fits_beside(name, [one for one in names if one != MADE_UP]):
            return loosely(_ask(_draw_reworded(name, rng), rng).text, rng), answer


def make_reworded_conversation(rng: Random) -> Conversation:
    """One question or several, each for one of one to four tools, for none of them, or one that needs no tool."""
    if rng.random() < 0.04:
        return _made("tool_none", [], rng, _missing([], rng, UNKNOWN_ANSWER))
    names = [MADE_UP if rng.random() < 0.12 else _draw_skill(rng).name]
    for _ in range(rng.choices((0, 1, 2, 3), (35, 30, 20, 15))[0]):
        names.append(_draw_beside(names, rng))
    toolbox = list({drawn.tool.name: drawn for drawn in (_draw_reworded(name, rng) for name in names)}.values())
    names = [drawn.skill.name for drawn in toolbox]
    is_narrow = all(drawn.skill.narrow for drawn in toolbox)
    exchanges: list[Exchange] = []
    for left in reversed(range(rng.choices((1, 2, 3, 4), (45, 27, 18, 10))[0])):
        choice = rng.random()
        if choice < 0.3:
            exchanges.append(_missing(names, rng, NO_TOOL_ANSWER))
        elif choice < 0.45 and is_narrow:
            exchanges.append(_ordinary_exchange(rng, "beside_reworded"))
        else:
            drawn = rng.choice(toolbox)
            ask = _ask(drawn, rng)
            if not left and rng.random() < 0.5:
                exchanges.append((loosely(ask.text, rng), _called(drawn, ask)))
            else:
                exchanges += _answered(drawn, ask)
    return _made("tool_reworded", [drawn.tool for drawn in toolbox], rng, *exchanges)


def _draw_unseen(rng: Random) -> tuple[Drawn, Ask]:
    """Description, question and values are from the held-out side; the name may be from either."""
    while True:
        drawn = _reworded(draw_tool(_draw_skill(rng), rng, held_out=None), rng, held_out=True)
        if wordings := fitting(_ways_to_ask(drawn.skill, held_out=True), drawn):
            return drawn, draw_ask(drawn, rng, held_out=True, wordings=wordings)


def _draw_choice(kind: str, counts: tuple[int, ...], *, is_there: bool) -> DrawConversation:
    """A question in words that were never seen in training, for a tool among as many others, or that is not there."""

    def draw(rng: Random, *, held_out: bool) -> Conversation:
        assert held_out, "training draws conversations of several questions"
        while True:
            drawn, ask = _draw_unseen(rng)
            if is_there or drawn.skill.name not in _ARITHMETIC:
                break
        names = [drawn.skill.name]
        for _ in range(rng.choice(counts)):
            names.append(_draw_beside(names, rng))
        tools = [drawn.tool] * is_there + [_draw_reworded(other, rng).tool for other in names[1:]]
        done = _called(drawn, ask) if is_there else NO_TOOL_ANSWER
        return _made(kind, _distinct(reversed(tools)), rng, (ask.text, done))

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
    name, description = (
        rng.choice(("get_weather", "get_current_weather", "weather")),
        rng.choice(_FIRST["descriptions"]),
    )
    notes = notes if rng.random() < 0.5 else {}
    tool = Tool(name, description, parameters, notes, frozenset({"unit"} if has_unit else ()))
    city = rng.choice(_FIRST["cities"])
    exchange = (rng.choice(_FIRST["questions"]).format(city), (Call(tool.name, {parameter: city}),))
    return Conversation("tool_first_try", (tool,), (exchange,))


# What is measured: of the second course, calls of the only tool, and choices, apart; and of the third course.
PROBED_KINDS: dict[str, DrawConversation] = {
    "tool_one": _draw_call_among(False),
    "tool_choice": _draw_call_among(True),
    **{kind: draw for kind, draw in TOOL_KINDS.items() if kind != "tool_call"},
}
REWORDED_KINDS: dict[str, DrawConversation] = {
    "tool_first_try": draw_first_try,
    "tool_reworded": _draw_choice("tool_reworded", (0, 1, 1, 2, 3), is_there=True),
    "tool_reworded_missing": _draw_choice("tool_reworded_missing", (1, 1, 2, 3), is_there=False),
}
"""What is measured of the third course."""
