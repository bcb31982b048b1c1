"""The courses: mixtures of documents, numbers of steps and learning rates, as `data/courses.toml` has them."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from assets.training.conversations import Document, chat_document, document
from assets.training.corpus import EMPHASES, Emphasis, make_document, plain_question_document
from assets.training.data import load
from assets.training.json_questions import JSON_KINDS, json_conversation, led_document
from assets.training.questions import draw
from assets.training.tool_lessons import draw_parallel_calls, make_reworded_conversation, make_tool_conversation
from assets.training.visitors import make_visitor_document

# How much the choice of a tool counts where tools are reworded.
_DECISION_WEIGHT = 3.0


# Every batch has 4,096 tokens; three of ten steps practise longer contexts.
_SHAPES = tuple((4096 // length, length) for length in (256, 256, 512, 256, 256, 1024, 256, 256, 512, 256))
# With 2,048 tokens. A conversation with tools has some 240 and would seldom end within a row of 256.
_LONG_SHAPES = tuple((2048 // length, length) for length in (512, 512, 512, 512, 1024))


@dataclass(frozen=True, slots=True)
class Lesson:
    """A stretch of training up to step `until`, on its own stream of documents.

    Attributes:
        emphasis: Of the questions of old documents, and of those beside JSON.
        old: The share of the first course's documents.
        tools: The share of conversations with tools; the rest is about JSON.
        reworded: Of all documents, those about tools in other words; the two shares above are of the others.
        visitors: Of all documents, what visitors ask; the shares above are of the others.
    """

    until: int
    seed: int
    emphasis: Emphasis
    old: float = 1.0
    tools: float = 0.0
    reworded: float = 0.0
    visitors: float = 0.0

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows, and tokens of each, of the batches of consecutive steps, again and again."""
        return _SHAPES if self.old == 1.0 else _LONG_SHAPES

    def documents(self) -> Iterator[Document]:
        """An endless stream, the same for the same lesson."""
        rng = Random(self.seed)
        while True:
            yield self._document(rng)

    def _document(self, rng: Random) -> Document:
        if self.visitors and rng.random() < self.visitors:
            return make_visitor_document(rng)
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
            return chat_document(json_conversation(rng, self.emphasis))
        if choice < 0.99:
            return led_document(rng)
        return plain_question_document(draw(rng.choice(list(JSON_KINDS.values())), rng, held_out=False))


@dataclass(frozen=True, slots=True)
class Course:
    """The last lesson ends where the rates do.

    Attributes:
        rates: Learning rates at some steps, in their order; straight lines in between.
        way_back: How far the weights move to those before the course, on the straight line, when it is over.
    """

    rates: tuple[tuple[int, float], ...]
    lessons: tuple[Lesson, ...]
    checkpoint_every: int = 100
    way_back: float = 0.0

    def rate(self, step: int) -> float:
        steps, rates = zip(*self.rates, strict=True)
        return float(np.interp(step, steps, rates))


def _course(of: dict[str, Any]) -> Course:
    lessons = tuple(Lesson(**{**each, "emphasis": EMPHASES[each["emphasis"]]}) for each in of.pop("lessons"))
    return Course(of.pop("rate"), lessons, **of)


COURSES: tuple[Course, ...] = tuple(_course(of) for of in load("courses")["courses"])
