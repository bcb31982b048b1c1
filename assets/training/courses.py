"""The three courses: mixtures of documents, numbers of steps and learning rates, as `data/courses.toml` has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from assets.training.conversations import Conversation, Document, Segment, document, turn
from assets.training.corpus import (
    EMPHASES,
    Emphasis,
    chat_document,
    conversation_of,
    draw_question,
    make_document,
    plain_question_document,
)
from assets.training.data import load
from assets.training.json_questions import (
    JSON_KINDS,
    JSON_SYSTEM_PROMPTS,
    make_free_extract,
    make_led_answer,
    without_request,
)
from assets.training.questions import draw
from assets.training.rewordings import make_reworded_conversation
from assets.training.tool_lessons import draw_parallel_calls, make_tool_conversation

_JSON_SHARES = {
    "json_fact": 22, "json_bare": 14, "json_sum": 10, "json_extract": 32, "json_pairs": 12, "json_list": 14,
}  # fmt: skip
# How much the choice of a tool counts where tools are reworded.
_DECISION_WEIGHT = 3.0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a batch, in tokens."""

    rows: int
    length: int


# Every batch has 4,096 tokens; three of ten steps practise longer contexts.
_SHAPES = tuple(Shape(4096 // length, length) for length in (256, 256, 512, 256, 256, 1024, 256, 256, 512, 256))
# With 2,048 tokens. A conversation with tools has some 240 and would seldom end within a row of 256.
_LONG_SHAPES = tuple(Shape(2048 // length, length) for length in (512, 512, 512, 512, 1024))


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stretch of training up to step `until`, on its own stream of documents.

    Attributes:
        emphasis: Of the questions of old documents, and of those beside JSON.
        old: The share of the first course's documents.
        tools: The share of conversations with tools; the rest is about JSON.
        reworded: Of all documents, those about tools in other words; the two shares above are of the others.
    """

    until: int
    seed: int
    emphasis: Emphasis
    old: float = 1.0
    tools: float = 0.0
    reworded: float = 0.0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of the batches of consecutive steps, again and again."""
        return _SHAPES if self.old == 1.0 else _LONG_SHAPES

    def documents(self) -> Iterator[Document]:
        """An endless stream, the same for the same lesson."""
        rng = Random(self.seed)
        while True:
            yield self._document(rng)

    def _document(self, rng: Random) -> Document:
        if self.reworded:
            choice = rng.random()
            if choice < self.reworded * 0.9:
                return document(make_reworded_conversation(rng), decision_weight=_DECISION_WEIGHT)
            if choice < self.reworded:
                return document(draw_parallel_calls(rng, held_out=False), decision_weight=_DECISION_WEIGHT)
        if self.old == 1.0:
            return make_document(rng, self.emphasis)
        choice = rng.random()
        if choice < self.old:
            return make_document(rng, self.emphasis)
        if choice < self.old + self.tools:
            return document(make_tool_conversation(rng))
        if choice < 0.96:
            return chat_document(_json_conversation(rng, self.emphasis))
        if choice < 0.99:
            return _led_document(rng)
        return plain_question_document(draw(JSON_KINDS[rng.choice(list(_JSON_SHARES))], rng, held_out=False))


def _json_conversation(rng: Random, emphasis: Emphasis) -> Conversation:
    if rng.random() < 0.12:
        system, question = make_free_extract(rng)
        return conversation_of(question, system)
    kind = rng.choices(list(_JSON_SHARES), list(_JSON_SHARES.values()))[0]
    question = draw(JSON_KINDS[kind], rng, held_out=False)
    bare = without_request(question)
    if bare is not None and rng.random() < 0.4:
        return Conversation(kind, (), (turn(bare, question.answer),), rng.choice(JSON_SYSTEM_PROMPTS))
    system = rng.choice(JSON_SYSTEM_PROMPTS) if rng.random() < 0.1 else None
    turns = (turn(question.text, question.answer),)
    if system is None and rng.random() < 0.15:
        before = draw_question(rng, emphasis, held_out=False)
        turns = (turn(before.text, before.answer), *turns)
    return Conversation(kind, (), turns, system)


def _led_document(rng: Random) -> Document:
    """How the answer opens does not count, so that a question which asks for no JSON gets none of itself."""
    question, opening = make_led_answer(rng, held_out=False)
    *before, answer = chat_document(conversation_of(question))
    return (*before, Segment(opening, 0.0), Segment(answer.text.removeprefix(opening), answer.weight))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Learning rates at some steps, in their order; straight lines in between."""

    points: tuple[tuple[int, float], ...]

    def rate(self, step: int) -> float:
        steps, rates = zip(*self.points, strict=True)
        return float(np.interp(step, steps, rates))


@dataclass(frozen=True, slots=True)
class Course:
    """The last lesson ends where the schedule does. `way_back` is how far the weights move to those before the course,
    on the straight line, when it is over."""

    schedule: Schedule
    lessons: tuple[Lesson, ...]
    checkpoint_every: int = 100
    way_back: float = 0.0


def _course(of: dict[str, Any]) -> Course:
    schedule = Schedule(tuple((step, rate) for step, rate in of.pop("rate")))
    lessons = tuple(Lesson(**{**each, "emphasis": EMPHASES[each["emphasis"]]}) for each in of.pop("lessons"))
    return Course(schedule, lessons, **of)


COURSES: tuple[Course, ...] = tuple(_course(of) for of in load("courses")["courses"])
