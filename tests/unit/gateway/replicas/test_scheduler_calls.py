"""Calls to all schedulers if there is none, or one that is not connected."""

from collections.abc import Awaitable, Callable

import pytest

from gateway.replicas.link import SchedulerLink
from gateway.replicas.scheduler_calls import SchedulerCalls
from quire.rpc.errors import QuireError, Unavailable, Unimplemented
from quire.scheduler.v1 import scheduler_pb2


@pytest.mark.parametrize("call", [SchedulerCalls.find_durable, SchedulerCalls.cancel, SchedulerCalls.cancel_copies])
async def test_before_a_scheduler_is_known_nobody_says_that_a_request_is_not(
    call: Callable[[SchedulerCalls, str, str], Awaitable[object]],
) -> None:
    with pytest.raises(Unavailable) as failed:
        await call(SchedulerCalls({}), "tenant", "request")
    assert failed.value.reason == "NO_SCHEDULER"


def make_link(address: str, outcomes: list[str] | None = None, error: QuireError | None = None) -> SchedulerLink:
    """A link that records calls, and answers or fails; without `outcomes` it is not connected."""
    link = SchedulerLink.__new__(SchedulerLink)
    link.address, link._stub, link.is_connected = address, None, outcomes is not None
    if outcomes is not None:

        async def ask(method: str, *_: object) -> scheduler_pb2.ResetPrefixCacheResponse:
            outcomes.append(method)
            if error is not None:
                raise error
            return scheduler_pb2.ResetPrefixCacheResponse(forgotten_blocks=3)

        vars(link)["ask"] = ask
    return link


def calls_to(*links: SchedulerLink) -> SchedulerCalls:
    return SchedulerCalls({link.address: link for link in links})


async def test_each_replica_that_can_be_reached_is_asked_and_those_that_cannot_are_named() -> None:
    asked: list[str] = []
    calls = calls_to(make_link("away:1"), make_link("there:1", asked), make_link("gone:1"))
    for ask in (lambda: calls.sleep(discard_weights=False), calls.wake_up, calls.reset_prefix_cache):
        with pytest.raises(Unavailable) as failed:
            await ask()
        assert failed.value.reason == "NO_SCHEDULER"
        told = str(failed.value)
        assert told == ("1 of 3 replicas did it; scheduler away:1 is not connected; scheduler gone:1 is not connected")
    assert asked == ["Sleep", "WakeUp", "ResetPrefixCache"]
    alone = calls_to(make_link("there:1", asked))
    await alone.sleep(discard_weights=True)
    await alone.wake_up()
    assert await alone.reset_prefix_cache() == 3
    for ask in (calls_to().wake_up, calls_to().reset_prefix_cache):
        with pytest.raises(Unavailable, match="no scheduler is known yet"):
            await ask()


async def test_a_refusal_counts_more_than_a_replica_that_is_away_and_names_its_own() -> None:
    refusal = Unimplemented("the KV pool is on cuda:0", reason="POOL_STAYS")
    with pytest.raises(Unimplemented) as failed:
        await calls_to(make_link("away:1"), make_link("there:1", [], refusal)).sleep(discard_weights=False)
    assert failed.value.reason == "POOL_STAYS"
    assert str(failed.value) == (
        "0 of 2 replicas did it; scheduler away:1 is not connected; scheduler there:1: the KV pool is on cuda:0"
    )
    with pytest.raises(Unimplemented, match=r"^the KV pool is on cuda:0$"):
        await calls_to(make_link("there:1", [], refusal)).sleep(discard_weights=False)
