"""The corpus of quire-tiny: the same for a seed, honest in its split, right in its answers."""

import re
from itertools import islice
from random import Random

import pytest

from assets.training.corpus import (
    QUESTION_KINDS,
    SPECIAL_TOKENS,
    chat_document,
    documents,
    draw_given_name,
    draw_name_memory,
    draw_question,
    held_out_texts,
)
from assets.training.number_questions import NUMBER_KINDS, difference_key, sum_key
from assets.training.questions import HELD_OUT_PERCENT, Question, draw, is_held_out, with_article
from assets.training.stories import draw_request, draw_story

DRAWS = 200


def draw_many(kind: str, *, held_out: bool, seed: int = 3) -> list[Question]:
    rng = Random(seed)
    return [draw(QUESTION_KINDS[kind], rng, held_out=held_out) for _ in range(DRAWS)]


def texts_of(seed: int, count: int) -> list[str]:
    return ["".join(segment.text for segment in document) for document in islice(documents(seed), count)]


def test_documents_are_the_same_for_the_same_seed() -> None:
    assert texts_of(5, 500) == texts_of(5, 500)


def test_documents_differ_between_seeds() -> None:
    assert texts_of(5, 500) != texts_of(6, 500)


def test_the_split_holds_out_the_share_it_names() -> None:
    held_out = sum(is_held_out(f"key {i}") for i in range(10_000))
    assert held_out / 10_000 == pytest.approx(HELD_OUT_PERCENT / 100, abs=0.01)


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_no_question_is_on_both_sides_of_the_split(kind: str) -> None:
    trained = {question.text for question in draw_many(kind, held_out=False)}
    held_out = {question.text for question in draw_many(kind, held_out=True)}
    assert held_out
    assert trained.isdisjoint(held_out)


@pytest.mark.parametrize("kind", QUESTION_KINDS)
def test_every_question_names_its_kind_and_has_an_answer(kind: str) -> None:
    for question in draw_many(kind, held_out=False):
        assert question.kind == kind
        assert question.text.strip() == question.text != ""
        assert question.answer.strip() == question.answer != ""


def test_questions_for_training_are_never_from_the_held_out_side() -> None:
    rng = Random(1)
    assert not any(is_held_out(draw_question(rng, held_out=False).key) for _ in range(2_000))


def test_a_sum_and_its_mirror_are_on_the_same_side() -> None:
    assert all(sum_key(a, b) == sum_key(b, a) for a in range(30) for b in range(30))


@pytest.mark.parametrize("kind", NUMBER_KINDS)
@pytest.mark.parametrize("held_out", [False, True])
def test_every_equation_in_an_answer_is_right(kind: str, held_out: bool) -> None:
    for question in draw_many(kind, held_out=held_out):
        for a, sign, b, result in re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)", question.answer):
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
            assert int(result) == expected, question


@pytest.mark.parametrize(("kind", "sign"), [("addition", "+"), ("subtraction", "-"), ("multiplication", "*")])
def test_an_equation_has_the_numbers_of_its_question(kind: str, sign: str) -> None:
    for question in draw_many(kind, held_out=False):
        asked = sorted(re.findall(r"\d+", question.text))
        assert asked == sorted(re.findall(r"\d+", question.answer.split("=")[0]))
        assert sign in question.answer


def test_word_problems_share_the_split_of_plain_sums() -> None:
    for question in draw_many("word_problem", held_out=True):
        a, b = (int(number) for number in re.findall(r"\d+", question.answer)[:2])
        assert is_held_out(sum_key(a, b) if "+" in question.answer else difference_key(a, b))


def test_comparison_names_the_extreme_that_was_asked_for() -> None:
    for question in draw_many("comparison", held_out=False):
        numbers = [int(number) for number in re.findall(r"\d+", question.text)]
        expected = max(numbers) if question.answer.endswith("bigger.") else min(numbers)
        assert question.answer.startswith(f"{expected} ")


def test_spelling_joins_back_to_the_word() -> None:
    for question in draw_many("spell", held_out=False):
        assert question.answer.replace("-", "") in question.text


def test_reverse_order_turns_the_list_of_the_question() -> None:
    for question in draw_many("reverse_order", held_out=False):
        listed = question.text.split(": ")[1].rstrip(".").split(", ")
        assert question.answer.rstrip(".").split(", ") == listed[::-1]


def test_stories_fill_every_slot_and_name_their_hero() -> None:
    rng = Random(2)
    for _ in range(DRAWS):
        story = draw_story(rng, held_out=False)
        assert story.name in story.text
        assert story.animal in story.text
        assert not set("{}|") & set(story.text)
        assert draw_request(rng, story)


def test_stories_of_the_two_sides_differ() -> None:
    rng = Random(2)
    trained = {draw_story(rng, held_out=False).text for _ in range(DRAWS)}
    assert trained.isdisjoint(draw_story(rng, held_out=True).text for _ in range(DRAWS))


def test_name_memory_answers_with_the_name_that_was_told() -> None:
    rng = Random(4)
    for _ in range(DRAWS):
        turns = draw_name_memory(rng, held_out=False).turns
        told = turns[0].assistant.removeprefix("Nice to meet you, ").rstrip("!")
        assert turns[-1].assistant == f"Your name is {told}."


def test_given_name_comes_from_the_system_prompt() -> None:
    conversation = draw_given_name(Random(4), held_out=False)
    assert conversation.system is not None
    assert conversation.turns[0].assistant.removeprefix("I am ").rstrip(".") in conversation.system


def test_only_what_the_model_should_write_counts_fully() -> None:
    document = chat_document(draw_given_name(Random(4), held_out=False))
    assert [segment.weight for segment in document] == [0.0, 0.1, 0.1, 1.0]
    assert document[-1].text.endswith("<|end|>")


def test_held_out_texts_have_no_special_tokens_and_no_empty_lines() -> None:
    for text in held_out_texts(seed=99, count=90):
        assert not any(token in text for token in SPECIAL_TOKENS)
        assert "\n\n" not in text


@pytest.mark.parametrize(("noun", "expected"), [("cat", "a cat"), ("owl", "an owl")])
def test_article_follows_the_first_letter(noun: str, expected: str) -> None:
    assert with_article(noun) == expected
