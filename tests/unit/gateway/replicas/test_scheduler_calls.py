"""Which replica a durable request is read from, where it has moved between them."""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import pytest

from gateway.replicas.link import SchedulerLink
from gateway.replicas.scheduler_calls import SchedulerCalls
from quire.rpc.errors import DeadlineExceeded, NotFound, QuireError, Unavailable
from quire.scheduler.v1 import scheduler_pb2
from tests.support.processes import until_true


@dataclass
class Replica:
    """Answers what the test says."""

    answer: scheduler_pb2.FindDurableResponse | QuireError
    answers: asyncio.Event | None = None
    num_answered: int = field(default=0)

    async def ask(self, method, request, timeout_s):
        if self.answers is not None:
            await self.answers.wait()
        self.num_answered += 1
        if isinstance(self.answer, QuireError):
            raise self.answer
        return self.answer


def having(num_tokens: int, *, is_over: bool = False) -> Replica:
    submit = scheduler_pb2.Submit(request_id="story", prompt_token_ids=b"")
    return Replica(scheduler_pb2.FindDurableResponse(submit=submit, is_over=is_over, generated_tokens=num_tokens))


NOTHING = Replica(NotFound("nothing"))
SILENT = Replica(Unavailable("not connected"))
HANGING = Replica(DeadlineExceeded("Deadline Exceeded"))


def requests_by_id(*replicas: Replica) -> SchedulerCalls:
    return SchedulerCalls({str(position): cast(SchedulerLink, each) for position, each in enumerate(replicas)})


async def found(*replicas: Replica) -> int:
    """The position of the replica that is chosen."""
    return int((await requests_by_id(*replicas).find_durable("acme", "story")).address)


@pytest.mark.parametrize(
    ("replicas", "position"),
    [
        ((having(5), NOTHING), 0),
        ((NOTHING, SILENT, having(5)), 2),
        # Left behind by the first one, which hung, and served on by the second one.
        ((having(5), having(9)), 1),
        ((having(9), having(5)), 0),
        ((having(5, is_over=True), having(9, is_over=True)), 1),
        # What is over there, though nobody read it to its end, is not what the caller has the begin of.
        ((having(9, is_over=True), having(5)), 1),
    ],
)
async def test_the_replica_that_goes_on_with_a_request_is_found_before_one_that_it_has_left(replicas, position):
    assert await found(*replicas) == position


@pytest.mark.parametrize(
    ("replicas", "error"),
    [
        ((NOTHING, NOTHING), NotFound),
        ((NOTHING, SILENT), Unavailable),
        # Not the deadline of the caller, whose durable stream would end by it.
        ((NOTHING, HANGING), Unavailable),
    ],
)
async def test_what_no_replica_has_is_not_found_unless_one_could_not_be_asked(replicas, error):
    with pytest.raises(error):
        await found(*replicas)


async def test_a_cancellation_is_answered_by_the_first_replica_and_reaches_the_others_later(monkeypatch):
    monkeypatch.setattr("gateway.replicas.scheduler_calls._TIMEOUT_S", 300.0)
    hanging = having(5)
    hanging.answers = asyncio.Event()
    async with asyncio.timeout(60):
        await requests_by_id(hanging, having(5)).cancel("acme", "story")
    assert hanging.num_answered == 0
    hanging.answers.set()
    await until_true(lambda: hanging.num_answered == 1)
