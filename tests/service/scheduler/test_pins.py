"""PinPrefix and UnpinPrefix over gRPC."""

import grpc
import grpc.aio
import pytest

from quire.messages.arrays import encode_int32
from quire.rpc.errors import from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    make_submit,
    state_of,
    wait_nothing_in_use,
)


async def pin(stub, token_ids, *, tenant="", time_to_live_ms=60_000):
    return await stub.PinPrefix(
        scheduler_pb2.PinPrefixRequest(
            tenant=tenant, token_ids=encode_int32(token_ids), time_to_live_ms=time_to_live_ms
        )
    )


async def unpin(stub, pin_id, *, tenant=""):
    return await stub.UnpinPrefix(scheduler_pb2.UnpinPrefixRequest(tenant=tenant, pin_id=pin_id))


async def num_pinned(stub) -> int:
    return (await state_of(stub)).gpu_pool.pinned_blocks


async def assert_refused(call, code, reason, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (code, reason)
    assert message in error.message


async def test_refusals_say_what_and_why(worker, tmp_path):
    # Pins are computed with seed 0.
    worker.config = FakeWorkerConfig(num_blocks=128, failing_seeds=frozenset([0]))
    invalid, not_found, lost = (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAVAILABLE,
    )
    async with attached_scheduler(tmp_path, worker.address, pin_quota=0.5, max_pinned=0.5) as stub:
        for call, *expected in (
            (pin(stub, range(15)), invalid, "INVALID_ARGUMENT", "it takes 16 to fill a block"),
            (pin(stub, range(32), time_to_live_ms=0), invalid, "INVALID_ARGUMENT", "time_to_live_ms is 0"),
            (pin(stub, [1000] * 32), invalid, "INVALID_ARGUMENT", "token_ids"),
            (pin(stub, [5] * 1024), invalid, "NEVER_FITS", "a sequence can have at most 1024"),
            (unpin(stub, "no-such-pin"), not_found, "PIN_NOT_FOUND", "no-such-pin"),
            (pin(stub, range(32)), lost, "PIN_LOST", "ended before its blocks were computed"),
        ):
            await assert_refused(call, *expected)
        # A prefix that a request has left in the cache is pinned at once.
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, prompt_token_ids=encode_int32(range(33)), tenant="a"))
        await stream.read_until_over(1)
        answer = await pin(stub, range(32), tenant="a")
        quota = pin(stub, [1] * 1008, tenant="a")
        await assert_refused(quota, grpc.StatusCode.RESOURCE_EXHAUSTED, "PIN_QUOTA", "a tenant can pin 64")
        await assert_refused(unpin(stub, answer.pin_id, tenant="b"), not_found, "PIN_NOT_FOUND", answer.pin_id)
        await unpin(stub, answer.pin_id, tenant="a")
        worker.hang.set()
        await assert_refused(
            pin(stub, [7] * 32, time_to_live_ms=50), lost, "PIN_LOST", "ended before its blocks were computed"
        )
        worker.hang.clear()
        assert await num_pinned(stub) == 0
        await wait_nothing_in_use(stub)
        stream.close()
