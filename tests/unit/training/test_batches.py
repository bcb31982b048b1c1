"""What training sees: packed rows, the same after an interruption, and a rate that rises, stays and falls."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from assets.training.batches import LONG_SHAPES, SHAPES, Lesson, Shape, encoded_documents, lesson_batches, next_batch
from assets.training.corpus import BOS_ID, FIRST_EMPHASIS, SECOND_EMPHASIS, documents
from assets.training.second_course import Shares, second_course_documents
from assets.training.train import Schedule

TOKENIZER = Path(__file__).parents[3] / "assets" / "quire-tiny" / "tokenizer.json"
WITH_TOOLS = partial(second_course_documents, shares=Shares(old=0.5, tools=0.3))
LESSONS = (
    Lesson(until=3, seed=0, emphasis=FIRST_EMPHASIS),
    Lesson(until=6, seed=1, emphasis=SECOND_EMPHASIS, documents=WITH_TOOLS, shapes=LONG_SHAPES),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER))


def test_rows_are_full_and_begin_with_a_document(tokenizer: Tokenizer) -> None:
    batch = next_batch(encoded_documents(tokenizer, documents(0, FIRST_EMPHASIS)), Shape(rows=4, length=128))
    assert batch.tokens.shape == batch.weights.shape == (4, 128)
    assert batch.tokens[:, 0].tolist() == [BOS_ID] * 4


def test_prompts_count_less_than_answers(tokenizer: Tokenizer) -> None:
    batch = next_batch(encoded_documents(tokenizer, documents(0, FIRST_EMPHASIS)), Shape(rows=8, length=128))
    assert {round(weight, 1) for weight in batch.weights.unique().tolist()} <= {0.0, 0.1, 0.5, 1.0}


def test_every_shape_has_the_same_number_of_tokens() -> None:
    assert {shape.rows * shape.length for shape in SHAPES} == {4096}
    assert {shape.rows * shape.length for shape in LONG_SHAPES} == {2048}


@pytest.mark.parametrize("done", [1, 3, 4])
def test_training_that_goes_on_sees_the_batches_it_would_have_seen(tokenizer: Tokenizer, done: int) -> None:
    whole = list(lesson_batches(tokenizer, LESSONS, done=0))
    rest = list(lesson_batches(tokenizer, LESSONS, done=done))
    assert [step for step, _ in rest] == list(range(done, 6))
    for (_, expected), (_, actual) in zip(whole[done:], rest, strict=True):
        assert torch.equal(actual.tokens, expected.tokens)


def test_rate_rises_stays_and_falls_to_zero() -> None:
    schedule = Schedule(((-1, 0.0), (9, 1.0), (80, 1.0), (100, 0.0)))
    assert schedule.rate(0) == pytest.approx(0.1)
    assert schedule.rate(50) == 1.0
    assert schedule.rate(90) == pytest.approx(0.5)
    assert schedule.rate(100) == 0.0
