"""The scheduler service when gateways and workers leave, hang, come back, or are slow."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2

from quire.rpc.channel import open_channel
from quire.rpc.errors import from_rpc_error, invalid_field
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.settings import ConfigurationError
from quire.worker.v1 import worker_pb2
from scheduler_svc.service import servicer, worker_link
from scheduler_svc.service.app import serve
from scheduler_svc.service.worker_link import WorkerLink, WorkerLostError
from scheduler_svc.service.worker_messages import StepAnswer, step_answer
from scheduler_svc.settings import SchedulerSettings
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.sampling import make_row_sampling
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    resubmit,
    running_scheduler,
    state_of,
    until,
    wait_attached,
    wait_nothing_in_use,
)
from worker_svc.protocol.stream import Worker
from worker_svc.step import AdmittedStep, Step


async def test_a_gateway_that_leaves_has_its_requests_aborted_after_the_grace_period(scheduler, worker):
    stream, _ = await GatewayStream.open(scheduler, grace_period_ms=0)
    await stream.submit(make_submit(1, max_tokens=1000))
    await stream.read()
    worker.hang.set()
    stream.close()
    await wait_nothing_in_use(scheduler)


async def test_a_gateway_that_comes_back_with_less_than_it_was_sent_gets_the_rest_anew(scheduler):
    first, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await first.submit(make_submit(1, max_tokens=60))
    while len(first.outputs[1]) < 5:
        await first.read()
    first.outputs[1] = first.outputs[1][:1]
    first.close()
    second, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await second.submit(resubmit(first, 1, max_tokens=60))
    await second.read_until_over(1)
    assert second.outputs[1] == expected_tokens(1, max_tokens=60)
    state = await state_of(scheduler)
    assert (state.running_requests, state.waiting_requests) == (0, 0)
    second.close()


async def test_a_poisoned_request_fails_alone(worker, tmp_path):
    worker.config = FakeWorkerConfig(failing_seeds=frozenset([1]))
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1))
        await stream.submit(make_submit(2))
        await stream.read_until_over(1, 2)
        assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "NON_FINITE_LOGITS")
        assert stream.outputs[2] == expected_tokens(2)
        await wait_nothing_in_use(stub)
        stream.close()


async def test_a_lost_worker_is_a_pause_and_nothing_else(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle in range(1, 6):
            await stream.submit(make_submit(handle, max_tokens=60))
        while len(stream.outputs[1]) < 10:
            await stream.read()
        await worker.stop()
        successor = FakeWorker()
        await successor.start(address)
        await stream.read_until_over(*range(1, 6))
        for handle in range(1, 6):
            assert stream.outputs[handle] == expected_tokens(handle, max_tokens=60)
        await wait_nothing_in_use(stub)
        stream.close()
        await successor.stop()


async def test_a_worker_whose_steps_have_fewer_tokens_than_it_has_rows_serves(tmp_path):
    worker = FakeWorker(FakeWorkerConfig(max_num_rows=256, max_num_batched_tokens=16))
    async with running_scheduler(str(tmp_path / "s.sock"), await worker.start()) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle in range(1, 25):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(*range(1, 25))
        for handle in range(1, 25):
            assert stream.outputs[handle] == expected_tokens(handle)
        stream.close()
    await worker.stop()


async def test_a_worker_that_answers_for_other_rows_than_were_asked_is_lost(scheduler, monkeypatch):
    turned: list[StepAnswer] = []

    def turn_one_around(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
        answer = step_answer(message, vocab_size)
        if turned or len(answer.rows) < 2:
            return answer
        turned.append(dataclasses.replace(answer, rows=answer.rows[::-1]))
        return turned[0]

    monkeypatch.setattr(worker_link, "step_answer", turn_one_around)
    first_epoch = (await state_of(scheduler)).scheduler_epoch
    stream, _ = await GatewayStream.open(scheduler)
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=60))
    await stream.read_until_over(1, 2)
    assert turned
    assert (await state_of(scheduler)).scheduler_epoch > first_epoch
    for handle in (1, 2):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=60)
    stream.close()


@pytest.mark.parametrize("max_tokens", [1, 30])
async def test_a_worker_that_always_answers_nonsense_fails_its_requests_and_serves_once_it_does_not(
    scheduler, monkeypatch, max_tokens
):
    def say_too_much(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
        answer = step_answer(message, vocab_size)
        failures = {row + 100: "NaN" for row in answer.rows.tolist()}
        return dataclasses.replace(answer, result=dataclasses.replace(answer.result, failures=failures))

    stream, _ = await GatewayStream.open(scheduler)
    with monkeypatch.context() as patch:
        patch.setattr(worker_link, "step_answer", say_too_much)
        for handle in (1, 2):
            await stream.submit(make_submit(handle, max_tokens=max_tokens))
        await stream.read_until_over(1, 2)
    for handle in (1, 2):
        assert stream.failed[handle].reason == "WORKER_LOST"
        assert stream.failed[handle].message.endswith("reports rows [100], which do not sample")
    await stream.submit(make_submit(3))
    await stream.read_until_over(3)
    assert stream.outputs[3] == expected_tokens(3)
    stream.close()


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


async def test_a_worker_that_hangs_is_given_up_after_the_step_timeout(worker, tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, step_timeout=0.3) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=20))
        await stream.read()
        worker.hang.set()
        await stream.submit(make_submit(2, max_tokens=30))

        async def detached() -> bool:
            return (await state_of(stub)).scheduler_epoch > epoch

        epoch = (await state_of(stub)).scheduler_epoch
        await until(detached)
        worker.hang.clear()
        await stream.read_until_over(1, 2)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=20)
        assert stream.outputs[2] == expected_tokens(2, max_tokens=30)
        stream.close()


async def test_a_constraint_that_the_worker_never_compiles_fails_its_requests_and_disturbs_no_other(tmp_path):
    worker = FakeWorker(heartbeat_interval_s=0.02)
    answers = [Future[None](), None, None]
    compiled = iter(answers)
    worker.prepare = lambda row_sampling: next(compiled)
    async with running_scheduler(str(tmp_path / "s.sock"), await worker.start(), step_timeout=0.3) as stub:
        await wait_attached(stub)
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


async def test_a_step_that_waits_for_the_one_before_it_does_not_hang(tmp_path):
    # Two steps in flight take longer than the timeout, each by itself does not.
    worker = FakeWorker(FakeWorkerConfig(step_seconds=1.0), heartbeat_interval_s=0.02)
    async with running_scheduler(str(tmp_path / "s.sock"), await worker.start(), step_timeout=1.8) as stub:
        await wait_attached(stub)
        first_epoch = (await state_of(stub)).scheduler_epoch
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=3))
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=3)
        assert (await state_of(stub)).scheduler_epoch == first_epoch
        stream.close()
    await worker.stop()


@contextlib.asynccontextmanager
async def serving(socket: Path, worker: FakeWorker, **settings: Any) -> AsyncIterator[tuple[asyncio.Task[None], Any]]:
    """The task of a scheduler service that may end by itself, and a stub that is connected to it."""
    listen = f"unix:{socket}"
    values: dict[str, Any] = {"listen": listen, "workers": (worker.address,), "log_level": "warning"}
    task = asyncio.create_task(serve(SchedulerSettings(**(values | settings))))
    async with open_channel(listen) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        await stub.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True, timeout=60)
        await wait_attached(stub)
        yield task, stub
    task.cancel()


async def test_the_older_of_two_schedulers_at_one_worker_ends_and_the_newer_one_keeps_it(worker, tmp_path):
    """As where one address is in the --workers of both: neither would finish a step if they took it in turns."""
    async with (
        serving(tmp_path / "older.sock", worker) as (older, _),
        running_scheduler(str(tmp_path / "newer.sock"), worker.address) as newer,
    ):
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
    async with serving(tmp_path / "older.sock", worker, drain_timeout=3600.0) as (older, stub):
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


async def test_connect_is_unavailable_until_a_worker_is_attached(tmp_path):
    async with running_scheduler(str(tmp_path / "s.sock"), f"unix:{tmp_path / 'nobody.sock'}") as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await GatewayStream.open(stub)
        assert from_rpc_error(caught.value).reason == "NO_WORKER"


async def test_drain_waits_for_live_requests_and_refuses_new_ones(worker, tmp_path):
    worker.config = FakeWorkerConfig(step_seconds=0.005)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=40))
        await stream.read()
        drain = stub.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000))

        async def draining() -> bool:
            return (await state_of(stub)).draining

        await until(draining)
        await stream.submit(make_submit(2))
        await stream.read_until_over(1, 2)
        assert stream.outputs[1] == expected_tokens(1, max_tokens=40)
        assert stream.failed[2].code == code_pb2.UNAVAILABLE
        assert (await drain).remaining_requests == 0
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


async def test_gateways_are_told_when_the_worker_is_lost_and_when_it_is_back(tmp_path):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker = FakeWorker()
    await worker.start(address)
    async with running_scheduler(str(tmp_path / "s.sock"), address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub, "gateway-a")
        await worker.stop()
        await stream.read()
        assert stream.readiness == [False]
        late, _ = await GatewayStream.open(stub, "gateway-b")
        await late.read()
        assert late.readiness == [False]
        successor = FakeWorker()
        await successor.start(address)
        await stream.read()
        await late.read()
        assert stream.readiness == late.readiness == [False, True]
        stream.close()
        late.close()
        await successor.stop()


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
async def test_a_worker_that_refuses_every_step_is_attached_at_growing_intervals(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
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
    stream.close()


@pytest.mark.usefixtures("_picky")
async def test_a_request_whose_steps_the_worker_refuses_fails_alone(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
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
    stream.close()


HOSTILE: list[tuple[bytes, str]] = [
    (make_row_sampling(temperature=-1.0), "sampling.temperature is -1; it must be at least 0"),
    (make_row_sampling(logit_bias={2**32 - 1: 1.0}), "sampling.logit_bias holds token 4294967295; "),
    (make_row_sampling(bad_token_sequences=[[]]), "bad_token_sequences[0] is empty; "),
    (b"\xff\xff", "row_sampling is not a RowSampling message: "),
]


@pytest.mark.parametrize(("row_sampling", "message"), HOSTILE)
@pytest.mark.parametrize("n", [1, 3])
async def test_sampling_that_no_gateway_would_send_fails_its_request_alone(scheduler, row_sampling, message, n):
    epoch = (await state_of(scheduler)).scheduler_epoch
    stream, _ = await GatewayStream.open(scheduler)
    for handle in (1, 2):
        await stream.submit(make_submit(handle, max_tokens=40))
    await stream.read()
    await stream.submit(make_submit(3, n=n, prompt_len=40, row_sampling=row_sampling))
    await stream.read_until_over(1, 2, 3)
    failure = stream.failed[3]
    assert (failure.code, failure.reason) == (code_pb2.INVALID_ARGUMENT, "INVALID_SAMPLING")
    assert failure.message.startswith(message)
    for handle in (1, 2):
        assert stream.outputs[handle] == expected_tokens(handle, max_tokens=40)
    # No step was refused, so the worker was not attached again.
    assert (await state_of(scheduler)).scheduler_epoch == epoch
    await wait_nothing_in_use(scheduler)
    stream.close()


async def test_a_beam_search_whose_sampling_cannot_be_read_fails_alone(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    submit = make_submit(1, row_sampling=make_row_sampling(top_p=7.0))
    submit.sampling.beam_search.beam_width = submit.sampling.best_of = 3
    await stream.submit(submit)
    await stream.submit(make_submit(2))
    await stream.read_until_over(1, 2)
    assert (stream.failed[1].reason, stream.outputs[2]) == ("INVALID_SAMPLING", expected_tokens(2))
    assert "sampling.top_p is 7" in stream.failed[1].message
    stream.close()


async def test_a_request_that_is_refused_in_the_middle_of_its_output_fails_alone(worker, tmp_path, monkeypatch):
    def admit(self: Worker, step: Step) -> AdmittedStep:
        if len(step.batch.rows) and int((step.batch.num_computed_tokens + step.batch.num_new_tokens).max()) > 60:
            raise invalid_field("batch.num_new_tokens", "is one too many")
        return admit_any(self, step)

    admit_any = Worker.admit
    monkeypatch.setattr(Worker, "admit", admit)
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address) as stub:
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle, max_tokens in ((1, 40), (2, 80), (3, 40)):
            await stream.submit(make_submit(handle, max_tokens=max_tokens))
        await stream.read_until_over(1, 2, 3)
        assert stream.failed.keys() == {2}
        assert stream.failed[2].message.endswith("batch.num_new_tokens is one too many")
        # What came before the refusal was delivered, and nothing twice.
        assert stream.outputs[2] == expected_tokens(2, max_tokens=56)
        for handle in (1, 3):
            assert stream.outputs[handle] == expected_tokens(handle, max_tokens=40)
        await wait_nothing_in_use(stub)
        stream.close()


@pytest.mark.usefixtures("_picky")
async def test_a_scheduler_whose_last_request_was_refused_drains(scheduler):
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_refused(1))
    await stream.read_until_over(1)
    drained = await scheduler.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000), timeout=30)
    assert drained.remaining_requests == 0
    stream.close()


async def test_a_submission_that_cannot_be_taken_fails_alone(scheduler, monkeypatch):
    real = servicer.request_from_submit

    def request_from_submit(submit, **limits):
        if submit.handle == 1:
            raise ZeroDivisionError("nobody thought of this")
        return real(submit, **limits)

    monkeypatch.setattr(servicer, "request_from_submit", request_from_submit)
    stream, _ = await GatewayStream.open(scheduler)
    await stream.submit(make_submit(1))
    await stream.submit(make_submit(2))
    await stream.read_until_over(1, 2)
    assert (stream.failed[1].code, stream.failed[1].reason) == (code_pb2.INTERNAL, "UNEXPECTED")
    assert "nobody thought" not in stream.failed[1].message
    assert stream.outputs[2] == expected_tokens(2)
    stream.close()


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

    async def left() -> bool:
        return (await state_of(scheduler)).connected_gateways == 0

    await until(left)
    assert servicer.gateway_messages is real
    again, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await again.submit(resubmit(stream, 1, max_tokens=30))
    await again.read_until_over(1)
    assert again.outputs[1] == expected_tokens(1, max_tokens=30)
    again.close()
