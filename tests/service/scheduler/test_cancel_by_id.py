"""Cancel ends a request by its tenant and id, whichever gateway submitted it."""

import grpc.aio
import pytest
from google.rpc import code_pb2

from quire.rpc.errors import NotFound, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    resubmit,
    state_of,
    until,
    wait_nothing_in_use,
)

LONG_GRACE_MS = 60_000


async def cancel(scheduler: scheduler_pb2_grpc.SchedulerServiceStub, request_id: str, tenant: str = "a") -> None:
    await scheduler.Cancel(scheduler_pb2.CancelRequest(tenant=tenant, request_id=request_id), timeout=30)


async def assert_not_found(
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub, request_id: str, tenant: str = "a"
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cancel(scheduler, request_id, tenant)
    error = from_rpc_error(caught.value)
    assert isinstance(error, NotFound)
    assert error.reason == "REQUEST_NOT_FOUND"


def assert_cancelled(stream: GatewayStream, handle: int) -> None:
    assert (stream.failed[handle].code, stream.failed[handle].reason) == (code_pb2.CANCELLED, "CANCELLED_BY_ID")


async def started(scheduler, handle: int, gateway_id: str = "gateway-a", **fields) -> GatewayStream:
    """A gateway's stream with one request under way."""
    stream, _ = await GatewayStream.open(scheduler, gateway_id, grace_period_ms=LONG_GRACE_MS)
    await stream.submit(make_submit(handle, **{"tenant": "a", "max_tokens": 900} | fields))
    await stream.read()
    return stream


async def test_a_running_request_ends_and_its_gateway_is_told(scheduler, worker):
    stream = await started(scheduler, 7)
    worker.hang.set()
    await cancel(scheduler, "request-7")
    await stream.read_until_over(7)
    assert_cancelled(stream, 7)
    await wait_nothing_in_use(scheduler)
    await assert_not_found(scheduler, "request-7")
    stream.close()


async def test_only_the_request_of_that_tenant_and_id_ends(scheduler):
    stream = await started(scheduler, 7)
    await stream.submit(make_submit(8, tenant="a", max_tokens=40))
    other = make_submit(9, tenant="b", max_tokens=40)
    other.request_id = "request-7"
    await stream.submit(other)
    await assert_not_found(scheduler, "request-7", tenant="c")
    await cancel(scheduler, "request-7")
    await stream.read_until_over(7, 8, 9)
    assert_cancelled(stream, 7)
    assert stream.outputs[8] == expected_tokens(8, max_tokens=40)
    assert stream.outputs[9] == expected_tokens(9, max_tokens=40)
    stream.close()


async def test_a_request_that_waits_can_be_cancelled(worker, scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await worker.stop()

    async def is_lost() -> bool:
        return not (await state_of(scheduler)).workers[0].attached

    await until(is_lost)
    await stream.submit(make_submit(7, tenant="a"))

    async def waits() -> bool:
        return (await state_of(scheduler)).waiting_requests == 1

    await until(waits)
    await cancel(scheduler, "request-7")
    await stream.read_until_over(7)
    assert_cancelled(stream, 7)
    stream.close()


async def test_the_same_id_at_two_gateways_ends_at_both(scheduler):
    streams = [await started(scheduler, handle, f"gateway-{handle}", max_tokens=900) for handle in (1, 2)]
    third = make_submit(3, tenant="a", max_tokens=900)
    third.request_id = "request-1"
    await streams[1].submit(third)
    await streams[1].read()
    await cancel(scheduler, "request-1")
    await streams[0].read_until_over(1)
    await streams[1].read_until_over(3)
    assert_cancelled(streams[0], 1)
    assert_cancelled(streams[1], 3)
    assert 2 not in streams[1].failed
    await streams[1].abort(2)
    for stream in streams:
        stream.close()


@pytest.mark.parametrize("ending", ["complete", "aborted", "last sequence aborted"])
async def test_a_request_that_is_over_is_not_found(scheduler, worker, ending):
    stream = await started(scheduler, 7, max_tokens=8 if ending == "complete" else 900)
    if ending == "complete":
        await stream.read_until_over(7)
    else:
        worker.hang.set()
        index = 0 if ending == "last sequence aborted" else None
        abort = scheduler_pb2.Abort(handle=7, sequence_index=index)
        await stream.call.write(scheduler_pb2.ConnectRequest(abort=abort))
        await wait_nothing_in_use(scheduler)
    await assert_not_found(scheduler, "request-7")
    stream.close()


async def test_what_was_cancelled_while_its_gateway_was_away_does_not_come_back(scheduler, worker):
    first = await started(scheduler, 7)
    first.close()

    async def is_gone() -> bool:
        return (await state_of(scheduler)).connected_gateways == 0

    await until(is_gone)
    worker.hang.set()
    await cancel(scheduler, "request-7")
    await wait_nothing_in_use(scheduler)
    worker.hang.clear()
    again, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=LONG_GRACE_MS)
    await again.submit(resubmit(first, 7, tenant="a", max_tokens=900))
    await again.read_until_over(7)
    assert_cancelled(again, 7)
    await assert_not_found(scheduler, "request-7")
    # For another request the id is free again.
    reused = make_submit(8, tenant="a")
    reused.request_id = "request-7"
    await again.submit(reused)
    await again.read_until_over(8)
    assert again.outputs[8] == expected_tokens(8)
    again.close()


async def test_the_handle_of_a_request_that_was_cancelled_serves_another(scheduler):
    stream = await started(scheduler, 7)
    await cancel(scheduler, "request-7")
    await stream.read_until_over(7)
    assert_cancelled(stream, 7)
    stream.failed.clear()
    other = make_submit(7, tenant="a")
    other.request_id = "request-8"
    await stream.submit(other)
    await stream.read_until_over(7)
    assert stream.outputs[7] == expected_tokens(7)
    stream.close()


async def test_an_id_that_no_request_has_is_not_found(scheduler):
    for request_id in ("", "request-7", "x" * 100_000):
        await assert_not_found(scheduler, request_id)
