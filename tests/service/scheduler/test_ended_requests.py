"""Requests that are ended from outside: by Cancel, with tenant and id, or by an abort that requests the usage."""

import grpc.aio
import pytest
from google.rpc import code_pb2

from quire.rpc.errors import NotFound, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    until_state,
    wait_nothing_in_use,
)

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


async def test_requests_of_that_tenant_and_id_end_at_all_gateways_and_these_are_told(scheduler):
    first, second = [(await GatewayStream.open(scheduler, f"gateway-{name}"))[0] for name in "ab"]
    await first.submit(make_submit(7, tenant="a", max_tokens=900))
    await first.submit(make_submit(8, tenant="a", max_tokens=40))
    await first.submit(make_submit(9, tenant="b", max_tokens=40, request_id="request-7"))
    await second.submit(make_submit(3, tenant="a", max_tokens=900, request_id="request-7"))
    await first.read()
    await second.read()
    await assert_not_found(scheduler, "request-7", tenant="c")
    await cancel(scheduler, "request-7")
    await first.read_until_over(7, 8, 9)
    await second.read_until_over(3)
    for stream, handle in ((first, 7), (second, 3)):
        assert (stream.failed[handle].code, stream.failed[handle].reason) == (code_pb2.CANCELLED, "CANCELLED_BY_ID")
    for handle in (8, 9):
        assert first.outputs[handle] == expected_tokens(handle, max_tokens=40)
    for over in ("request-7", "request-8"):
        await assert_not_found(scheduler, over)
    first.close()
    second.close()


@pytest.mark.parametrize("sequence", [{}, {"sequence_index": 0}])
async def test_the_usage_of_what_was_aborted_comes_and_again_to_whoever_resumes_it(scheduler, stream, worker, sequence):
    submit = make_submit(1, prompt_len=PROMPT_LEN, max_tokens=900, tenant="a", durable=True)
    # Most of its prompt is in the cache.
    await stream.submit(make_submit(99, prompt_token_ids=submit.prompt_token_ids, max_tokens=1, tenant="a"))
    await stream.read_until_over(99)
    await stream.submit(submit)
    while len(stream.outputs[1]) < 3:
        await stream.read()
    worker.hang.set()
    await stream.submit(make_submit(5))
    await until_state(scheduler, lambda state: state.waiting_requests + state.running_requests == 2)
    await stream.abort(5, wants_usage=True)
    await stream.abort(1, wants_usage=True, **sequence)
    await stream.read_until_over(1, 5)
    usage = stream.completed[1].usage
    assert usage.prompt_tokens == PROMPT_LEN
    assert usage.cached_tokens >= PROMPT_LEN // 2
    assert usage.generated_tokens >= 3
    assert usage.prefill_ms > 0
    assert usage.decode_ms > 0
    # The other request has never had a token.
    usage_of_other = stream.completed[5].usage
    assert usage_of_other.queue_ms + usage_of_other.prefill_ms > 0
    assert (usage_of_other.generated_tokens, usage_of_other.decode_ms) == (0, 0)
    await wait_nothing_in_use(scheduler)
    await stream.resume(2, "request-1", tenant="a")
    await stream.read_until_over(2)
    assert stream.completed[2].usage == usage
