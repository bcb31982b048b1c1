"""A sequence takes each token once, in order."""

import time
from typing import Any

import pytest

from gateway.replicas.events import FinishReason
from gateway.replicas.sequence import SequenceStream, num_predicted
from gateway.text.formats.answer import HARMONY_REASONING, AnswerFormat
from gateway.text.formats.parser import Thinking
from tests.support.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
EOS: Any = byte_level().token_to_id("</s>")


def ids_of(text):
    return byte_level().encode(text, add_special_tokens=False).ids


def make_stream(ending=(EOS,), **fields):
    return SequenceStream(0, TOKENIZER.detokenizer(include_special_tokens=False), None, frozenset(ending), **fields)


def take_all(stream, max_tokens=1000):
    chunks = []
    while (chunk := stream.take_chunk(max_tokens)) is not None:
        chunks.append(chunk)
    return chunks


def test_an_ending_token_that_did_not_end_the_sequence_is_text():
    stream = make_stream(ending=ids_of("!"))
    token_ids = ids_of("a!b!")
    stream.accept(0, token_ids)
    stream.finish(len(token_ids), FinishReason.LENGTH, None, None)
    assert "".join(chunk.text for chunk in take_all(stream)) == "a!b!"


def test_the_schedulers_sum_is_reported_where_no_logprobs_came():
    stream = make_stream()
    stream.accept(0, [60])
    stream.finish(1, FinishReason.LENGTH, None, -7.0)
    assert stream.finished.cumulative_logprob == -7.0


@pytest.mark.parametrize(
    ("name", "thinking", "reasoning", "after"),
    [
        ("qwen3", Thinking.MAY_BEGIN, "<think>\nHm, the cat.\n</think>", "\n\nYes."),
        ("qwen3", Thinking.BEGUN, "\nHm, the cat.\n</think>", "\n\nYes."),
        ("qwen3", Thinking.BEGUN, "Hm, the cat. </thi", ""),
        ("qwen3", Thinking.NONE, "", "<think>Yes.</think>"),
        (HARMONY_REASONING, Thinking.MAY_BEGIN, "<|channel|>analysis<|message|>Hm.<|end|>",
         "<|start|>assistant<|channel|>final<|message|>Yes."),
    ],
)  # fmt: skip
def test_tokens_of_the_reasoning_are_counted_with_its_marks(name, thinking, reasoning, after):
    parser = AnswerFormat(reasoning_format=name, thinking=thinking).parser(str)
    stream = make_stream(parser=parser)
    first, last = ids_of(reasoning), ids_of(after)
    stream.accept(0, first + last)
    # A mark may have several tokens, and the last one opens the reasoning.
    opening = ids_of("<think>") if reasoning.startswith("<think>") else []
    opening = ids_of("<|channel|>analysis<|message|>") if name == HARMONY_REASONING else opening
    assert stream.num_reasoning_tokens == len(first) - max(len(opening) - 1, 0)
    again = make_stream(parser=AnswerFormat(reasoning_format=name, thinking=thinking).parser(str))
    for offset, token_id in enumerate(first + last):
        again.accept(offset, [token_id])
    assert again.num_reasoning_tokens == stream.num_reasoning_tokens


@pytest.mark.parametrize(
    ("output", "count"),
    [
        ([], 0),
        ([1, 2, 3, 4, 5, 6], 6),
        # Other tokens come, and then the rest.
        ([1, 2, 9, 9, 4, 5, 6], 4),
        # Some tokens are left out.
        ([1, 2, 5, 6], 3),
        # The beginning comes again, and counts once.
        ([1, 2, 1, 2, 3], 3),
        ([7, 8, 9], 0),
        ([1, 2, 3, 4, 5, 6, 7, 8], 6),
    ],
)
def test_tokens_that_follow_a_prediction_are_counted(output: list[int], count: int) -> None:
    assert num_predicted([1, 2, 3, 4, 5, 6], [output, [], output[:1]]) == [count, 0, int(output[:1] == [1])]


def test_tokens_that_follow_a_long_prediction_are_counted_in_little_time() -> None:
    predicted = tuple(index * 7919 % 50_021 for index in range(300_000))
    started = time.process_time()
    assert num_predicted(predicted, [[predicted[0], 1, 1]] * 128) == [1] * 128
    # A table of all its pairs takes as long for one sequence.
    assert time.process_time() - started < 0.2
