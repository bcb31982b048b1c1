"""The ledger applies a scheduler's messages to the right live requests, and returns the remaining actions."""

from dataclasses import replace

import numpy as np
import pytest

from gateway.replicas.events import (
    Chunk,
    EventBatch,
    Finished,
    FinishReason,
    PromptRun,
    RequestEnded,
    RequestFailed,
    SequenceEnded,
    TokenRun,
    Usage,
)
from gateway.replicas.generation_request import NamedAdapter
from gateway.replicas.ledger import Ledger
from gateway.replicas.sequence import TokenGapError
from quire.rpc.errors import AlreadyExists, Internal
from quire.service.compatibility import ModelFingerprint
from tests.support import parameters
from tests.support.logprobs import Line, columns_of
from tests.support.tokenizers import byte_level, wrapped

TOKENIZER = wrapped(byte_level())
REPLICA = "replica"
USAGE = Usage(prompt_tokens=3, generated_tokens=2)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def ids_of(text):
    return byte_level().encode(text, add_special_tokens=False).ids


def make_request(request_id="a", stop=(), num_sequences=1, tenant="default"):
    return parameters.make_request(request_id, tenant, stop=stop, num_sequences=num_sequences)


def open_live(ledger, *args, **kwargs):
    live = ledger.open(make_request(*args, **kwargs), TOKENIZER)
    live.replica = REPLICA
    return live


def make_batch(runs=(), ended=(), completed=(), failed=()):
    return EventBatch(list(runs), list(ended), list(completed), list(failed))


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ledger(clock):
    return Ledger(max_chunk_tokens=100, clock=clock)


async def test_sequences_take_turns_while_new_tokens_keep_coming(ledger):
    live = open_live(ledger, num_sequences=2)

    def step(offset):
        ledger.apply_events(
            REPLICA, make_batch([TokenRun(live.handle, index, offset, [60 + offset]) for index in (0, 1)])
        )

    events = live.events()
    step(0)
    taken = []
    for offset in range(1, 7):
        chunk = await anext(events)
        taken.append((chunk.sequence_index, chunk.offset))
        step(offset)
    assert taken == [(0, 0), (1, 0), (0, 1), (1, 2), (0, 3), (1, 4)]


async def test_a_stop_string_ends_the_request_here(ledger, clock):
    live = open_live(ledger, stop=["the"])
    clock.now += 0.5
    ledger.apply_events(REPLICA, make_batch([TokenRun(live.handle, 0, 0, ids_of("a"))]))
    clock.now += 0.25
    outcome = ledger.apply_events(REPLICA, make_batch([TokenRun(live.handle, 0, 1, ids_of("the cat"))]))
    assert outcome.ended_here == [live]
    assert live.awaits_usage
    # It can no longer fail.
    assert ledger.apply_events(REPLICA, make_batch(failed=[RequestFailed(live.handle, Internal("NaN"))])).failed == []
    live.end_if_complete()
    events = [event async for event in live.events()]
    assert events[-2].stop_string == "the"
    assert events[-1].usage == Usage(
        prompt_tokens=3, generated_tokens=live.num_generated_tokens, prefill_ms=500.0, decode_ms=250.0
    )


@pytest.mark.parametrize("knows", [True, False])
async def test_what_a_request_cost_that_ended_here_is_the_schedulers_to_say(ledger, clock, knows):
    live = open_live(ledger, stop=["the"])
    ledger.apply_events(REPLICA, make_batch([TokenRun(live.handle, 0, 0, ids_of("the cat"))]))
    events = live.events()
    assert [type(await anext(events)) for _ in range(2)] == [Chunk, Finished]
    assert not live.is_over
    assert ledger.running_on(REPLICA) == []
    said = Usage(prompt_tokens=3, generated_tokens=9, cached_tokens=2, queue_ms=7.0, preemptions=1)
    outcome = ledger.apply_events(REPLICA, make_batch(completed=[RequestEnded(live.handle, said if knows else None)]))
    assert outcome.ended_here == []
    usage = (await anext(events)).usage
    assert usage.generated_tokens == live.num_generated_tokens < 9
    assert usage.cached_tokens == (2 if knows else 0)
    assert usage.preemptions == (1 if knows else 0)


@pytest.mark.parametrize(
    "batch_of",
    [
        lambda handle: make_batch([TokenRun(handle, 0, 1, [60])]),
        lambda handle: make_batch([TokenRun(handle, 3, 0, [60])]),
        lambda handle: make_batch(ended=[SequenceEnded(handle, 0, 1, FinishReason.LENGTH, None, None)]),
        lambda handle: make_batch(completed=[RequestEnded(handle, USAGE)]),
    ],
    ids=["offset too high", "unknown sequence", "end without its tokens", "completed before its end"],
)
def test_missing_events_are_noticed(ledger, batch_of):
    live = open_live(ledger)
    with pytest.raises(TokenGapError):
        ledger.apply_events(REPLICA, batch_of(live.handle))
    assert not live.is_over


def test_work_that_nobody_wants_is_reported(ledger):
    live = open_live(ledger)
    batch = make_batch([TokenRun(live.handle, 0, 0, [60]), TokenRun(live.handle + 1, 0, 0, [60])])
    assert ledger.apply_events(REPLICA, batch).unknown_handles == {live.handle + 1}
    more = make_batch([TokenRun(live.handle, 0, 1, [61]), TokenRun(live.handle + 1, 0, 0, [60])])
    assert ledger.apply_events("another", more).unknown_handles == {live.handle, live.handle + 1}
    assert live.num_generated_tokens == 1


def prompt_run(live, first_position, count):
    token_ids = np.arange(first_position, first_position + count, dtype=np.int32)
    columns = columns_of([Line(-0.5)] * count)
    return EventBatch([], [], [], [], [PromptRun(live.handle, first_position, token_ids, columns)])


def test_what_another_model_said_of_the_prompt_is_dropped():
    ledger = Ledger(max_chunk_tokens=100)
    live = open_live(ledger)
    live.set_model(ModelFingerprint(weights="w1"))
    ledger.apply_events(REPLICA, prompt_run(live, 1, 3))
    live.set_model(ModelFingerprint(weights="w1"))
    assert len(live.prompt_logprobs) == 3
    live.set_model(ModelFingerprint(weights="w2"))
    assert not len(live.prompt_logprobs)


def test_missing_prompt_positions_are_a_gap():
    ledger = Ledger(max_chunk_tokens=100)
    live = open_live(ledger)
    with pytest.raises(TokenGapError, match="log probabilities of its prompt up to position 1"):
        ledger.apply_events(REPLICA, prompt_run(live, 2, 1))


async def test_a_failure_by_numbers_that_are_not_finite_names_the_adapter(ledger):
    adapter = NamedAdapter("one", b"d" * 32, "/adapters/one")
    live = ledger.open(replace(make_request(), adapter=adapter), TOKENIZER)
    live.replica = REPLICA
    for reason, names_it in (("NON_FINITE_LOGITS", True), ("INVALID_SAMPLING", False)):
        failed = RequestFailed(live.handle, Internal("row 3", reason=reason))
        ((_, error),) = ledger.apply_events(REPLICA, make_batch(failed=[failed])).failed
        assert ('adapter "one"' in error.message) == names_it


def test_ids_are_unique_among_live_requests(ledger):
    live = open_live(ledger, "same")
    with pytest.raises(AlreadyExists, match="same"):
        open_live(ledger, "same")
    ledger.close(live)
    ledger.close(live)
    assert open_live(ledger, "same").handle != live.handle
