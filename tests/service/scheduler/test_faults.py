"""The scheduler service when gateways and workers leave, hang, come back, or are slow."""

import asyncio
import contextlib
import dataclasses
import math
import time
from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from quire.common.v1 import common_pb2
from quire.rpc.errors import invalid_field
from quire.scheduler.v1 import scheduler_pb2
from quire.settings import ConfigurationError
from quire.worker.v1 import worker_pb2
from scheduler_svc.service import servicer, worker_link
from scheduler_svc.service.worker_link import WorkerLink, WorkerLostError
from scheduler_svc.service.worker_messages import StepAnswer, step_answer
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.sampling import make_row_sampling
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    expected_tokens,
    make_submit,
    resubmit,
    running_scheduler,
    scheduler_task,
    state_of,
    until_state,
    wait_attached,
    wait_nothing_in_use,
)
from worker_svc.protocol.stream import Worker
from worker_svc.step import AdmittedStep, Step


async def test_a_poisoned_request_fails_alone(worker, tmp_path):
    worker.config = FakeWorkerConfig(failing_seeds=frozenset([1]))
    async with attached_scheduler(tmp_path, worker.address) as stub:
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1))
        await stream.submit(make_submit(2))
        await stream.read_until_over(1, 2)
        assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "NON_FINITE_LOGITS")
        assert stream.outputs[2] == expected_tokens(2)
        await wait_nothing_in_use(stub)
        stream.close()


async def test_a_worker_whose_steps_have_fewer_tokens_than_it_has_rows_serves(tmp_path):
    worker = FakeWorker(FakeWorkerConfig(max_num_rows=256, max_num_batched_tokens=16))
    async with attached_scheduler(tmp_path, await worker.start()) as stub:
        stream, _ = await GatewayStream.open(stub)
        for handle in range(1, 25):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(*range(1, 25))
        for handle in range(1, 25):
            assert stream.outputs[handle] == expected_tokens(handle)
        stream.close()
    await worker.stop()


async def test_a_worker_that_answers_for_other_rows_than_were_asked_is_lost(scheduler, stream, monkeypatch):
    turned: list[StepAnswer] = []

    def turn_one_around(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
        answer = step_answer(message, vocab_size)
        if turned or len(answer.rows) < 2:
            return answer
        turned.append(dataclasses.replace(answer, rows=answer.rows[::-1]))
        return turned[0]

    monkeypatch.setattr(worker_link, "step_answer", turn_one_around)
    first_epoch = (await state_of(scheduler)).scheduler_epoch
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=60))
    await stream.read_until_over(1, 2)
    assert turned
    assert (await state_of(scheduler)).scheduler_epoch > first_epoch
    for handle in (1, 2):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=60)


async def test_a_silent_worker_is_lost(monkeypatch):
    monkeypatch.setattr(worker_link, "_CHECK_INTERVAL_S", 0.02)
    worker = FakeWorker(heartbeat_interval_s=60.0)
    link = await WorkerLink.attach(await worker.start(), epoch=1, timeout_s=60.0)
    with pytest.raises(WorkerLostError, match="has been silent"):
        await asyncio.wait_for(link.receive(), 30)
    await link.close()
    await worker.stop()


async def test_a_pause_of_the_scheduler_is_not_the_workers_silence(monkeypatch):
    monkeypatch.setattr(worker_link, "_CHECK_INTERVAL_S", 0.02)
    worker = FakeWorker(heartbeat_interval_s=0.01)
    link = await WorkerLink.attach(await worker.start(), epoch=1, timeout_s=60.0)
    for _ in range(3):
        time.sleep(0.5)  # noqa: ASYNC251 (the whole process stands still)
        for _ in range(20):
            assert await link.receive() is None
    await link.close()
    await worker.stop()


async def test_a_constraint_that_the_worker_never_compiles_fails_its_requests_and_disturbs_no_other(tmp_path):
    worker = FakeWorker(heartbeat_interval_s=0.02)
    answers = [Future[None](), None, None]
    compiled = iter(answers)
    worker.prepare = lambda row_sampling: next(compiled)
    async with attached_scheduler(tmp_path, await worker.start(), step_timeout=0.3) as stub:
        epoch = (await state_of(stub)).scheduler_epoch
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, has_constraint=True))
        other = make_row_sampling(temperature=0.5)
        await stream.submit(make_submit(2, has_constraint=True, row_sampling=other, max_tokens=60))
        await stream.submit(make_submit(3, max_tokens=60))
        await stream.read_until_over(1, 2, 3)
        assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "CONSTRAINT_TIMEOUT")
        for handle in (2, 3):
            assert stream.outputs[handle] == expected_tokens(handle, max_tokens=60)
        # The answer that nobody waits for any more.
        assert answers[0] is not None
        answers[0].set_result(None)
        await stream.submit(make_submit(4, has_constraint=True))
        await stream.read_until_over(4)
        assert stream.outputs[4] == expected_tokens(4)
        assert (await state_of(stub)).scheduler_epoch == epoch
        stream.close()
    await worker.stop()


async def test_the_older_of_two_schedulers_at_one_worker_ends_and_the_newer_one_keeps_it(worker, tmp_path):
    """As where one address is in the --workers of both: neither would finish a step if they took it in turns."""
    async with contextlib.AsyncExitStack() as stack:
        service = scheduler_task(str(tmp_path / "older.sock"), worker.address)
        stub, older = await stack.enter_async_context(service)
        await wait_attached(stub)
        service = running_scheduler(str(tmp_path / "newer.sock"), worker.address)
        newer = await stack.enter_async_context(service)
        async with asyncio.timeout(60):
            with pytest.raises(ConfigurationError, match="the newer one keeps it") as raised:
                await older
        assert worker.address in str(raised.value)
        await wait_attached(newer)
        first_epoch = (await state_of(newer)).scheduler_epoch
        stream, _ = await GatewayStream.open(newer)
        await stream.submit(make_submit(1, max_tokens=60))
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=60)
        assert (await state_of(newer)).scheduler_epoch == first_epoch
        stream.close()


async def test_a_scheduler_that_drains_ends_at_once_where_a_newer_one_has_its_worker(worker, tmp_path):
    async with scheduler_task(str(tmp_path / "older.sock"), worker.address, drain_timeout=3600.0) as (stub, older):
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        worker.hang.set()
        await stream.submit(make_submit(1))
        async with asyncio.timeout(60):
            while not (await state_of(stub)).running_requests:
                pass
            older.cancel()
            async with running_scheduler(str(tmp_path / "newer.sock"), worker.address):
                worker.hang.clear()
                with pytest.raises(asyncio.CancelledError):
                    await older
        stream.close()


async def test_a_gateway_that_does_not_read_holds_up_no_step_and_gets_everything_later(scheduler):
    slow, _ = await GatewayStream.open(scheduler, "gateway-slow")
    quick, _ = await GatewayStream.open(scheduler, "gateway-quick")
    for handle in range(1, 65):
        await slow.submit(make_submit(handle, max_tokens=100))
    await quick.submit(make_submit(1, max_tokens=100))
    await quick.read_until_over(1)
    await wait_nothing_in_use(scheduler)
    assert not any(slow.outputs.values())
    await slow.read_until_over(*range(1, 65))
    assert slow.outputs == {handle: expected_tokens(handle, max_tokens=100) for handle in range(1, 65)}
    slow.close()
    quick.close()


async def test_gateways_are_told_when_the_worker_is_lost_and_when_it_is_back(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler, "gateway-a")
    await worker.stop()
    await stream.read()
    assert stream.readiness == [False]
    late, _ = await GatewayStream.open(scheduler, "gateway-b")
    await late.read()
    assert late.readiness == [False]
    await worker.restart()
    await stream.read()
    await late.read()
    assert stream.readiness == late.readiness == [False, True]
    stream.close()
    late.close()


REFUSED_LEN = 7


def make_refused(handle: int) -> scheduler_pb2.Submit:
    """A submission whose steps a worker refuses that is picky."""
    return make_submit(handle, prompt_len=REFUSED_LEN)


@pytest.fixture
def _picky(monkeypatch):
    def admit(self: Worker, step: Step) -> AdmittedStep:
        if any(each.num_prompt_tokens == REFUSED_LEN for each in step.row_changes.assign):
            raise invalid_field("assign", "has a prompt that this worker does not like")
        return admit_any(self, step)

    admit_any = Worker.admit
    monkeypatch.setattr(Worker, "admit", admit)


@pytest.mark.usefixtures("_picky")
async def test_a_worker_that_refuses_every_step_is_attached_at_growing_intervals(scheduler, stream):
    first_epoch, started = (await state_of(scheduler)).scheduler_epoch, time.monotonic()
    for handle in (1, 2, 3):
        await stream.submit(make_refused(handle))
    await stream.read_until_over(1, 2, 3)
    assert time.monotonic() - started >= 0.05 + 0.1 + 0.2
    await stream.submit(make_submit(4))
    await stream.read_until_over(4)
    assert stream.outputs[4] == expected_tokens(4)
    # None of them was refused more than twice.
    assert (await state_of(scheduler)).scheduler_epoch <= first_epoch + 6


@pytest.mark.usefixtures("_picky")
async def test_a_request_whose_steps_the_worker_refuses_fails_alone(scheduler, stream):
    for handle in (1, 2, 4, 5):
        await stream.submit(make_submit(handle, max_tokens=100))
    await stream.read()
    await stream.submit(make_refused(3))
    await stream.read_until_over(1, 2, 3, 4, 5)
    assert (stream.failed[3].code, stream.failed[3].reason) == (code_pb2.INTERNAL, "STEP_REFUSED")
    assert "does not like" in stream.failed[3].message
    for handle in (1, 2, 4, 5):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=100)
    await wait_nothing_in_use(scheduler)


def hostile(shape: dict[str, Any] | None = None, **sampling: Any) -> scheduler_pb2.Submit:
    return make_submit(3, prompt_len=40, sampling=shape or {}, row_sampling=make_row_sampling(**sampling))


@pytest.mark.parametrize(
    ("submit", "message"),
    [
        (hostile(temperature=-1.0), "sampling.temperature is -1; it must be at least 0"),
        (hostile({"n": 3}, temperature=-1.0), "sampling.temperature is -1; it must be at least 0"),
        (hostile({"best_of": 3, "beam_search": {"beam_width": 3}}, top_p=7.0), "sampling.top_p is 7; "),
        (hostile(temperature=math.nan), "sampling.temperature is nan; "),
        (hostile(top_p=0.0), "sampling.top_p is 0; "),
        (hostile(top_p=1.5), "sampling.top_p is 1.5; "),
        (hostile(min_p=-0.5), "sampling.min_p is -0.5; "),
        (hostile(presence_penalty=math.inf), "sampling.presence_penalty is inf; "),
        (hostile(frequency_penalty=-math.inf), "sampling.frequency_penalty is -inf; "),
        (hostile(repetition_penalty=-1.0), "sampling.repetition_penalty is -1; "),
        (hostile(logit_bias={2**32 - 1: 1.0}), "sampling.logit_bias holds token 4294967295; "),
        (hostile(bad_token_sequences=[[]]), "bad_token_sequences[0] is empty; "),
        (make_submit(3, row_sampling=b"\xff\xff"), "row_sampling is not a RowSampling message: "),
        (make_submit(3, output=common_pb2.OutputOptions(logprobs=21)), "output.logprobs is 21; "),
        (make_submit(3, output=common_pb2.OutputOptions(prompt_logprobs=21)), "output.prompt_logprobs is 21; "),
    ],
)
async def test_sampling_that_no_gateway_would_send_fails_its_request_alone(scheduler, stream, submit, message):
    epoch = (await state_of(scheduler)).scheduler_epoch
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=40))
    await stream.read()
    await stream.submit(submit)
    await stream.read_until_over(1, 2, 3)
    failure = stream.failed[3]
    assert (failure.code, failure.reason) == (code_pb2.INVALID_ARGUMENT, "INVALID_SAMPLING")
    assert failure.message.startswith(message)
    for handle in (1, 2):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=40)
    # No step was refused, so the worker was not attached again.
    assert (await state_of(scheduler)).scheduler_epoch == epoch
    await wait_nothing_in_use(scheduler)


@pytest.mark.usefixtures("_picky")
async def test_a_scheduler_whose_last_request_was_refused_drains(scheduler, stream):
    await stream.submit(make_refused(1))
    await stream.read_until_over(1)
    drained = await scheduler.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000), timeout=30)
    assert drained.remaining_requests == 0


async def test_a_submission_that_cannot_be_taken_fails_alone(stream, monkeypatch):
    real = servicer.request_from_submit

    def request_from_submit(submit, **limits):
        if submit.handle == 1:
            raise ZeroDivisionError("nobody thought of this")
        return real(submit, **limits)

    monkeypatch.setattr(servicer, "request_from_submit", request_from_submit)
    await stream.submit(make_submit(1))
    await stream.submit(make_submit(2))
    await stream.read_until_over(1, 2)
    assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "UNEXPECTED")
    assert "nobody thought" not in stream.failed[1].message
    assert stream.outputs[2] == expected_tokens(2)


@pytest.mark.parametrize("fault", ["cannot be made", "cannot be serialized"])
async def test_a_stream_whose_events_cannot_be_written_ends_and_the_next_one_goes_on(scheduler, monkeypatch, fault):
    stream, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    real = servicer.gateway_messages

    def gateway_messages(outgoing):
        yield 1 / 0 if fault == "cannot be made" else "no message"

    with monkeypatch.context() as patched:
        patched.setattr(servicer, "gateway_messages", gateway_messages)
        await stream.submit(make_submit(1, max_tokens=30))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read_to_end()
    await until_state(scheduler, lambda state: state.connected_gateways == 0)
    assert servicer.gateway_messages is real
    again, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await again.submit(resubmit(stream, 1, max_tokens=30))
    await again.read_until_over(1)
    assert again.outputs[1] == expected_tokens(1, max_tokens=30)
    again.close()


async def test_a_worker_that_always_answers_nonsense_fails_its_requests_and_serves_once_it_does_not(
    stream, monkeypatch
):
    def say_too_much(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
        answer = step_answer(message, vocab_size)
        failures = {row + 100: "NaN" for row in answer.rows.tolist()}
        return dataclasses.replace(answer, result=dataclasses.replace(answer.result, failures=failures))

    with monkeypatch.context() as patch:
        patch.setattr(worker_link, "step_answer", say_too_much)
        for handle in (1, 2):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(1, 2)
    for handle in (1, 2):
        assert stream.failed[handle].reason == "WORKER_LOST"
        assert stream.failed[handle].message.endswith("reports rows [100], which do not sample")
    await stream.submit(make_submit(3))
    await stream.read_until_over(3)
    assert stream.outputs[3] == expected_tokens(3)
