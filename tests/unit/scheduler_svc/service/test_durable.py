"""What is remembered of durable requests: of those that were cancelled, and of those that an earlier scheduler ran."""

import asyncio
import dataclasses

import numpy as np
import pytest

from quire.rpc.errors import Cancelled
from scheduler_svc.core.request import ClientId, EmittedSequence, Handle, Request
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step_plan import SequenceEnd
from scheduler_svc.service.connections import Connection
from scheduler_svc.service.durable import MAX_CANCELLED, DurableLimits, DurableRequests, Reader
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.prompt_logprobs import PromptLogprobs
from tests.support.core_driver import make_request
from tests.support.logprobs import Line, columns_of

NONCE = 7


@pytest.fixture
def durable() -> DurableRequests:
    return DurableRequests(lambda _: True, DurableLimits(max_requests=8, max_tokens=10_000, grace_s=60.0))


def make_cancelled(durable: DurableRequests, handle: int, tenant: str = "a") -> Request:
    """A request that ran and was cancelled."""
    request = make_request(handle, tenant=tenant)
    durable.admit(request, NONCE, b"")
    assert durable.cancel(tenant, request.request_id)
    return request


def test_one_that_was_cancelled_is_refused_however_often_it_is_submitted_again(durable):
    request = make_cancelled(durable, 1)
    for _ in range(3):
        with pytest.raises(Cancelled, match="request-1"):
            durable.resubmitted(request, NONCE, "gateway-a")


def test_it_is_that_of_the_tenant_alone(durable):
    request = make_cancelled(durable, 1, tenant="a")
    assert durable.resubmitted(dataclasses.replace(request, tenant="b"), NONCE, "gateway-a") is None


def test_a_new_one_under_its_id_is_another_one(durable):
    request = make_cancelled(durable, 1)
    admitted = durable.admit(request, NONCE, b"")
    assert durable.resubmitted(request, NONCE, "gateway-a") is admitted


def test_a_resubmission_with_another_nonce_is_another_request(durable):
    """An id may be used again once its request is over."""
    request = make_cancelled(durable, 1)
    assert durable.resubmitted(request, NONCE + 1, "gateway-a") is None
    earlier = durable.admit(request, NONCE, b"")
    assert durable.resubmitted(request, NONCE + 1, "gateway-a") is None
    durable.attach(earlier, Reader(Connection(ClientId(0), "gateway-b", 0.0), Handle(9)), replays=False)
    assert durable.resubmitted(request, NONCE + 1, "gateway-a") is None


def test_only_the_newest_are_remembered(durable):
    requests = [make_cancelled(durable, handle) for handle in range(MAX_CANCELLED + 2)]
    assert [durable.resubmitted(each, NONCE, "gateway-a") for each in requests[:2]] == [None, None]
    for each in requests[2:]:
        with pytest.raises(Cancelled):
            durable.resubmitted(each, NONCE, "gateway-a")


def test_one_that_is_cancelled_twice_counts_from_the_second_time(durable):
    first = make_cancelled(durable, 0)
    for handle in range(1, MAX_CANCELLED):
        make_cancelled(durable, handle)
    make_cancelled(durable, 0)
    make_cancelled(durable, MAX_CANCELLED)
    with pytest.raises(Cancelled):
        durable.resubmitted(first, NONCE, "gateway-a")


def test_an_id_that_nobody_has_is_not_remembered(durable):
    assert not durable.cancel("a", "request-1")
    assert durable.resubmitted(make_request(1, tenant="a"), NONCE, "gateway-a") is None


async def replayed(durable: DurableRequests, request: Request) -> Outgoing:
    """What a new reader gets of a request, which it knows by the handle 9."""
    connection = Connection(ClientId(0), "gateway-a", 0.0)
    durable.attach(durable.admit(request, NONCE, b""), Reader(connection, Handle(9)), replays=True)
    async with asyncio.timeout(1):
        outgoing = await connection.outbox.take()
    assert outgoing is not None
    return outgoing


async def test_a_sequence_that_ended_under_an_earlier_scheduler_is_replayed_with_its_end(durable):
    request = dataclasses.replace(
        make_request(1, max_tokens=3, num_sequences=4, stop=frozenset({42})),
        emitted=[
            EmittedSequence([7, 42], has_ended=True),
            EmittedSequence([1, 2, 3], has_ended=True),
            # By a stop string, which each gateway finds by itself.
            EmittedSequence([5], has_ended=True),
            EmittedSequence([8, 6]),
        ],
    )
    (batch,) = (await replayed(durable, request)).batches
    assert batch.token_ids == [7, 42, 1, 2, 3, 5, 8, 6]
    assert batch.finished == [
        SequenceEnd(Handle(9), 0, 2, FinishReason.STOP, 42),
        SequenceEnd(Handle(9), 1, 3, FinishReason.LENGTH, None),
        SequenceEnd(Handle(9), 2, 1, FinishReason.LENGTH, None),
    ]


async def test_log_probabilities_of_a_prompt_that_is_computed_again_are_kept_and_sent_once(durable):
    def report(first_position: int, count: int) -> PromptLogprobs:
        positions = np.arange(first_position, first_position + count, dtype=np.int32)
        columns = columns_of(Line(-float(position), int(position)) for position in positions)
        return PromptLogprobs(admitted.key.handle, first_position, positions.tolist(), columns)

    admitted = durable.admit(make_request(1, tenant="a"), NONCE, b"")
    connection = Connection(ClientId(0), "gateway-a", 0.0)
    durable.attach(admitted, Reader(connection, Handle(9)), replays=True)
    for first_position, count in ((1, 3), (1, 3), (2, 1), (2, 4), (6, 2), (1, 7)):
        durable.deliver_prompt_logprobs([report(first_position, count)])
    async with asyncio.timeout(1):
        outgoing = await connection.outbox.take()
    for entries in (admitted.prompt_logprobs, outgoing.prompt_logprobs):
        assert [(each.first_position, list(each.token_ids)) for each in entries] == [
            (1, [1, 2, 3]),
            (4, [4, 5]),
            (6, [6, 7]),
        ]
        assert [each.columns.chosen_ranks.tolist() for each in entries] == [[1, 2, 3], [4, 5], [6, 7]]
