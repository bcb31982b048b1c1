"""The corpus of quire-tiny: the same for a seed, honest in its split, right in its answers."""

import re
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from assets.training.batches import LONG_SHAPES, Lesson, lesson_batches
from assets.training.corpus import (
    FIRST_EMPHASIS,
    QUESTION_KINDS,
    SECOND_EMPHASIS,
    SPECIAL_TOKENS,
    chat_document,
    documents,
    draw_given_name,
    draw_question,
    held_out_texts,
)
from assets.training.number_questions import NUMBER_KINDS, difference_key, sum_key
from assets.training.questions import HELD_OUT_PERCENT, Question, draw, is_held_out
from assets.training.second_course import Shares, second_course_documents
from assets.training.stories import draw_story

DRAWS = 200
TOKENIZER = Path(__file__).parents[3] / "assets" / "quire-tiny" / "tokenizer.json"
WITH_TOOLS = partial(second_course_documents, shares=Shares(old=0.5, tools=0.3))
LESSONS = (
    Lesson(until=3, seed=0, emphasis=FIRST_EMPHASIS),
    Lesson(until=6, seed=1, emphasis=SECOND_EMPHASIS, documents=WITH_TOOLS, shapes=LONG_SHAPES),
)


def draw_many(kind: str, *, held_out: bool, seed: int = 3) -> list[Question]:
    rng = Random(seed)
    return [draw(QUESTION_KINDS[kind], rng, held_out=held_out) for _ in range(DRAWS)]


def texts_of(seed: int, count: int) -> list[str]:
    return ["".join(segment.text for segment in document) for document in islice(documents(seed), count)]


def test_documents_are_the_same_for_the_same_seed_only() -> None:
    assert texts_of(5, 500) == texts_of(5, 500) != texts_of(6, 500)


def test_the_split_holds_out_the_share_it_names() -> None:
    held_out = sum(is_held_out(f"key {i}") for i in range(10_000))
    assert held_out / 10_000 == pytest.approx(HELD_OUT_PERCENT / 100, abs=0.01)


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_no_question_is_on_both_sides_of_the_split(kind: str) -> None:
    trained = {question.text for question in draw_many(kind, held_out=False)}
    held_out = {question.text for question in draw_many(kind, held_out=True)}
    assert held_out
    assert trained.isdisjoint(held_out)


def test_questions_for_training_are_never_from_the_held_out_side() -> None:
    rng = Random(1)
    assert not any(is_held_out(draw_question(rng, held_out=False).key) for _ in range(2_000))


@pytest.mark.parametrize("kind", NUMBER_KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_equation_in_an_answer_is_right(kind: str, held_out: bool) -> None:
    for question in draw_many(kind, held_out=held_out):
        for a, sign, b, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", question.answer):
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert int(result) == expected, question


def test_word_problems_share_the_split_of_plain_sums() -> None:
    for question in draw_many("word_problem", held_out=True):
        a, b = (int(number) for number in re.findall(r"\d+", question.answer)[:2])
        assert is_held_out(sum_key(a, b) if "+" in question.answer else difference_key(a, b))


def test_stories_of_the_two_sides_differ() -> None:
    rng = Random(2)
    trained = {draw_story(rng, held_out=False).text for _ in range(DRAWS)}
    assert trained.isdisjoint(draw_story(rng, held_out=True).text for _ in range(DRAWS))


def test_only_what_the_model_should_write_counts_fully() -> None:
    document = chat_document(draw_given_name(Random(4), held_out=False))
    assert [segment.weight for segment in document] == [0.0, 0.1, 0.1, 1.0]
    assert document[-1].text.endswith("<|end|>")


def test_held_out_texts_have_no_special_tokens_and_no_empty_lines() -> None:
    for text in held_out_texts(seed=99, count=90):
        assert not any(token in text for token in SPECIAL_TOKENS)
        assert "\n\n" not in text


@pytest.mark.parametrize("done", [1, 3, 4])
def test_training_that_goes_on_sees_the_batches_it_would_have_seen(done: int) -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    whole = list(lesson_batches(tokenizer, LESSONS, done=0))
    rest = list(lesson_batches(tokenizer, LESSONS, done=done))
    assert [step for step, _ in rest] == list(range(done, 6))
    for (_, expected), (_, actual) in zip(whole[done:], rest, strict=True):
        assert torch.equal(actual.tokens, expected.tokens)
