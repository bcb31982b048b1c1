"""The scheduler service when its worker dies or hangs of one request: that one fails, the others get all tokens."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from google.rpc import code_pb2

from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.request import ClientId
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents
from scheduler_svc.service import step_loop
from tests.support.cut_link import cut_link
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.metrics import read_metrics
from tests.support.ports import free_port
from tests.support.processes import until_true
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    expected_tokens,
    make_submit,
    running_scheduler,
    wait_attached,
    wait_nothing_in_use,
)
from worker_svc.protocol.stream import Worker

ENOUGH = LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL
DEADLY = 3
CONFIG = FakeWorkerConfig(deadly_seeds=frozenset([DEADLY]), step_seconds=0.002)


@pytest.fixture(autouse=True)
def _attached_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is lost again and again is attached again as soon as after its first loss."""
    monkeypatch.setattr(step_loop, "_LAST_BACKOFF_S", step_loop._FIRST_BACKOFF_S)


@contextlib.asynccontextmanager
async def mortal_worker(address: str) -> AsyncIterator[list[FakeWorker]]:
    """Workers at one address, one after the other, as a supervisor starts them: when a step is deadly, its worker drops
    all streams without a word, the step unanswered. Yields those that died."""
    loop, started, dead = asyncio.get_running_loop(), asyncio.Event(), []

    async def live() -> None:
        while True:
            worker, dying, gone = FakeWorker(CONFIG), asyncio.Event(), threading.Event()

            def die(dying: asyncio.Event = dying, gone: threading.Event = gone) -> None:
                loop.call_soon_threadsafe(dying.set)
                gone.wait()

            worker.on_deadly(die)
            await worker.start(address)
            started.set()
            try:
                await dying.wait()
            finally:
                await worker.leave()
                gone.set()
                await worker.stop()
            dead.append(worker)

    living = asyncio.create_task(live())
    await started.wait()
    try:
        yield dead
    finally:
        living.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await living


async def test_a_request_that_the_worker_dies_of_fails_alone(tmp_path: Path) -> None:
    address, port = f"unix:{tmp_path / 'w.sock'}", free_port()
    async with (
        mortal_worker(address) as dead,
        running_scheduler(str(tmp_path / "s.sock"), address, metrics_port=port) as stub,
    ):
        await wait_attached(stub)
        stream, _ = await GatewayStream.open(stub)
        for handle in (1, 2, 4, 5):
            await stream.submit(make_submit(handle, max_tokens=100))
        await stream.read()
        await stream.submit(make_submit(DEADLY))
        await stream.submit(make_submit(6, max_tokens=40))
        await stream.read_until_over(*range(1, 7), timeout_s=60)
        assert stream.failed.keys() == {DEADLY}
        assert (stream.failed[DEADLY].code, stream.failed[DEADLY].reason) == (code_pb2.INTERNAL, "WORKER_LOST")
        assert "lost 6 times in a row" in stream.failed[DEADLY].message
        for handle in (1, 2, 4, 5):
            assert stream.outputs[handle] == expected_tokens(handle, max_tokens=100)
        assert stream.outputs[6] == expected_tokens(6, max_tokens=40)
        assert len(dead) == ENOUGH
        metrics = await read_metrics(port)
        assert metrics["quire_scheduler_worker_losses_total"] == ENOUGH
        assert metrics['quire_scheduler_requests_at_fault_total{reason="WORKER_LOST"}'] == 1
        await wait_nothing_in_use(stub)
        stream.close()


async def test_a_request_that_the_worker_hangs_of_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: list[tuple[bool, bool]]
) -> None:
    # The device goes on once the worker was given up and is asked for again, so it is the same worker each time.
    given_up = threading.Semaphore(0)
    attach = Worker.attach

    def attach_and_release(self: Worker, *args, **kwargs):
        given_up.release()
        return attach(self, *args, **kwargs)

    monkeypatch.setattr(Worker, "attach", attach_and_release)
    worker = FakeWorker(CONFIG, heartbeat_interval_s=0.05)

    def hang() -> None:
        while given_up.acquire(blocking=False):
            pass
        assert given_up.acquire(timeout=60)

    worker.on_deadly(hang)
    address = await worker.start(f"unix:{tmp_path / 'w.sock'}")
    async with attached_scheduler(tmp_path, address, step_timeout=0.5, max_steps_in_flight=1) as stub:
        stream, _ = await GatewayStream.open(stub)
        await stream.submit(make_submit(1, max_tokens=150))
        await stream.read()
        await stream.submit(make_submit(DEADLY))
        await stream.read_until_over(1, DEADLY, timeout_s=60)
        assert stream.failed.keys() == {DEADLY}
        assert stream.failed[DEADLY].reason == "WORKER_LOST"
        assert stream.outputs[1] == expected_tokens(1, max_tokens=150)
        assert [was_alive for was_alive, _ in verdicts] == [False] * (1 + ENOUGH)
        stream.close()
    given_up.release()
    await worker.stop()


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each attachment: whether the worker was alive, and whether there are trials now."""
    seen: list[tuple[bool, bool]] = []
    judge_loss = Scheduler.judge_loss

    def judge_and_note(self: Scheduler, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        events = judge_loss(self, was_alive=was_alive)
        seen.append((was_alive, self.trials.are_on))
        return events

    monkeypatch.setattr(Scheduler, "judge_loss", judge_and_note)
    return seen


async def test_a_link_that_breaks_again_and_again_in_the_middle_of_a_prompt_fails_nobody(
    tmp_path: Path, verdicts: list[tuple[bool, bool]]
) -> None:
    worker = FakeWorker(FakeWorkerConfig(step_seconds=0.005))
    async with cut_link(await worker.start()) as link:
        settings = {"max_num_batched_tokens": 16, "max_num_seqs": 16}
        async with attached_scheduler(tmp_path, link.address, **settings) as stub:
            stream, _ = await GatewayStream.open(stub)
            await stream.submit(make_submit(1, prompt_len=900, max_tokens=3))
            for number in range(2, ENOUGH + 4):
                steps_before = worker.num_steps
                await until_true(lambda least=steps_before + 3: worker.num_steps > least)
                assert not stream.outputs[1]
                link.reset()
                await until_true(lambda number=number: len(verdicts) >= number)
            await stream.read_until_over(1)
            assert stream.outputs[1] == expected_tokens(1, prompt_len=900, max_tokens=3)
            assert set(verdicts[1:]) == {(True, False)}
            stream.close()
    await worker.stop()
