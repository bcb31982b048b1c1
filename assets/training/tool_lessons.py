"""Conversations with tools: one call or several, results put into words, and questions that need no tool.

The lessons of the third course describe tools and ask for them in many more words. There the split uses the
description and the wording of the question, so that both can be measured unseen.
"""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from assets.training import corpus
from assets.training.conversations import NO_TOOL_ANSWER, Call, Conversation, Exchange, ParameterType, Tool
from assets.training.corpus import DrawConversation, draw_until, is_held_out, items, pairs, weights
from assets.training.tool_skills import MADE_UP, SKILLS, Ask, Drawn, Skill, draw_made_up, draw_tool, has_held_out_name

_DATA = corpus.load("tools")
_WORDS, _FIRST = corpus.lists(_DATA["words"]), corpus.lists(corpus.WORDINGS["first_try"])
_OFTEN, _STYLES, _EXTRAS = weights(_DATA["often"]), weights(_DATA["styles"]), dict(pairs(_DATA["extras"]))
_RIVALS, _ALIKE = ([set(group.split()) for group in items(_DATA[name])] for name in ("rivals", "alike"))
_ARITHMETIC = _RIVALS[0]
_ALL = tuple(SKILLS.values())
_HELD_OUT_SKILLS = tuple(skill for skill in _ALL if has_held_out_name(skill))
# No two of these are rivals.
_LEARNT_TOGETHER = tuple(skill for skill in _ALL if skill.name not in ("calculate", "search", "note", "now"))


def _draw_skill(rng: Random, skills: tuple[Skill, ...] = _ALL) -> Skill:
    return rng.choices(skills, [_OFTEN.get(skill.name, 1.0) for skill in skills])[0]


def _draw_drawn(rng: Random, *, held_out: bool) -> Drawn:
    return draw_tool(_draw_skill(rng, _HELD_OUT_SKILLS if held_out else _ALL), rng, held_out=held_out)


def _fits_beside(name: str, others: Iterable[str]) -> bool:
    """No other skill is meant by the questions of this one."""
    return not any(name == other or any({name, other} <= group for group in _RIVALS) for other in others)


def _distinct(tools: Iterable[Tool]) -> list[Tool]:
    """One tool per name: the last one, at the place of the first."""
    return list({tool.name: tool for tool in tools}.values())


def _others(asked: str | None, rng: Random, count: int) -> list[Tool]:
    """Tools that do not fit a question of the skill `asked`; None stands for the old kinds of question."""
    skills: list[Skill] = []
    tools: list[Tool] = []
    while len(tools) < count:
        if asked is not None and rng.random() < 0.15:
            tools.append(draw_made_up(rng).tool)
            continue
        skill = _draw_skill(rng)
        fits = skill.narrow if asked is None else _fits_beside(skill.name, [asked])
        if fits and skill not in skills:
            skills.append(skill)
            tools.append(draw_tool(skill, rng, held_out=False).tool)
    return _distinct(tools)


def _among(drawn: Drawn, rng: Random) -> list[Tool]:
    """The drawn tool and up to three others."""
    beside = _others(drawn.skill.name, rng, rng.choices((0, 1, 2, 3), (20, 30, 28, 22))[0])
    return [drawn.tool, *(tool for tool in beside if tool.name != drawn.tool.name)]


def _made(kind: str, tools: list[Tool], rng: Random, *exchanges: Exchange) -> Conversation:
    """With the tools in any order, and now and then with a system prompt."""
    rng.shuffle(tools)
    systems = (*corpus.SYSTEM_PROMPTS, *items(_DATA["systems"]))
    return Conversation(kind, tuple(tools), exchanges, rng.choice(systems) if rng.random() < 0.3 else None)


def draw_call(rng: Random, *, held_out: bool) -> Conversation:
    """One call, by a tool among up to three others."""
    drawn = _draw_drawn(rng, held_out=held_out)
    ask = drawn.ask(rng, held_out=held_out)
    return _made("tool_call", _among(drawn, rng), rng, ask.asked())


def draw_made_up_call(rng: Random, *, held_out: bool) -> Conversation:
    """A made-up tool, with up to two others."""
    drawn = draw_made_up(rng)
    ask = drawn.ask(rng, held_out=held_out)
    return _made("tool_made_up", [drawn.tool, *_others(MADE_UP, rng, rng.choice((0, 1, 1, 2)))], rng, ask.asked())


def draw_parallel_calls(rng: Random, *, held_out: bool, answered: bool = False) -> Conversation:
    """Two or three calls of one tool for one question, and perhaps what came of them in words."""
    while True:
        drawn = _draw_drawn(rng, held_out=held_out)
        if drawn.skill.name not in items(_DATA["several"]):
            continue
        asks = [drawn.ask(rng, held_out=held_out) for _ in range(rng.choice((2, 2, 3)))]
        text, arguments = asks[0].text, asks[0].call["arguments"]
        name = next(iter(arguments))
        values = [str(ask.call["arguments"][name]) for ask in asks]
        if len(set(values)) == len(values) and text.count(values[0]) == 1:
            break
    calls = tuple(Call(name=drawn.tool.name, arguments={**arguments, name: value}) for value in values)
    told = (tuple(ask.result for ask in asks), " ".join(ask.answer for ask in asks))
    exchanges = ((text.replace(values[0], corpus.enumerated(values)), calls), told)
    return _made("tool_parallel", _among(drawn, rng), rng, *exchanges[: 1 + answered])


def draw_answer(rng: Random, *, held_out: bool) -> Conversation:
    """A call, or several, and what came of it in words."""
    choice = rng.random()
    if choice < 0.12:
        return draw_parallel_calls(rng, held_out=held_out, answered=True)
    drawn = draw_made_up(rng) if choice < 0.25 else _draw_drawn(rng, held_out=held_out)
    ask = drawn.ask(rng, held_out=held_out)
    return _made("tool_answer", _among(drawn, rng), rng, *ask.exchanges())


def draw_not_needed(rng: Random, *, held_out: bool) -> Conversation:
    """An ordinary question in a conversation with tools."""
    exchange = corpus.draw_exchange(rng, "beside_tools", held_out=held_out)
    return _made("tool_not_needed", _others(None, rng, rng.choice((1, 1, 2, 3))), rng, exchange)


def draw_missing(rng: Random, *, held_out: bool) -> Conversation:
    """A question for a tool that is not among those there are, or without any."""
    while True:
        drawn = _draw_drawn(rng, held_out=False)
        text = drawn.ask(rng, held_out=False).text
        if is_held_out(text) is held_out and drawn.skill.name not in _ARITHMETIC:
            break
    count = rng.choice((0, 0, 0, 1, 1, 2))
    exchange = (text, NO_TOOL_ANSWER if count else corpus.UNKNOWN_ANSWER)
    return _made("tool_missing", _others(drawn.skill.name, rng, count), rng, exchange)


def _missing_for(names: list[str], rng: Random) -> Exchange:
    """A question that none of the skills answers."""
    while True:
        skill = _draw_skill(rng)
        if skill.name not in _ARITHMETIC and _fits_beside(skill.name, names):
            ask = draw_tool(skill, rng, held_out=False).ask(rng, held_out=False)
            if not is_held_out(ask.text):
                return ask.text, NO_TOOL_ANSWER


def _long_conversation(rng: Random) -> Conversation:
    """Several questions, each for one of up to four tools or for none."""
    skills = rng.sample(_LEARNT_TOGETHER, rng.choices((1, 2, 3, 4), (15, 35, 30, 20))[0])
    choices = [draw_tool(skill, rng, held_out=False) for skill in skills]
    if rng.random() < 0.35:
        choices[-1] = draw_made_up(rng)
    names = [skill.name for skill in skills]
    is_ordinary = _ARITHMETIC.isdisjoint(names) and "search" not in names
    exchanges: list[Exchange] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        chance = rng.random()
        if is_ordinary and chance < 0.12:
            exchanges.append(corpus.draw_exchange(rng, "beside_tools"))
        elif chance > 0.94:
            exchanges.append(_missing_for(names, rng))
        else:
            exchanges += rng.choice(choices).ask(rng, held_out=False).exchanges()
    return _made("tool_long", _distinct(drawn.tool for drawn in choices), rng, *exchanges)


TOOL_KINDS: dict[str, DrawConversation] = {
    "tool_call": draw_call, "tool_made_up": draw_made_up_call, "tool_parallel": draw_parallel_calls,
    "tool_answer": draw_answer, "tool_not_needed": draw_not_needed, "tool_missing": draw_missing,
}  # fmt: skip


def make_tool_conversation(rng: Random) -> Conversation:
    """A conversation for training. Its first question is loosely worded (`corpus.loosely`), with the same answer."""
    if rng.random() < 0.5:
        return _long_conversation(rng)
    draw = rng.choices(list(TOOL_KINDS.values()), (30, 14, 7, 25, 11, 16))[0]
    conversation = draw(rng, held_out=False)
    (asked, done), *rest = conversation.exchanges
    assert isinstance(asked, str)
    return replace(conversation, exchanges=((corpus.loosely(asked, rng), done), *rest))


def _inflected(phrase: str) -> dict[str, str]:
    """Inflections of a phrase: for "look up" also "looks up" and "looking up"."""
    verb, *rest = phrase.split(" ")
    stem = verb[:-1] + "ie" if verb.endswith("y") and verb[-2] not in "aeiou" else verb
    third = stem + ("es" if stem.endswith(("ch", "sh", "ss", "x", "o")) else "s")
    gerund = (verb + verb[-1] if verb in _WORDS["doubled"] else verb.removesuffix("e")) + "ing"
    return {"verb": phrase, "does": " ".join((third, *rest)), "doing": " ".join((gerund, *rest))}


def _is_unseen(text: str) -> bool:
    """True for one in six texts that documentation does not show."""
    return text not in _WORDS["trained"] and (is_held_out(f"wording {text}") or is_held_out(f"words {text}"))


def _describe(skill: Skill, rng: Random, *, held_out: bool) -> str:
    """A description of one line for a tool of the skill."""
    while True:
        verb, thing = rng.choice(skill.each("does")), rng.choice(skill.each("things"))
        line = corpus.sentence_case(corpus.choose(_STYLES, rng).format(thing=thing, **_inflected(verb))) + "."
        if _is_unseen(line) is held_out:
            break
    choice = rng.random()
    if choice < 0.08:
        return f"{line} {rng.choice(_WORDS['tails'])}"
    if choice < 0.4:
        return line.rstrip(".")
    return line[:1].lower() + line[1:].rstrip(".") if choice < 0.48 else line


def _ways_to_ask(skill: Skill, *, held_out: bool) -> tuple[str, ...]:
    return tuple(text for text in skill.each("more") if _is_unseen(text) is held_out)


def _describe_parameter(parameter: str, role: str, rng: Random) -> str:
    if role in ("place", "origin", "destination") and rng.random() < 0.6:
        return rng.choice(_WORDS["place_notes"])
    note = rng.choice(_WORDS["notes"]).format(parameter.replace("_", " "))
    return corpus.sentence_case(note) + rng.choice(("", "", "."))


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
        values = _EXTRAS[extra].split(", ")
        parameters[extra] = tuple(values) if len(values) > 1 else values[0]
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
    return _reworded(draw_made_up(rng) if name == MADE_UP else draw_tool(SKILLS[name], rng, held_out=False), rng)


def _ask(drawn: Drawn, rng: Random) -> Ask:
    is_more = drawn.skill.name != MADE_UP and rng.random() < 0.6
    return drawn.ask(rng, held_out=False, wordings=_ways_to_ask(drawn.skill, held_out=False) if is_more else ())


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
    known = [one for one in names if one != MADE_UP]
    name = draw_until(
        lambda name: name not in _ARITHMETIC and _fits_beside(name, known), lambda: _draw_beside(names, rng)
    )
    return corpus.loosely(_ask(_draw_reworded(name, rng), rng).text, rng), answer


def make_reworded_conversation(rng: Random) -> Conversation:
    """One question or several, each for one of one to four tools, for none of them, or one that needs no tool."""
    if rng.random() < 0.04:
        return _made("tool_none", [], rng, _missing([], rng, corpus.UNKNOWN_ANSWER))
    names = [MADE_UP if rng.random() < 0.12 else _draw_skill(rng).name]
    for _ in range(rng.choices((0, 1, 2, 3), (35, 30, 20, 15))[0]):
        names.append(_draw_beside(names, rng))
    toolbox = list({drawn.tool.name: drawn for drawn in (_draw_reworded(name, rng) for name in names)}.values())
    names = [drawn.skill.name for drawn in toolbox]
    exchanges: list[Exchange] = []
    for left in reversed(range(rng.choices((1, 2, 3, 4), (45, 27, 18, 10))[0])):
        choice = rng.random()
        if choice < 0.3:
            exchanges.append(_missing(names, rng, NO_TOOL_ANSWER))
        elif choice < 0.45 and all(drawn.skill.narrow for drawn in toolbox):
            exchanges.append(corpus.draw_exchange(rng, "beside_reworded"))
        else:
            ask = _ask(rng.choice(toolbox), rng)
            is_answered = left or rng.random() >= 0.5
            exchanges += ask.exchanges() if is_answered else [(corpus.loosely(ask.text, rng), (ask.call,))]
    return _made("tool_reworded", [drawn.tool for drawn in toolbox], rng, *exchanges)


def draw_unseen(rng: Random, *, counts: tuple[int, ...], is_there: bool, held_out: bool) -> Conversation:
    """A question in words that were never seen in training, for a tool among as many others, or that is not there.

    Description, question and values are from the held-out side; the name may be from either.
    """
    assert held_out, "training draws conversations of several questions"
    while True:
        drawn = _reworded(draw_tool(_draw_skill(rng), rng), rng, held_out=True)
        if wordings := drawn.fitting(_ways_to_ask(drawn.skill, held_out=True)):
            ask = drawn.ask(rng, held_out=True, wordings=wordings)
            if is_there or drawn.skill.name not in _ARITHMETIC:
                break
    names = [drawn.skill.name]
    for _ in range(rng.choice(counts)):
        names.append(_draw_beside(names, rng))
    tools = [drawn.tool] * is_there + [_draw_reworded(other, rng).tool for other in names[1:]]
    exchange = ask.asked() if is_there else (ask.text, NO_TOOL_ANSWER)
    return _made("tool_unseen", _distinct(reversed(tools)), rng, exchange)


def draw_first_try(rng: Random, *, held_out: bool) -> Conversation:
    """A first question of a newcomer, as in documentation. Most of these words were seen in training, not all."""
    parameter = rng.choice(("city", "location"))
    note = rng.choice(("The city", "The city and state, e.g. San Francisco, CA"))
    unit: dict[str, ParameterType] = {"unit": ("celsius", "fahrenheit")} if rng.random() < 0.3 else {}
    name, description = rng.choice(_FIRST["names"]), rng.choice(_FIRST["descriptions"])
    notes = {parameter: note} if rng.random() < 0.5 else {}
    tool = Tool(name, description, {parameter: "string", **unit}, notes, frozenset(unit))
    city = rng.choice(_FIRST["cities"])
    exchange = (rng.choice(_FIRST["questions"]).format(city), (Call(name=tool.name, arguments={parameter: city}),))
    return Conversation("tool_first_try", (tool,), (exchange,))
