import asyncio

import numpy as np

from quire.messages.logprob_columns import LogprobColumns
from quire.rpc.errors import ResourceExhausted
from quire.rpc.server import DEFAULT_MAX_MESSAGE_BYTES
from scheduler_svc.core.request import Handle
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, SequenceEnd
from scheduler_svc.service.gateway_messages import events_message, gateway_messages
from scheduler_svc.service.history import PromptLogprobs
from scheduler_svc.service.outbox import MAX_SIZE, CacheUpdate, Outbox, Outgoing, Readiness


def make_events(*tokens: tuple[int, int, int]) -> ClientEvents:
    """Events of (handle, offset, token id)."""
    events = ClientEvents()
    for handle, offset, token_id in tokens:
        events.handles.append(Handle(handle))
        events.sequence_indices.append(0)
        events.offsets.append(offset)
        events.token_ids.append(token_id)
    return events


def make_output(handle: int, num_tokens: int) -> ClientEvents:
    """All that one request generated, and its end."""
    events = make_events(*((handle, offset, offset) for offset in range(num_tokens)))
    events.finished.append(SequenceEnd(Handle(handle), 0, num_tokens, FinishReason.LENGTH, None))
    return events


def make_prompt(handle: int, size: int) -> PromptLogprobs:
    """Log probabilities of `size` in all: each position has the 20 most likely tokens."""
    num_positions = size // 21
    ranks, top_ids = np.full(num_positions, 2**31 - 1, np.int32), np.full((num_positions, 20), 2**31 - 1, np.int32)
    columns = LogprobColumns.of_lines(
        np.full(num_positions, -1.5, np.float32), ranks, top_ids, top_ids.astype(np.float32)
    )
    return PromptLogprobs(Handle(handle), 1, range(num_positions), columns)


async def taken(outbox: Outbox) -> Outgoing:
    """The messages that can be taken now."""
    async with asyncio.timeout(30):
        outgoing = await outbox.next_message()
    assert outgoing is not None
    return outgoing


async def is_empty(outbox: Outbox) -> bool:
    waiting = asyncio.create_task(outbox.next_message())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return waiting.cancel()


async def test_events_of_one_step_are_parted_between_requests_and_never_within_one():
    outbox = Outbox()
    step = make_output(1, 30_000)
    for other in (make_output(2, MAX_SIZE + 1), make_output(3, 1)):
        step.handles += other.handles
        step.sequence_indices += other.sequence_indices
        step.offsets += other.offsets
        step.token_ids += other.token_ids
        step.finished += other.finished
    outbox.put(1, step)
    outgoing = [await taken(outbox) for _ in range(3)]
    assert [[len(batch.token_ids) for batch in each.batches] for each in outgoing] == [[30_000], [MAX_SIZE + 1], [1]]
    assert [[end.handle for batch in each.batches for end in batch.finished] for each in outgoing] == [[1], [2], [3]]
    assert await is_empty(outbox)


async def test_what_ends_a_request_never_overtakes_its_tokens_nor_these_what_is_said_of_the_prompt():
    outbox = Outbox()
    outbox.put_prompt_logprobs([make_prompt(1, 21_000) for _ in range(5)])
    outbox.put(1, make_output(1, 20_000))
    outbox.put(2, make_output(1, 20_000))
    outbox.put_refusal(Handle(1), ResourceExhausted("full"))
    outbox.put_aborted(Handle(2), None)
    outgoing = [await taken(outbox) for _ in range(4)]
    assert [len(each.prompt_logprobs) for each in outgoing] == [2, 2, 1, 0]
    assert [len(each.batches) for each in outgoing] == [0, 0, 1, 1]
    assert [(len(each.refusals), len(each.aborted)) for each in outgoing] == [(0, 0), (0, 0), (0, 0), (1, 1)]
    assert await is_empty(outbox)


async def test_the_largest_message_is_far_from_what_a_gateway_refuses():
    outbox = Outbox()
    prompts = [make_prompt(handle, 21 * 500) for handle in range(20)]
    outbox.put_prompt_logprobs(prompts)
    first = await taken(outbox)
    assert first.size > 0.8 * MAX_SIZE
    assert events_message(first).ByteSize() < DEFAULT_MAX_MESSAGE_BYTES / 32


def test_who_has_not_read_an_update_of_the_cache_gets_all_that_is_cached():
    def update(stored: bytes, *, is_cleared: bool = False) -> CacheUpdate:
        return CacheUpdate(is_cleared, b"", stored, b"", b"", 0)

    outbox = Outbox()
    told = []
    for stored, all_stored in ((b"a", b"a"), (b"b", b"ab"), (b"c", b"abc")):
        outbox.put_cache(update(stored), lambda all_stored=all_stored: update(all_stored, is_cleared=True))
        if stored != b"b" and (outgoing := outbox.poll()) is not None:
            told.append(outgoing.cache)
    assert told == [update(b"a"), update(b"abc", is_cleared=True)]


def test_a_replica_that_drains_for_months_says_so():
    (message,) = gateway_messages(Outgoing(readiness=Readiness(False, None, is_draining=True, leave_after_s=1e7)))
    assert message.state.leave_after_ms == 2**32 - 1
