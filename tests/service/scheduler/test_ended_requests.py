"""Requests that are ended from outside: by Cancel, with their tenant and id, or by an abort that asks for the cost."""

import grpc.aio
import pytest
from google.rpc import code_pb2

from quire.rpc.errors import NotFound, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    expected_tokens,
    make_submit,
    resubmit,
    until_state,
    wait_nothing_in_use,
)

LONG_GRACE_MS = 60_000
PROMPT_LEN = 40


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


async def test_only_the_request_of_that_tenant_and_id_ends_and_its_gateway_is_told(scheduler):
    stream = await started(scheduler, 7)
    await stream.submit(make_submit(8, tenant="a", max_tokens=40))
    await stream.submit(make_submit(9, tenant="b", max_tokens=40, request_id="request-7"))
    await assert_not_found(scheduler, "request-7", tenant="c")
    await cancel(scheduler, "request-7")
    await stream.read_until_over(7, 8, 9)
    assert_cancelled(stream, 7)
    assert stream.outputs[8] == expected_tokens(8, max_tokens=40)
    assert stream.outputs[9] == expected_tokens(9, max_tokens=40)
    await assert_not_found(scheduler, "request-7")
    stream.close()


async def test_the_same_id_at_two_gateways_ends_at_both(scheduler):
    first, second = [await started(scheduler, handle, f"gateway-{handle}") for handle in (1, 2)]
    await second.submit(make_submit(3, tenant="a", max_tokens=900, request_id="request-1"))
    await second.read()
    await cancel(scheduler, "request-1")
    await first.read_until_over(1)
    await second.read_until_over(3)
    assert_cancelled(first, 1)
    assert_cancelled(second, 3)
    assert 2 not in second.failed
    await second.abort(2)
    first.close()
    second.close()


@pytest.mark.parametrize("abort", [None, {}, {"sequence_index": 0}])
async def test_a_request_that_is_over_is_not_found(scheduler, worker, abort):
    stream = await started(scheduler, 7, max_tokens=8 if abort is None else 900)
    if abort is None:
        await stream.read_until_over(7)
    else:
        worker.hang.set()
        await stream.abort(7, **abort)
        await wait_nothing_in_use(scheduler)
    await assert_not_found(scheduler, "request-7")
    stream.close()


async def test_what_was_cancelled_while_its_gateway_was_away_does_not_come_back(scheduler, worker):
    first = await started(scheduler, 7)
    first.close()
    await until_state(scheduler, lambda state: state.connected_gateways == 0)
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
    await again.submit(make_submit(8, tenant="a", request_id="request-7"))
    await again.read_until_over(8)
    assert again.outputs[8] == expected_tokens(8)
    again.close()


async def started_with_cached_prompt(scheduler, **fields) -> GatewayStream:
    """Request 1 is under way, most of whose prompt another one has left in the cache."""
    stream, _ = await GatewayStream.open(scheduler)
    submit = make_submit(1, prompt_len=PROMPT_LEN, max_tokens=900, tenant="a", **fields)
    await stream.submit(make_submit(99, prompt_token_ids=submit.prompt_token_ids, max_tokens=1, tenant="a"))
    await stream.read_until_over(99)
    await stream.submit(submit)
    while len(stream.outputs[1]) < 3:
        await stream.read()
    return stream


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("sequence", [{}, {"sequence_index": 0}])
async def test_the_usage_of_what_was_aborted_comes_and_again_to_whoever_resumes_it(
    scheduler, worker, durable, sequence
):
    stream = await started_with_cached_prompt(scheduler, durable=durable)
    worker.hang.set()
    await stream.abort(1, wants_usage=True, **sequence)
    await stream.read_until_over(1)
    usage = stream.completed[1].usage
    assert usage.prompt_tokens == PROMPT_LEN
    assert usage.cached_tokens >= PROMPT_LEN // 2
    assert usage.generated_tokens >= 3
    assert usage.prefill_ms > 0
    assert usage.decode_ms > 0
    await wait_nothing_in_use(scheduler)
    if durable:
        await stream.resume(2, "request-1", tenant="a")
        await stream.read_until_over(2)
        assert stream.completed[2].usage == usage
    stream.close()


async def test_a_request_that_never_ran_has_waited(worker, tmp_path):
    async with attached_scheduler(tmp_path, worker.address, max_num_seqs=1) as scheduler:
        stream, _ = await GatewayStream.open(scheduler)
        await stream.submit(make_submit(1, max_tokens=900))
        await stream.read()
        await stream.submit(make_submit(2))
        await stream.read()
        await stream.abort(2, wants_usage=True)
        await stream.read_until_over(2)
        usage = stream.completed[2].usage
        assert usage.queue_ms > 0
        assert (usage.generated_tokens, usage.prefill_ms, usage.decode_ms) == (0, 0, 0)
        stream.close()


async def test_a_sequence_that_is_not_the_last_or_not_known_is_not_answered(stream):
    await stream.abort(8, sequence_index=0, wants_usage=True)
    await stream.submit(make_submit(1, max_tokens=60, n=2))
    await stream.read()
    await stream.abort(1, sequence_index=1, wants_usage=True)
    await stream.read_until_over(1)
    assert stream.ends[1].num_tokens == 60
    assert stream.completed.keys() == {1}
