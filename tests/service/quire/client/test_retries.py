"""Both clients against a gateway that fails the first calls: calls that are retried, and errors for the caller."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from quire.client import AsyncClient, Client, RetryPolicy, TokenChunk
from quire.rpc.errors import Cancelled, QuireError, ResourceExhausted, Unavailable
from quire.testing import free_port
from tests.support.either_client import EitherClient
from tests.support.fake_gateway import FakeGeneration, start_fake_gateway
from tests.support.processes import until_true

FULL = ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_ms=20)
GONE = Unavailable("about to stop", reason="DRAINING", retry_after_ms=20)
PATIENT = RetryPolicy(first_delay_s=0.01, last_delay_s=0.02)

pytestmark = pytest.mark.parametrize("kind", [Client, AsyncClient])


@contextlib.asynccontextmanager
async def calling(
    kind: type[Client] | type[AsyncClient], *errors: QuireError, retry: RetryPolicy | None = None
) -> AsyncIterator[tuple[EitherClient, FakeGeneration]]:
    """A client of a gateway that raises these errors first."""
    generation = FakeGeneration(*errors)
    server = await start_fake_gateway("127.0.0.1:0", generation)
    client = EitherClient(kind(server.address, retry=retry))
    try:
        yield client, generation
    finally:
        await client.close()
        await server.stop(0)


async def test_an_idempotent_call_is_made_four_times_and_more_often_by_a_policy(kind) -> None:
    async with calling(kind, *[GONE] * 3) as (client, generation):
        assert (await client.call("tokenize", "hi", timeout_s=60)).token_ids == (104, 105)
    assert len(generation.requests) == 4
    async with calling(kind, *[GONE] * 5) as (client, generation):
        with pytest.raises(Unavailable, match="about to stop") as caught:
            await client.call("tokenize", "hi", timeout_s=60)
    assert caught.value.reason == "DRAINING"
    assert len(generation.requests) == 4
    async with calling(kind, *[GONE] * 5, retry=PATIENT) as (client, generation):
        assert (await client.call("tokenize", "hi", timeout_s=60)).token_ids == (104, 105)
    assert len(generation.requests) == 6


@pytest.mark.parametrize("num_gateways", [1, 2])
async def test_a_generation_that_reached_nobody_is_made_again_by_a_policy_and_given_up_where_nobody_comes(
    kind, num_gateways: int
) -> None:
    """gRPC's message differs if there are several gateways."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(num_gateways)]
    impatient = EitherClient(kind(addresses, retry=RetryPolicy(attempts=None, first_delay_s=0.001)))
    with pytest.raises(Unavailable):
        await impatient.call("generate", "hi", timeout_s=60)
    patient = EitherClient(kind(addresses, retry=RetryPolicy(attempts=None, first_delay_s=1.0)))
    asking = asyncio.create_task(patient.call("generate", "hi", timeout_s=60))
    await asyncio.sleep(0.2)
    generation = FakeGeneration()
    server = await start_fake_gateway(addresses[0], generation)
    assert (await asking).text == "hi!"
    assert len(generation.requests) == 1
    for client in (impatient, patient):
        await client.close()
    await server.stop(0)


async def test_with_a_policy_a_refused_call_comes_back(kind) -> None:
    async with calling(kind, FULL, FULL, retry=PATIENT) as (client, generation):
        assert (await client.call("generate", "hi", timeout_s=60)).text == "hi!"
        assert len(generation.requests) == 3
    async with calling(kind, FULL, FULL, retry=PATIENT) as (client, generation):
        events = await client.events("one two", durable=True, timeout_s=60)
        assert [event.text for event in events if isinstance(event, TokenChunk)] == ["one ", "two!"]
        assert len(generation.requests) == 3


@pytest.mark.parametrize("method", ["generate", "events"])
async def test_closing_the_client_ends_the_wait_of_every_call_with_cancelled(kind, method: str) -> None:
    late = ResourceExhausted("the queue is full", retry_after_ms=60_000)
    async with calling(kind, late, retry=RetryPolicy()) as (client, generation):
        call = client.events("hi") if method == "events" else client.call(method, "hi")
        asking = asyncio.create_task(call)
        async with asyncio.timeout(30):
            await generation.called.wait()
            await until_true(lambda: len(generation.requests) == 1)
            await client.close()
            with pytest.raises(Cancelled):
                await asking
    assert len(generation.requests) == 1


async def test_a_call_that_waits_makes_no_other_one_while_its_client_is_being_closed(kind) -> None:
    late = ResourceExhausted("the queue is full", retry_after_ms=60_000)
    async with calling(kind, late, retry=RetryPolicy()) as (client, generation):
        asking = asyncio.create_task(client.call("generate", "hi"))
        async with asyncio.timeout(30):
            await until_true(lambda: len(generation.requests) == 1)
            # Its channel is still open.
            client.client._is_closed.set()
            with pytest.raises(Cancelled, match="the client was closed"):
                await asking
    assert len(generation.requests) == 1


async def test_every_call_of_a_closed_client_is_cancelled(kind) -> None:
    async with calling(kind) as (client, generation):
        await client.close()
        calls = client.call("tokenize", "hi"), client.call("generate", "hi")
        for call in (*calls, client.events("hi"), client.events("hi", durable=True)):
            with pytest.raises(Cancelled, match="the client was closed"):
                await call
    assert len(generation.requests) == 0
