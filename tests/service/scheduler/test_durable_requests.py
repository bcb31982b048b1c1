"""Durable requests outlive the gateway that submitted them: handover, replay, expiry, limits."""

import grpc.aio
import pytest
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.rpc.errors import NotFound, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    running_scheduler,
    state_of,
    wait_attached,
    wait_nothing_in_use,
)


def durable_submit(handle: int, **fields) -> scheduler_pb2.Submit:
    return make_submit(handle, tenant="a", durable=True, **fields)


def resubmission(handle: int, **fields) -> scheduler_pb2.Submit:
    submit = durable_submit(handle, **fields)
    submit.resubmitted = True
    return submit


async def resume(stream: GatewayStream, handle: int, request_id: str, tenant: str = "a") -> None:
    stream.outputs[handle] = []
    message = scheduler_pb2.Resume(handle=handle, tenant=tenant, request_id=request_id)
    await stream.call.write(scheduler_pb2.ConnectRequest(resume=message))


async def test_another_gateway_gets_every_token_from_the_first_on(scheduler):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    await first.submit(durable_submit(7, max_tokens=60))
    await first.read()
    first.close()
    second, _ = await GatewayStream.open(scheduler, "gateway-b")
    await resume(second, 99, "request-7")
    await second.read_until_over(99)
    assert second.outputs[99] == expected_tokens(7, max_tokens=60)
    assert second.completed[99].usage.generated_tokens == 60
    second.close()


async def test_a_request_that_is_over_can_be_replayed_and_again(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(durable_submit(7))
    await stream.read_until_over(7)
    for handle in (8, 9):
        await resume(stream, handle, "request-7")
        await stream.read_until_over(handle)
        assert stream.outputs[handle] == expected_tokens(7)
    stream.close()


async def test_the_newer_reader_wins_and_the_older_is_told(scheduler, worker):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    second, _ = await GatewayStream.open(scheduler, "gateway-b")
    await first.submit(durable_submit(7, max_tokens=60))
    await first.read()
    worker.hang.set()
    await resume(second, 7, "request-7")
    await first.read_until_over(7)
    worker.hang.clear()
    assert (first.failed[7].code, first.failed[7].reason) == (code_pb2.ABORTED, "REQUEST_TAKEN_OVER")
    await second.read_until_over(7)
    assert second.outputs[7] == expected_tokens(7, max_tokens=60)
    first.close()
    second.close()


@pytest.mark.parametrize(("tenant", "request_id"), [("b", "request-7"), ("a", "request-8")])
async def test_a_request_that_is_not_the_tenants_is_not_found(scheduler, tenant, request_id):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(durable_submit(7))
    await stream.read_until_over(7)
    await resume(stream, 1, request_id, tenant)
    await stream.read_until_over(1)
    assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.NOT_FOUND, "REQUEST_NOT_FOUND")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.FindDurable(scheduler_pb2.FindDurableRequest(tenant=tenant, request_id=request_id))
    assert isinstance(from_rpc_error(caught.value), NotFound)
    stream.close()


async def test_without_a_reader_it_ends_after_the_grace_period(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, durable_grace=0.0) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(durable_submit(7, max_tokens=900))
        await stream.read()
        worker.hang.set()
        await stream.call.write(scheduler_pb2.ConnectRequest(detach=scheduler_pb2.Detach(handle=7)))
        await wait_nothing_in_use(stub)
        await resume(stream, 8, "request-7")
        await stream.read_until_over(8)
        assert stream.failed[8].code == code_pb2.NOT_FOUND
        stream.close()


async def test_a_cancelled_request_is_forgotten_and_its_reader_told(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(durable_submit(7, max_tokens=900))
    await stream.read()
    worker.hang.set()
    asked = scheduler_pb2.CancelRequest(tenant="a", request_id="request-7")
    await scheduler.Cancel(asked)
    await stream.read_until_over(7)
    assert stream.failed[7].code == code_pb2.CANCELLED
    await wait_nothing_in_use(scheduler)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await scheduler.Cancel(asked)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    stream.close()


@pytest.mark.parametrize("output", [None, common_pb2.OutputOptions(logprobs=1)])
async def test_what_was_cancelled_while_its_gateway_was_away_does_not_come_back(scheduler, worker, output):
    first, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
    await first.submit(durable_submit(7, max_tokens=900, output=output))
    await first.read()
    worker.hang.set()
    first.close()
    await scheduler.Cancel(scheduler_pb2.CancelRequest(tenant="a", request_id="request-7"))
    again, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
    await again.submit(resubmission(7, max_tokens=900, output=output, emitted=first.outputs[7]))
    await again.read_until_over(7)
    assert (again.failed[7].code, again.failed[7].reason) == (code_pb2.CANCELLED, "CANCELLED_BY_ID")
    await wait_nothing_in_use(scheduler)
    again.close()


async def test_a_new_request_under_an_id_that_was_cancelled_is_another_one(scheduler):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    await first.submit(durable_submit(7, max_tokens=900))
    await first.read()
    await scheduler.Cancel(scheduler_pb2.CancelRequest(tenant="a", request_id="request-7"))
    await first.read_until_over(7)
    del first.failed[7]
    await first.submit(durable_submit(7, max_tokens=60))
    await first.read()
    first.close()
    again, _ = await GatewayStream.open(scheduler, "gateway-a")
    await again.submit(resubmission(7, max_tokens=60))
    await again.read_until_over(7)
    assert again.outputs[7] == expected_tokens(7, max_tokens=60)
    again.close()


async def test_an_id_that_is_used_again_is_another_request_though_another_scheduler_had_it_first(scheduler):
    stream, _ = await GatewayStream.open(scheduler, "gateway-a")
    await stream.submit(durable_submit(7, max_tokens=10))
    await stream.read_until_over(7)
    del stream.completed[7]
    again = resubmission(7, max_tokens=30)
    again.nonce = 2
    await stream.submit(again)
    await stream.read_until_over(7)
    assert stream.outputs[7] == expected_tokens(7, max_tokens=30)
    stream.close()


async def test_what_is_over_makes_room_and_what_runs_does_not(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, max_durable_requests=1) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(durable_submit(1))
        await stream.read_until_over(1)
        await stream.submit(durable_submit(2, max_tokens=900))
        await stream.submit(durable_submit(3))
        await stream.read_until_over(3)
        assert (stream.failed[3].code, stream.failed[3].reason) == (code_pb2.RESOURCE_EXHAUSTED, "DURABLE_LIMIT")
        await resume(stream, 4, "request-1")
        await stream.read_until_over(4)
        assert stream.failed[4].code == code_pb2.NOT_FOUND
        stream.close()


async def test_a_gateway_that_connects_again_goes_on_by_submitting_again(scheduler):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    await first.submit(durable_submit(7, max_tokens=60))
    await first.read()
    first.close()
    again, _ = await GatewayStream.open(scheduler, "gateway-a")
    await again.submit(resubmission(7, max_tokens=60))
    await again.read_until_over(7)
    assert again.outputs[7] == expected_tokens(7, max_tokens=60)
    again.close()


async def test_one_that_is_submitted_again_with_log_probabilities_is_not_run_twice(scheduler):
    output = common_pb2.OutputOptions(logprobs=1)
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    await first.submit(durable_submit(7, max_tokens=150, output=output))
    await first.read()
    first.close()
    again, _ = await GatewayStream.open(scheduler, "gateway-a")
    await again.submit(resubmission(7, max_tokens=150, output=output, emitted=first.outputs[7]))
    await again.read()
    state = await state_of(scheduler)
    assert (state.running_requests, state.waiting_requests) == (1, 0)
    await again.read_until_over(7)
    assert again.outputs[7] == expected_tokens(7, max_tokens=150)
    assert len(first.logprobs[7]) + len(again.logprobs[7]) == 150
    again.close()
