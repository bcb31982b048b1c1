import asyncio

from quire.arrays import decode_int32
from quire.rpc.errors import ResourceExhausted
from scheduler_svc.core.logprobs import PositionLogprobs, TokenLogprob
from scheduler_svc.core.request import Handle
from scheduler_svc.core.step_plan import ClientEvents
from scheduler_svc.service.gateway_convert import events_message
from scheduler_svc.service.outbox import Outbox


def make_events(*tokens: tuple[int, int, int]) -> ClientEvents:
    """Events of (handle, offset, token id)."""
    events = ClientEvents()
    for handle, offset, token_id in tokens:
        events.handles.append(Handle(handle))
        events.sequence_indices.append(0)
        events.offsets.append(offset)
        events.token_ids.append(token_id)
    return events


async def test_what_piles_up_goes_out_as_one_message_in_order():
    outbox = Outbox()
    for step in range(1, 4):
        outbox.put(step, make_events((1, step, 10 * step), (2, step, 20 * step)))
    outgoing = await outbox.take()
    assert outgoing is not None
    message = events_message(outgoing).events
    assert message.step_id == 3
    assert decode_int32(message.handles, "handles").tolist() == [1, 2, 1, 2, 1, 2]
    assert decode_int32(message.offsets, "offsets").tolist() == [1, 1, 2, 2, 3, 3]
    assert decode_int32(message.token_ids, "token_ids").tolist() == [10, 20, 20, 40, 30, 60]


async def test_logprobs_keep_pointing_at_their_token_when_steps_are_merged():
    outbox = Outbox()
    outbox.put(1, make_events((1, 0, 5), (2, 0, 6)))
    second = make_events((1, 1, 7), (2, 1, 8))
    second.logprobs.append((1, PositionLogprobs(TokenLogprob(8, -0.1, 1), ())))
    outbox.put(2, second)
    outgoing = await outbox.take()
    assert outgoing is not None
    (entry,) = events_message(outgoing).events.logprobs
    assert entry.event == 3
    assert entry.logprobs.chosen.token_id == 8


async def test_take_waits_for_events_and_refusals_wake_it():
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put_refusal(Handle(9), ResourceExhausted("full", reason="QUEUE_FULL", retry_after_ms=70))
    outgoing = await waiting
    assert outgoing is not None
    (failure,) = events_message(outgoing).events.failed
    assert (failure.handle, failure.reason, failure.retry_after_ms) == (9, "QUEUE_FULL", 70)


async def test_closing_ends_the_reader():
    outbox = Outbox()
    waiting = asyncio.create_task(outbox.take())
    outbox.close()
    assert await waiting is None


async def test_without_credit_events_wait_and_go_out_as_one():
    outbox = Outbox()
    outbox.add_credit(1)
    outbox.put(1, make_events((1, 1, 7)))
    first = await outbox.take()
    assert first is not None
    assert first.step_id == 1
    outbox.put(2, make_events((1, 2, 7)))
    outbox.put(3, make_events((1, 3, 7)))
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.add_credit(2)
    second = await waiting
    assert second is not None
    assert (second.step_id, len(second.batches)) == (3, 2)
    outbox.put(4, make_events((1, 4, 7)))
    third = await outbox.take()
    assert third is not None
    assert third.step_id == 4
