"""Conversations with tools: one call or several, results put into words, and questions that need no tool."""

from collections.abc import Callable
from random import Random

from assets.training.conversations import (
    NO_TOOL_ANSWER,
    Call,
    Called,
    Conversation,
    Exchange,
    Returned,
    Said,
    Tool,
    turn,
)
from assets.training.corpus import EMPHASES, SYSTEM_PROMPTS, draw_question, loosely
from assets.training.questions import UNKNOWN_ANSWER, enumerated, is_held_out
from assets.training.tool_skills import SKILLS, Ask, Drawn, draw_ask, draw_tool, has_held_out_name, made_up_skill

_SYSTEM_PROMPTS = (*SYSTEM_PROMPTS, "You are a helpful assistant with tools.", "Use the tools.", "You can call tools.")
ARITHMETIC = {"add", "subtract", "multiply", "divide", "calculate"}
# Skills whose questions another one could take as well.
_RIVALS = (
    {"calculate", *ARITHMETIC},
    {"search", "user", "file", "music", "flight"},
    {"note", "remind"},
    {"time", "now"},
)
_OFTEN = {"weather": 3.0, "add": 2.0, "multiply": 2.0, "calculate": 2.0, "search": 2.0}
_HELD_OUT_SKILLS = tuple(name for name, skill in SKILLS.items() if has_held_out_name(skill))
# No two of these are rivals.
_LEARNT_TOGETHER = tuple(name for name in SKILLS if name not in ("calculate", "search", "note", "now"))


def draw_name(rng: Random, names: tuple[str, ...] = tuple(SKILLS)) -> str:
    return rng.choices(names, [_OFTEN.get(name, 1.0) for name in names])[0]


def draw_made_up(rng: Random) -> Drawn:
    return draw_tool(made_up_skill(rng), rng, held_out=None)


def rivals(one: str, other: str) -> bool:
    return one == other or any(one in group and other in group for group in _RIVALS)


def _others(asked: str | None, rng: Random, count: int) -> list[Tool]:
    """Tools for none of which a question of the skill `asked` is meant; None stands for the old kinds of question."""
    skills: list[str] = []
    tools: list[Tool] = []
    while len(tools) < count:
        if asked is not None and rng.random() < 0.15:
            tools.append(draw_made_up(rng).tool)
            continue
        name = draw_name(rng)
        unfit = not SKILLS[name].narrow if asked is None else rivals(name, asked)
        if unfit or any(name == other for other in skills):
            continue
        skills.append(name)
        tools.append(draw_tool(SKILLS[name], rng, held_out=False).tool)
    return list({tool.name: tool for tool in tools}.values())


def shuffled(tools: list[Tool], rng: Random) -> tuple[Tool, ...]:
    rng.shuffle(tools)
    return tuple(tools)


def draw_system(rng: Random) -> str | None:
    return rng.choice(_SYSTEM_PROMPTS) if rng.random() < 0.3 else None


def _draw_drawn(rng: Random, *, held_out: bool) -> tuple[str, Drawn]:
    name = draw_name(rng, _HELD_OUT_SKILLS if held_out else tuple(SKILLS))
    return name, draw_tool(SKILLS[name], rng, held_out=held_out)


def _among(name: str, drawn: Drawn, rng: Random) -> tuple[Tool, ...]:
    beside = _others(name, rng, rng.choices((0, 1, 2, 3), (20, 30, 28, 22))[0])
    return shuffled([drawn.tool, *(tool for tool in beside if tool.name != drawn.tool.name)], rng)


def called(drawn: Drawn, *asks: Ask) -> Called:
    return Called(tuple(Call(drawn.tool.name, ask.arguments) for ask in asks))


def draw_call(rng: Random, *, held_out: bool) -> Conversation:
    """One call, by a tool among up to three others."""
    name, drawn = _draw_drawn(rng, held_out=held_out)
    ask = draw_ask(drawn, rng, held_out=held_out)
    exchange = (Said(ask.text), called(drawn, ask))
    return Conversation("tool_call", _among(name, drawn, rng), (exchange,), draw_system(rng))


def draw_made_up_call(rng: Random, *, held_out: bool) -> Conversation:
    """A tool that nobody has heard of, among up to two others."""
    drawn = draw_made_up(rng)
    ask = draw_ask(drawn, rng, held_out=held_out)
    tools = [drawn.tool, *_others("made up", rng, rng.choice((0, 1, 1, 2)))]
    exchange = (Said(ask.text), called(drawn, ask))
    return Conversation("tool_made_up", shuffled(tools, rng), (exchange,), draw_system(rng))


_SEVERAL = ("weather", "time", "population", "stock", "delivery", "user", "horoscope")


def _draw_parallel(rng: Random, *, held_out: bool) -> tuple[tuple[Tool, ...], Exchange, Exchange]:
    """Two or three calls of one tool for one question, and their results."""
    while True:
        name, drawn = _draw_drawn(rng, held_out=held_out)
        if name not in _SEVERAL:
            continue
        first, *more = (draw_ask(drawn, rng, held_out=held_out) for _ in range(rng.choice((2, 2, 3))))
        role = next(iter(first.values))
        values = [str(ask.values[role]) for ask in (first, *more)]
        if len(set(values)) == len(values) and first.text.count(values[0]) == 1:
            break
    text = first.text.replace(values[0], enumerated(values))
    calls = [Call(drawn.tool.name, {**first.arguments, drawn.roles[role]: value}) for value in values]
    asked = (Said(text), Called(tuple(calls)))
    asks = (first, *more)
    said = (Returned(tuple(ask.result for ask in asks)), Said(" ".join(ask.answer for ask in asks)))
    return _among(name, drawn, rng), asked, said


def draw_parallel_calls(rng: Random, *, held_out: bool) -> Conversation:
    tools, asked, _ = _draw_parallel(rng, held_out=held_out)
    return Conversation("tool_parallel", tools, (asked,), draw_system(rng))


def draw_answer(rng: Random, *, held_out: bool) -> Conversation:
    """A call, or several, and what came of it in words."""
    choice = rng.random()
    if choice < 0.12:
        tools, *exchanges = _draw_parallel(rng, held_out=held_out)
        return Conversation("tool_answer", tools, tuple(exchanges), draw_system(rng))
    name, drawn = ("made up", draw_made_up(rng)) if choice < 0.25 else _draw_drawn(rng, held_out=held_out)
    ask = draw_ask(drawn, rng, held_out=held_out)
    return Conversation("tool_answer", _among(name, drawn, rng), answered(drawn, ask), draw_system(rng))


def answered(drawn: Drawn, ask: Ask) -> tuple[Exchange, ...]:
    return (Said(ask.text), called(drawn, ask)), (Returned((ask.result,)), Said(ask.answer))


def ordinary_exchange(rng: Random, emphasis: str, *, held_out: bool = False) -> Exchange:
    """A question that needs no tool."""
    question = draw_question(rng, EMPHASES[emphasis], held_out=held_out)
    return turn(question.text, question.answer)


def draw_not_needed(rng: Random, *, held_out: bool) -> Conversation:
    """An ordinary question, asked beside tools."""
    exchange = ordinary_exchange(rng, "beside_tools", held_out=held_out)
    tools = shuffled(_others(None, rng, rng.choice((1, 1, 2, 3))), rng)
    return Conversation("tool_not_needed", tools, (exchange,), draw_system(rng))


def draw_missing(rng: Random, *, held_out: bool) -> Conversation:
    """A question for a tool that is not among those there are, or without any."""
    while True:
        name, drawn = _draw_drawn(rng, held_out=False)
        ask = draw_ask(drawn, rng, held_out=False)
        if is_held_out(ask.text) is held_out and name not in ARITHMETIC:
            break
    count = rng.choice((0, 0, 0, 1, 1, 2))
    answer = NO_TOOL_ANSWER if count else UNKNOWN_ANSWER
    tools = shuffled(_others(name, rng, count), rng)
    return Conversation("tool_missing", tools, (turn(ask.text, answer),), draw_system(rng))


def _missing_for(names: list[str], rng: Random) -> Exchange:
    """A question that none of the skills `names` answers."""
    while True:
        name = draw_name(rng)
        if name not in ARITHMETIC and not any(rivals(name, other) for other in names):
            ask = draw_ask(draw_tool(SKILLS[name], rng, held_out=False), rng, held_out=False)
            if not is_held_out(ask.text):
                return turn(ask.text, NO_TOOL_ANSWER)


def make_long_conversation(rng: Random) -> Conversation:
    """Several questions, each for one of up to four tools or for none."""
    names = rng.sample(_LEARNT_TOGETHER, rng.choices((1, 2, 3, 4), (15, 35, 30, 20))[0])
    choices = [draw_tool(SKILLS[name], rng, held_out=False) for name in names]
    if rng.random() < 0.35:
        choices[-1] = draw_made_up(rng)
    ordinary = not any(name in ("search", *ARITHMETIC) for name in names)
    exchanges: list[Exchange] = []
    for _ in range(rng.choice((2, 3, 3, 4))):
        chance = rng.random()
        if ordinary and chance < 0.12:
            exchanges.append(ordinary_exchange(rng, "beside_tools"))
        elif chance > 0.94:
            exchanges.append(_missing_for(names, rng))
        else:
            drawn = rng.choice(choices)
            exchanges += answered(drawn, draw_ask(drawn, rng, held_out=False))
    tools = {drawn.tool.name: drawn.tool for drawn in choices}
    return Conversation("tool_long", shuffled(list(tools.values()), rng), tuple(exchanges), draw_system(rng))


TOOL_KINDS: dict[str, Callable[..., Conversation]] = {
    "tool_call": draw_call, "tool_made_up": draw_made_up_call, "tool_parallel": draw_parallel_calls,
    "tool_answer": draw_answer, "tool_not_needed": draw_not_needed, "tool_missing": draw_missing,
}  # fmt: skip


def _draw_call_among(some: bool) -> Callable[..., Conversation]:
    def draw_one(rng: Random, *, held_out: bool) -> Conversation:
        while True:
            conversation = draw_call(rng, held_out=held_out)
            if (len(conversation.tools) > 1) is some:
                return conversation

    return draw_one


# What is measured: calls of the only tool, and choices, apart.
PROBED_KINDS: dict[str, Callable[..., Conversation]] = {
    "tool_one": _draw_call_among(False),
    "tool_choice": _draw_call_among(True),
    **{kind: draw for kind, draw in TOOL_KINDS.items() if kind != "tool_call"},
}
_SHARES = {
    "tool_call": 30, "tool_made_up": 14, "tool_parallel": 7, "tool_answer": 25, "tool_not_needed": 11,
    "tool_missing": 16,
}  # fmt: skip


def make_tool_conversation(rng: Random) -> Conversation:
    """One for training. Whoever asks loosely gets the same answer."""
    if rng.random() < 0.5:
        return make_long_conversation(rng)
    kind = rng.choices(list(_SHARES), list(_SHARES.values()))[0]
    conversation = TOOL_KINDS[kind](rng, held_out=False)
    (asked, done), *rest = conversation.exchanges
    if isinstance(asked, Said):
        asked = Said(loosely(asked.text, rng))
    return Conversation(kind, conversation.tools, ((asked, done), *rest), conversation.system)
