"""Calls to all schedulers where there is none."""

from collections.abc import Awaitable, Callable

import pytest

from gateway.replicas.scheduler_calls import SchedulerCalls
from quire.rpc.errors import Unavailable


@pytest.mark.parametrize("call", [SchedulerCalls.find_durable, SchedulerCalls.cancel, SchedulerCalls.cancel_copies])
async def test_before_a_scheduler_is_known_nobody_says_that_a_request_is_not(
    call: Callable[[SchedulerCalls, str, str], Awaitable[object]],
) -> None:
    with pytest.raises(Unavailable) as failed:
        await call(SchedulerCalls({}), "tenant", "request")
    assert failed.value.reason == "NO_SCHEDULER"
