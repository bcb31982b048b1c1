"""Answers hold little memory, and never more than a bound."""

import gc
import tracemalloc

import pytest

from gateway.api.answers import json_pieces
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.write_openai import CompletionShaper, head_of
from gateway.replicas.events import event_batch_from
from gateway.replicas.ledger import Ledger
from gateway.request.answer_memory import AS_MESSAGE, AS_TENSORS, IN_PIECES, STREAMED, AnswerMemory
from gateway.request.generator import results_of
from quire.common.v1 import common_pb2
from quire.messages.arrays import encode_int32
from quire.rpc.errors import FailedPrecondition, InvalidArgument
from quire.scheduler.v1 import scheduler_pb2
from tests.support.logprobs import Line, token_logprobs
from tests.support.parameters import make_request
from tests.support.tokenizers import byte_level, wrapped

REPLICA = "replica"
TOKENIZER = wrapped(byte_level())
NUM_TOP = 20


def open_live(ledger, memory, **fields):
    live = ledger.open(make_request(**fields), TOKENIZER)
    live.replica = REPLICA
    memory.count(live)
    return live


def step_message(live, offset, *, is_last=False):
    """One token of each sequence, as a scheduler sends them, with log probabilities if requested."""
    count, num_top = len(live.sequences), live.request.logprobs
    events = scheduler_pb2.TokenEvents(
        handles=encode_int32([live.handle] * count),
        sequence_indices=encode_int32(list(range(count))),
        offsets=encode_int32([offset] * count),
        token_ids=encode_int32([60 + (offset + index) % 20 for index in range(count)]),
    )
    if num_top is not None:
        line = Line(-0.25, 1, list(range(60, 60 + num_top)), [-0.5] * num_top)
        events.token_logprobs.CopyFrom(token_logprobs(dict.fromkeys(range(count), line)))
    if is_last:
        reason = common_pb2.FINISH_REASON_LENGTH
        for index in range(count):
            events.finished.add(handle=live.handle, sequence_index=index, num_tokens=offset + 1, reason=reason)
        events.completed.add(handle=live.handle)
    return events.SerializeToString()


def generate(ledger, live, num_tokens, *, completes=False):
    first = live.num_generated_tokens // len(live.sequences)
    for offset in range(first, first + num_tokens):
        is_last = completes and offset == first + num_tokens - 1
        message = scheduler_pb2.TokenEvents.FromString(step_message(live, offset, is_last=is_last))
        ledger.apply_events(REPLICA, event_batch_from(message))


@pytest.fixture
def memory():
    return AnswerMemory(per_call=50_000, per_key=80_000, total=120_000)


@pytest.fixture
def ledger():
    return Ledger(max_chunk_tokens=100)


async def test_many_log_probabilities_are_kept_as_columns_and_written_in_pieces(ledger):
    """A share of 64 prompts with n=128, 400 tokens and 20 log probabilities, which took 2,960 bytes a position."""
    num_positions = 64 * 50
    with AnswerMemory(per_call=1 << 30, per_key=1 << 30, total=1 << 30).call("key", IN_PIECES) as call:
        live = open_live(ledger, call, num_sequences=64, logprobs=NUM_TOP, max_tokens=50)
        generate(ledger, live, 1)
        tracemalloc.start()
        try:
            generate(ledger, live, 49, completes=True)
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
            # The counted memory is close to the memory that is held.
            assert held / 2 < call.num_bytes < 2 * held
            assert held / num_positions < 400
            body = CompletionBody(prompt="x", logprobs=NUM_TOP)
            shaper = CompletionShaper(head_of("id", 1, "m"), body, [None], [""], [live], TOKENIZER)
            answer = shaper.whole(await results_of([live]))
            tracemalloc.reset_peak()
            sizes = [len(piece) for piece in json_pieces(answer)]
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert sum(sizes) > 190 * num_positions
    assert max(sizes) < 100_000
    assert peak - held < 1_500_000


async def test_what_a_stream_has_written_is_not_held(ledger, memory):
    with memory.call("key", STREAMED) as call:
        live = open_live(ledger, call, logprobs=5)
        events = live.events()
        generate(ledger, live, 10)
        waiting = call.num_bytes
        await anext(events)
        written = call.num_bytes
        generate(ledger, live, 10)
        assert 0 < written < waiting / 3
        assert call.num_bytes == written + waiting
        await anext(events)
        assert call.num_bytes == 2 * written
    assert memory.num_bytes == 0


@pytest.mark.parametrize(("form", "most"), [(IN_PIECES, 190), (AS_MESSAGE, 85), (AS_TENSORS, 45)])
async def test_a_call_that_holds_too_much_is_ended_and_says_what_helps(ledger, memory, form, most):
    with memory.call("key", form) as call:
        live = open_live(ledger, call, logprobs=5, max_tokens=1000)
        num_tokens = 0
        while not live.is_over:
            generate(ledger, live, 1)
            num_tokens += 1
            assert num_tokens < 1000
        assert most <= num_tokens < 2 * most
        with pytest.raises(
            FailedPrecondition, match=r"more than 48.8 KiB \(--max-answer-bytes\); stream the answer, or ask for fewer"
        ):
            await live.result()
        with pytest.raises(FailedPrecondition):
            call.raise_if_ended()
        assert (memory.num_bytes, call.num_bytes) == (0, 0)
        call.add(10_000)
        assert memory.num_bytes == 0


def ended(*calls):
    return [call.is_closed for call in calls]


def test_of_a_key_that_holds_too_much_the_largest_call_is_ended(memory):
    with (
        memory.call("a", STREAMED) as small,
        memory.call("a", IN_PIECES) as large,
        memory.call("a", IN_PIECES) as growing,
        memory.call("b", IN_PIECES) as other,
    ):
        reasons = []
        large.when_ended(reasons.append)
        for call, num_bytes in ((small, 1_000), (large, 45_000), (other, 10_000), (growing, 35_000)):
            call.add(num_bytes)
        assert ended(small, large, growing, other) == [False, True, False, False]
        assert "answers to this API key hold more than 78.1 KiB (--max-key-answer-bytes), this one most" in str(
            reasons[0]
        )
        assert memory.num_bytes == 46_000


def test_of_all_answers_the_largest_of_the_key_that_holds_most_is_ended(memory):
    with (
        memory.call("a", IN_PIECES) as first,
        memory.call("a", IN_PIECES) as second,
        memory.call("b", IN_PIECES) as other,
        memory.call("c", STREAMED) as stream,
    ):
        for call, num_bytes in ((first, 40_000), (second, 30_000), (other, 49_000), (stream, 2_000)):
            call.add(num_bytes)
        # The key "a" holds 70,000, in two calls, the other one 49,000.
        assert ended(first, second, other, stream) == [True, False, False, False]
        assert memory.num_bytes == 81_000
    assert memory.num_bytes == 0


def test_what_a_call_asks_for_in_so_many_words_is_refused_before_it_runs_where_it_can_never_be_held(memory):
    asked = make_request(num_sequences=2, logprobs=20, max_tokens=50)
    with memory.call("key", IN_PIECES) as call:
        call.expect(asked, 50)
        with pytest.raises(InvalidArgument) as refused:
            call.expect(asked, 50)
        (violation,) = refused.value.violations
        assert violation.field == "output.logprobs"
        assert "is 20; with 2 sequences of up to 50 tokens" in violation.description
        assert "not streamed may take at most 48.8 KiB (--max-answer-bytes); stream" in violation.description
        with pytest.raises(InvalidArgument) as refused:
            call.expect(make_request(num_sequences=4, max_tokens=9999), 9999)
        assert refused.value.violations[0].field == "stopping.max_tokens"
    with memory.call("key", STREAMED) as call:
        call.expect(make_request(num_sequences=128, logprobs=20, max_tokens=9999), 9999)
