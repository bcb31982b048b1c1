"""The scheduler service if gateways and workers leave, hang, come back, are slow, or send nonsense."""

import asyncio
import contextlib
import dataclasses

import grpc
import pytest

from quire.runtime.settings import ConfigurationError
from quire.worker.v1 import worker_pb2
from scheduler_svc.service import scheduler_servicer as servicer
from scheduler_svc.service import worker_messages
from scheduler_svc.service.worker_messages import StepAnswer, step_answer
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    resubmit,
    scheduler_task,
    state_of,
    until_state,
    wait_attached,
)


async def test_a_worker_that_answers_for_other_rows_than_were_asked_is_lost(scheduler, stream, monkeypatch):
    turned: list[StepAnswer] = []

    def turn_one_around(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
        answer = step_answer(message, vocab_size)
        if turned or len(answer.rows) < 2:
            return answer
        turned.append(dataclasses.replace(answer, rows=answer.rows[::-1]))
        return turned[0]

    monkeypatch.setattr(worker_messages, "step_answer", turn_one_around)
    first_epoch = (await state_of(scheduler)).scheduler_epoch
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=60))
    await stream.read_until_over(1, 2)
    assert turned
    assert (await state_of(scheduler)).scheduler_epoch > first_epoch
    for handle in (1, 2):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=60)


async def test_the_older_of_two_schedulers_at_one_worker_ends_and_the_newer_one_keeps_it(worker, tmp_path):
    """Two schedulers may have the same address in --workers: if they took turns, neither would finish a step. The
    older one also ends if it drains."""
    async with contextlib.AsyncExitStack() as stack:
        task = await stack.enter_async_context(scheduler_task(str(tmp_path / "0"), worker.address))
        for number, drains in ((1, False), (2, True)):
            stub, older = task
            await wait_attached(stub)
            if drains:
                worker.hang.set()
                stream, _ = await GatewayStream.open(stub)
                await stream.submit(make_submit(1))
                await until_state(stub, lambda state: state.running_requests)
                older.cancel()
            service = scheduler_task(str(tmp_path / str(number)), worker.address, drain_timeout=3600.0)
            task = await stack.enter_async_context(service)
            worker.hang.clear()
            async with asyncio.timeout(60):
                with pytest.raises((ConfigurationError, asyncio.CancelledError)) as raised:
                    await older
            if not drains:
                assert isinstance(raised.value, ConfigurationError)
                assert f"worker {worker.address}" in str(raised.value)
                assert "the newer one keeps it" in str(raised.value)
        newest, _ = task
        await wait_attached(newest)
        stream, _ = await GatewayStream.open(newest)
        await stream.submit(make_submit(1, max_tokens=60))
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=60)
        stream.close()


@pytest.mark.parametrize("fault", ["cannot be made", "cannot be serialized"])
async def test_a_stream_whose_events_cannot_be_written_ends_and_the_next_one_goes_on(scheduler, monkeypatch, fault):
    stream, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)

    def gateway_messages(outgoing):
        yield 1 / 0 if fault == "cannot be made" else "no message"

    with monkeypatch.context() as patched:
        patched.setattr(servicer, "gateway_messages", gateway_messages)
        await stream.submit(make_submit(1, max_tokens=30))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read_to_end()
    await until_state(scheduler, lambda state: state.connected_gateways == 0)
    again, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await again.submit(resubmit(stream, 1, max_tokens=30))
    await again.read_until_over(1)
    assert again.outputs[1] == expected_tokens(1, max_tokens=30)
    again.close()
