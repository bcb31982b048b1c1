"""PinPrefix and UnpinPrefix over gRPC."""

import asyncio

import grpc
import grpc.aio
import pytest

from quire.arrays import encode_int32
from quire.rpc.errors import from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorkerConfig
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    make_submit,
    state_of,
    until,
    until_state,
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


async def until_asked(stub) -> None:
    """Returns once a pin is being computed."""
    await until_state(stub, lambda state: state.running_requests == 1)


async def assert_refused(call, code, reason, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (code, reason)
    assert message in error.message


async def test_a_pinned_prefix_is_hit_by_the_first_request(scheduler):
    prompt = [*range(50)]
    answer = await pin(scheduler, prompt)
    assert (answer.pinned_tokens, answer.pinned_blocks) == (48, 3)
    assert await num_pinned(scheduler) == 3
    stream, _ = await GatewayStream.open(scheduler)
    submit = make_submit(1)
    submit.prompt_token_ids = encode_int32(prompt)
    await stream.submit(submit)
    await stream.read_until_over(1)
    assert stream.completed[1].usage.cached_tokens == 48
    stream.close()
    await unpin(scheduler, answer.pin_id)
    assert await num_pinned(scheduler) == 0


async def test_several_callers_wait_for_one_pin_and_one_may_leave(scheduler, worker):
    worker.hang.set()
    callers = [asyncio.create_task(pin(scheduler, range(64))) for _ in range(3)]

    await until_asked(scheduler)
    callers.pop().cancel()
    worker.hang.clear()
    first, second = await asyncio.gather(*callers)
    assert first == second
    assert await num_pinned(scheduler) == 4
    await unpin(scheduler, first.pin_id)


async def test_the_time_passes_while_the_scheduler_is_idle(scheduler):
    await pin(scheduler, range(32))
    # Its blocks are there; pinning it again only starts its time anew.
    await pin(scheduler, range(32), time_to_live_ms=1)

    async def is_over() -> bool:
        return await num_pinned(scheduler) == 0

    await until(is_over)


async def test_refusals_say_what_and_why(scheduler):
    code = grpc.StatusCode
    await assert_refused(
        pin(scheduler, range(15)), code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "it takes 16 to fill a block"
    )
    await assert_refused(
        pin(scheduler, range(32), time_to_live_ms=0), code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "time_to_live_ms is 0"
    )
    await assert_refused(pin(scheduler, [1000] * 32), code.INVALID_ARGUMENT, "INVALID_ARGUMENT", "token_ids")
    await assert_refused(
        pin(scheduler, [5] * 1024), code.INVALID_ARGUMENT, "NEVER_FITS", "a sequence can have at most 1024"
    )
    await assert_refused(unpin(scheduler, "no-such-pin"), code.NOT_FOUND, "PIN_NOT_FOUND", "no-such-pin")
    answer = await pin(scheduler, range(32), tenant="a")
    await assert_refused(unpin(scheduler, answer.pin_id, tenant="b"), code.NOT_FOUND, "PIN_NOT_FOUND", answer.pin_id)
    await unpin(scheduler, answer.pin_id, tenant="a")


async def test_the_quota_is_a_status_of_its_own(worker, tmp_path):
    worker.config = FakeWorkerConfig(num_blocks=32)
    async with attached_scheduler(tmp_path, worker.address, pin_quota=0.1) as stub:
        await pin(stub, [1] * 32)
        await assert_refused(pin(stub, [2] * 32), grpc.StatusCode.RESOURCE_EXHAUSTED, "PIN_QUOTA", "a tenant can pin 3")


async def test_a_caller_waits_on_while_its_worker_is_lost(worker, tmp_path):
    async with attached_scheduler(tmp_path, worker.address, step_timeout=0.3) as stub:
        worker.hang.set()
        caller = asyncio.create_task(pin(stub, range(48)))
        await until_asked(stub)
        epoch = (await state_of(stub)).scheduler_epoch
        await until_state(stub, lambda state: state.scheduler_epoch > epoch)
        assert not caller.done()
        worker.hang.clear()
        assert (await caller).pinned_blocks == 3
        assert await num_pinned(stub) == 3


async def test_a_caller_is_told_when_its_pin_ends_before_it_is_computed(scheduler, worker):
    code = grpc.StatusCode.UNAVAILABLE
    worker.hang.set()
    await assert_refused(
        pin(scheduler, range(32), time_to_live_ms=50), code, "PIN_LOST", "ended before its blocks were computed"
    )
    worker.hang.clear()
    assert await num_pinned(scheduler) == 0


async def test_a_pin_whose_logits_are_not_finite_ends(worker, tmp_path):
    # Pins are computed with the seed 0.
    worker.config = FakeWorkerConfig(failing_seeds=frozenset([0]))
    async with attached_scheduler(tmp_path, worker.address) as stub:
        await assert_refused(pin(stub, range(32)), grpc.StatusCode.UNAVAILABLE, "PIN_LOST", "ended before its blocks")
        await wait_nothing_in_use(stub)
