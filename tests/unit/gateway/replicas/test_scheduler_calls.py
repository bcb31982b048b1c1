"""Calls to all schedulers where there is none, or one that is not connected."""

from collections.abc import Awaitable, Callable

import pytest

from gateway.replicas.link import SchedulerLink
from gateway.replicas.scheduler_calls import SchedulerCalls
from quire.rpc.errors import Unavailable
from quire.scheduler.v1 import scheduler_pb2


@pytest.mark.parametrize("call", [SchedulerCalls.find_durable, SchedulerCalls.cancel, SchedulerCalls.cancel_copies])
async def test_before_a_scheduler_is_known_nobody_says_that_a_request_is_not(
    call: Callable[[SchedulerCalls, str, str], Awaitable[object]],
) -> None:
    with pytest.raises(Unavailable) as failed:
        await call(SchedulerCalls({}), "tenant", "request")
    assert failed.value.reason == "NO_SCHEDULER"


async def test_a_replica_that_is_not_connected_is_not_said_to_be_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    away, there = (SchedulerLink.__new__(SchedulerLink) for _ in range(2))
    away.address, away._stub = "away:1", None
    woken: list[str] = []

    async def ask(method: str, *_: object) -> scheduler_pb2.WakeUpResponse:
        woken.append(method)
        return scheduler_pb2.WakeUpResponse()

    monkeypatch.setattr(there, "ask", ask)
    calls = SchedulerCalls({"away:1": away, "there:1": there})
    with pytest.raises(Unavailable, match="scheduler away:1 is not connected"):
        await calls.wake_up()
    assert woken == ["WakeUp"]
    await SchedulerCalls({"there:1": there}).wake_up()
