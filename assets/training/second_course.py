"""The documents of the second course: half of the first course's, and conversations with tools and answers in JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from assets.training.corpus import (
    Conversation,
    Document,
    Emphasis,
    Segment,
    Turn,
    chat_document,
    conversation_of,
    draw_question,
    make_document,
    plain_question_document,
)
from assets.training.json_questions import (
    JSON_KINDS,
    JSON_SYSTEM_PROMPTS,
    make_free_extract,
    make_led_answer,
    without_request,
)
from assets.training.questions import draw
from assets.training.tool_lessons import make_tool_conversation
from assets.training.tools import tool_document

_JSON_SHARES = {
    "json_fact": 22, "json_bare": 14, "json_sum": 10, "json_extract": 32, "json_pairs": 12, "json_list": 14,
}  # fmt: skip


def _json_conversation(rng: Random, emphasis: Emphasis) -> Conversation:
    if rng.random() < 0.12:
        system, question = make_free_extract(rng)
        return conversation_of(question, system)
    kind = rng.choices(list(_JSON_SHARES), list(_JSON_SHARES.values()))[0]
    question = draw(JSON_KINDS[kind], rng, held_out=False)
    bare = without_request(question)
    if bare is not None and rng.random() < 0.4:
        return Conversation(kind, (Turn(bare, question.answer),), rng.choice(JSON_SYSTEM_PROMPTS))
    system = rng.choice(JSON_SYSTEM_PROMPTS) if rng.random() < 0.1 else None
    turns = (Turn(question.text, question.answer),)
    if system is None and rng.random() < 0.15:
        before = draw_question(rng, emphasis, held_out=False)
        turns = (Turn(before.text, before.answer), *turns)
    return Conversation(kind, turns, system)


def _led_document(rng: Random) -> Document:
    """How the answer opens does not count, so that a question which asks for no JSON gets none of itself."""
    question, opening = make_led_answer(rng, held_out=False)
    *before, answer = chat_document(conversation_of(question))
    return (*before, Segment(opening, 0.0), Segment(answer.text.removeprefix(opening), answer.weight))


@dataclass(frozen=True, slots=True)
class Shares:
    """Of all documents, how many are the first course's, how many have tools; the rest is about JSON.

    A conversation with tools is five times as long as an old document: with 0.64 and 0.15, old documents are 38% of the
    tokens, and those with tools 46%.
    """

    old: float
    tools: float


def make_second_course_document(rng: Random, emphasis: Emphasis, shares: Shares) -> Document:
    choice = rng.random()
    if choice < shares.old:
        return make_document(rng, emphasis)
    if choice < shares.old + shares.tools:
        return tool_document(make_tool_conversation(rng))
    if choice < 0.96:
        return chat_document(_json_conversation(rng, emphasis))
    if choice < 0.99:
        return _led_document(rng)
    kind = rng.choice(list(_JSON_SHARES))
    return plain_question_document(draw(JSON_KINDS[kind], rng, held_out=False))


def second_course_documents(seed: int, emphasis: Emphasis, shares: Shares) -> Iterator[Document]:
    """An endless stream, the same for the same seed, emphasis and shares."""
    rng = Random(seed)
    while True:
        yield make_second_course_document(rng, emphasis, shares)
