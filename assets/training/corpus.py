"""The documents of the first course, drawn one after the other from a seed.

A document is a row of segments; each says how much its tokens count in the loss. What a user says counts little, since
nothing can foretell it; what the model should answer counts fully.
"""

from collections.abc import Mapping
from random import Random

from assets.training.conversations import (
    BOS,
    EOS,
    PROMPT_WEIGHT,
    Conversation,
    Document,
    Exchange,
    Segment,
    document,
    turn,
)
from assets.training.data import items, load, pairs
from assets.training.questions import QUESTION_KINDS, WORDINGS, Question, draw, draw_name, is_held_out
from assets.training.stories import draw_request, draw_story

# How often a kind is asked, where 1.0 does not suit it.
Emphasis = Mapping[str, float]
EMPHASES: dict[str, Emphasis] = {}
for _name, _text in load("courses")["emphasis"].items():
    _weights = dict(pairs(_text))
    EMPHASES[_name] = {**EMPHASES.get(_weights.pop("like", ""), {}), **{k: float(v) for k, v in _weights.items()}}
_FIRST = EMPHASES["first"]
_CHAT = {name: items(text) for name, text in WORDINGS["chat"].items()}
SYSTEM_PROMPTS = _CHAT["systems"]


def conversation_of(question: Question, system: str | None = None) -> Conversation:
    return Conversation(question.kind, (), (turn(question.text, question.answer),), system)


def draw_question(rng: Random, emphasis: Emphasis = _FIRST, *, held_out: bool) -> Question:
    """A question of any kind, emphasized kinds more often."""
    kinds = list(QUESTION_KINDS)
    kind = rng.choices(kinds, [emphasis.get(kind, 1.0) for kind in kinds])[0]
    return draw(QUESTION_KINDS[kind], rng, held_out=held_out)


def _turns(rng: Random, emphasis: Emphasis, count: int) -> list[Exchange]:
    questions = (draw_question(rng, emphasis, held_out=False) for _ in range(count))
    return [turn(question.text, question.answer) for question in questions]


def make_several_questions(rng: Random, emphasis: Emphasis) -> Conversation:
    system = rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.4 else None
    return Conversation("several", (), tuple(_turns(rng, emphasis, rng.randint(2, 5))), system)


def draw_name_memory(rng: Random, emphasis: Emphasis = _FIRST, *, held_out: bool) -> Conversation:
    """The user tells a name, asks up to two other things, then asks for the name."""
    while True:
        name, tell, ask = draw_name(rng), rng.choice(_CHAT["tell_name"]), rng.choice(_CHAT["ask_name"])
        if is_held_out(f"{name} {tell} {ask}") is held_out:
            break
    told = turn(tell.format(x=name), f"Nice to meet you, {name}!")
    asked = turn(ask, f"Your name is {name}.")
    return Conversation("name_memory", (), (told, *_turns(rng, emphasis, rng.randint(0, 2)), asked))


def draw_given_name(rng: Random, *, held_out: bool) -> Conversation:
    """The system prompt gives the model another name."""
    while True:
        name, give, ask = draw_name(rng), rng.choice(_CHAT["give_name"]), rng.choice(_CHAT["ask_given_name"])
        if is_held_out(f"{name} {give} {ask}") is held_out:
            return Conversation("given_name", (), (turn(ask, f"I am {name}."),), give.format(x=name))


def text_document(text: str, weight: float = 1.0) -> Document:
    return (Segment(BOS, 0.0), Segment(text + EOS, weight))


def plain_question_document(question: Question) -> Document:
    """The form for prompts without a chat template."""
    prompt = f"Question: {question.text}\nAnswer:"
    return (Segment(BOS, 0.0), Segment(prompt, PROMPT_WEIGHT), Segment(f" {question.answer}{EOS}", 1.0))


def chat_document(conversation: Conversation) -> Document:
    """Of a conversation without tools: its system prompt counts as what a user says."""
    return document(conversation, system_weight=PROMPT_WEIGHT)


def loosely(text: str, rng: Random, share: float = 0.06) -> str:
    """Now and then as people type: in lower case at the start, without the mark at the end."""
    if rng.random() < share:
        text = text[:1].lower() + text[1:]
    return text.rstrip("?.") if rng.random() < share else text


def _single_question(rng: Random, emphasis: Emphasis) -> Conversation:
    question = draw_question(rng, emphasis, held_out=False)
    asked = turn(loosely(question.text, rng, 0.08), question.answer)
    return Conversation(question.kind, (), (asked,), "You are a helpful assistant." if rng.random() < 0.1 else None)


def _told_story(rng: Random) -> Conversation:
    story = draw_story(rng, held_out=False)
    return Conversation("story", (), (turn(draw_request(rng, story), story.text),))


def make_document(rng: Random, emphasis: Emphasis) -> Document:
    """One of the first course, never from the held-out side."""
    choice = rng.random()
    if choice < 0.035:
        return text_document(draw_story(rng, held_out=False).text, weight=0.5)
    if choice < 0.06:
        return chat_document(_told_story(rng))
    if choice < 0.16:
        return plain_question_document(draw_question(rng, emphasis, held_out=False))
    if choice < 0.19:
        return chat_document(draw_name_memory(rng, emphasis, held_out=False))
    if choice < 0.205:
        return chat_document(draw_given_name(rng, held_out=False))
    if choice < 0.32:
        return chat_document(make_several_questions(rng, emphasis))
    return chat_document(_single_question(rng, emphasis))


def held_out_texts(seed: int, count: int) -> list[str]:
    """Plain texts from the held-out side, for perplexity: stories, and questions with answers."""
    rng = Random(seed)
    texts: list[str] = []
    for i in range(count):
        if i % 3 == 0:
            texts.append(draw_story(rng, held_out=True).text)
        else:
            question = draw_question(rng, held_out=True)
            texts.append(f"Question: {question.text}\nAnswer: {question.answer}")
    return texts
