"""The corpus of quire-tiny: the same for a seed, honest in its split, right in its answers."""

import re
from itertools import islice
from random import Random

import pytest

from assets.training.corpus import QUESTION_KINDS, documents
from assets.training.number_questions import NUMBER_KINDS
from assets.training.questions import Question, draw
from assets.training.third_course import THIRD_COURSE_TOOL_KINDS, make_reworded_conversation
from assets.training.tool_lessons import TOOL_KINDS
from assets.training.tools import Called

DRAWS = 200


def draw_many(kind: str, *, held_out: bool, seed: int = 3) -> list[Question]:
    rng = Random(seed)
    return [draw(QUESTION_KINDS[kind], rng, held_out=held_out) for _ in range(DRAWS)]


def texts_of(seed: int, count: int) -> list[str]:
    return ["".join(segment.text for segment in document) for document in islice(documents(seed), count)]


def test_documents_are_the_same_for_the_same_seed_only() -> None:
    assert texts_of(5, 500) == texts_of(5, 500) != texts_of(6, 500)


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_no_question_is_on_both_sides_of_the_split(kind: str) -> None:
    trained = {question.text for question in draw_many(kind, held_out=False)}
    held_out = {question.text for question in draw_many(kind, held_out=True)}
    assert held_out
    assert trained.isdisjoint(held_out)


@pytest.mark.parametrize("kind", NUMBER_KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_equation_in_an_answer_is_right(kind: str, held_out: bool) -> None:
    for question in draw_many(kind, held_out=held_out):
        for a, sign, b, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", question.answer):
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert int(result) == expected, question


def test_calls_name_a_tool_that_is_there_and_parameters_that_it_has() -> None:
    rng = Random(5)
    drawn = [make_reworded_conversation(rng) for _ in range(3 * DRAWS)]
    for kinds, held_out in ((TOOL_KINDS, False), (THIRD_COURSE_TOOL_KINDS, True)):
        drawn += [draw(rng, held_out=held_out) for draw in kinds.values() for _ in range(DRAWS)]
    for conversation in drawn:
        tools = {tool.name: tool for tool in conversation.tools}
        for _, done in conversation.exchanges:
            for call in done.calls if isinstance(done, Called) else ():
                assert set(call.arguments) <= set(tools[call.name].parameters)
                for name, value in call.arguments.items():
                    kind = tools[call.name].parameters[name]
                    if isinstance(kind, tuple):
                        assert value in kind
                    else:
                        types = {"string": str, "integer": int, "number": (int, float)}
                        assert isinstance(value, types[kind])
