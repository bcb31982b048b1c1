"""A scheduler's links to workers: peers that stay silent, many messages at once, the conditions for one group of ranks,
and the loss of a group."""

import asyncio
import contextlib
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.rpc.server import DEFAULT_MAX_MESSAGE_BYTES
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import Constraint
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan
from scheduler_svc.service import step_loop, worker_link
from scheduler_svc.service.worker_link import WorkerLink, WorkerLostError, Workers, attach_workers
from scheduler_svc.service.worker_messages import Prepared, StepAnswer, prepare_message, step_message
from tests.support.core_driver import make_config, make_request
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import GatewayStream, attached_scheduler, expected_tokens, make_submit
from tests.support.worker_client import make_assign, make_batch

TIMEOUT_S = 60.0
A, B, C = (ModelFingerprint("c1", "t1", weights) for weights in ("w1", "w2", ""))
NO_TOKENIZER = ModelFingerprint("c1", "", "w1")


@contextlib.asynccontextmanager
async def running_rank(
    rank: int, generation: int = 5, fingerprint: ModelFingerprint = UNKNOWN_MODEL
) -> AsyncIterator[str]:
    """One of two ranks."""
    config = FakeWorkerConfig(block_size=4, rank=rank, world_size=2, generation=generation, fingerprint=fingerprint)
    worker = FakeWorker(config, heartbeat_interval_s=0.05)
    yield await worker.start()
    await worker.stop()


@contextlib.asynccontextmanager
async def attached(*addresses: str) -> AsyncIterator[Workers]:
    link = await attach_workers(addresses, 1, TIMEOUT_S)
    try:
        yield link
    finally:
        await link.close()


def make_plan() -> StepPlan:
    scheduler = Scheduler(make_config(num_blocks=40))
    scheduler.submit(make_request(1), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan


async def next_answer(link: Workers) -> int:
    async with asyncio.timeout(30):
        while not isinstance(answer := await link.receive(), StepAnswer):
            pass
    return answer.result.step_id


async def test_a_step_is_serialized_once_and_answered_when_all_ranks_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, bytes] = {}
    late = asyncio.Event()
    write = WorkerLink.write
    async with running_rank(0) as first, running_rank(1) as second, attached(first, second) as link:

        async def write_late_to_the_second(self: WorkerLink, message: bytes) -> None:
            written[self.address] = message
            if self.address == second:
                await late.wait()
            await write(self, message)

        monkeypatch.setattr(WorkerLink, "write", write_late_to_the_second)
        plan = make_plan()
        sending = asyncio.create_task(link.write(step_message(plan, 1, link.info.worker_generation)))
        # The first rank has answered long before, since its heartbeats come.
        assert [await link.receive() for _ in range(6)] == [None] * 6
        late.set()
        await sending
        assert await next_answer(link) == plan.step_id
        assert set(written) == {first, second}
        assert written[first] is written[second]


@pytest.mark.parametrize(
    ("order", "generations", "fingerprints", "message"),
    [
        ((1, 0), (5, 5), (A, A), "is rank 1 of 2; --workers names it as rank 0 of 2"),
        ((0,), (5, 5), (A, A), "is rank 0 of 2; --workers names it as rank 0 of 1"),
        ((0, 1), (5, 6), (A, A), "it belongs to another start of the group"),
        # Only a group whose ranks all have a tokenizer.json can enforce constraints.
        ((0, 1), (5, 5), (A, NO_TOKENIZER), "worker {1}, rank 1, has no tokenizer.json"),
        ((0, 1), (5, 5), (NO_TOKENIZER, A), "worker {0}, rank 0, has no tokenizer.json"),
        (
            (0, 1),
            (5, 5),
            (A, B),
            "rank 0 and worker {1} have different models: weights w1 and w2; give both the same one by --mod",
        ),
    ],
)
async def test_ranks_that_make_no_group_are_refused(
    order: tuple[int, ...],
    generations: tuple[int, int],
    fingerprints: tuple[ModelFingerprint, ModelFingerprint],
    message: str,
) -> None:
    async with (
        running_rank(0, generation=generations[0], fingerprint=fingerprints[0]) as first,
        running_rank(1, generation=generations[1], fingerprint=fingerprints[1]) as second,
    ):
        addresses = (first, second)
        with pytest.raises(WorkerLostError, match=message.format(*addresses)):
            await attach_workers([addresses[rank] for rank in order], 1, TIMEOUT_S)


async def test_a_request_that_ranks_sample_differently_fails_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, only one of them can enforce the request's constraint."""
    monkeypatch.setattr(step_loop, "_LAST_BACKOFF_S", step_loop._FIRST_BACKOFF_S)
    place = FakeWorkerConfig(world_size=2, generation=5)
    ranks = [FakeWorker(replace(place, rank=0)), FakeWorker(replace(place, rank=1, failing_seeds=frozenset([1])))]
    addresses = tuple([await rank.start() for rank in ranks])
    async with attached_scheduler(tmp_path, "", workers=addresses) as stub:
        stream, _ = await GatewayStream.open(stub)
        for handle in (1, 2):
            await stream.submit(make_submit(handle))
        await stream.read_until_over(1, 2)
        assert stream.failed[1].reason == "WORKER_LOST"
        assert "rank 1, sampled other tokens in step" in stream.failed[1].message
        assert (stream.outputs[1], stream.outputs[2]) == ([], expected_tokens(2))
        stream.close()
    assert f"worker {addresses[1]}, rank 1, sampled other tokens in step" in capfd.readouterr().err
    for rank in ranks:
        await rank.stop()


async def test_ranks_are_attached_as_one_and_a_constraint_is_prepared_when_all_have_compiled_it() -> None:
    async with (
        running_rank(0, fingerprint=A) as first,
        # It lacks the parts of the model that it does not need.
        running_rank(1, fingerprint=C) as second,
        attached(first, second) as link,
    ):
        assert (link.info.worker_generation, link.info.fingerprint.weights) == (5, "w1")
        await link.write(prepare_message(Preparation(3, Constraint(b""))))
        await link.write(prepare_message(Preparation(4, Constraint(b""))))
        numbers: list[int] = []
        async with asyncio.timeout(30):
            while len(numbers) < 2:
                answer = await link.receive()
                if isinstance(answer, Prepared):
                    numbers.append(answer.number)
        assert sorted(numbers) == [3, 4]


_UNKNOWN_FIELD_OF_16_MIB = b"\xfa\x7f\x80\x80\x80\x08"
"""Field 2047, which no message has, with its length."""


@pytest.fixture
def mute_address(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        yield f"unix:{path}"


async def test_attaching_can_be_cancelled_at_any_time_and_is_given_up_in_time(mute_address: str) -> None:
    for turns in range(12):
        attaching = asyncio.create_task(WorkerLink.attach(mute_address, 1, timeout_s=300))
        for _ in range(turns):
            await asyncio.sleep(0)
        attaching.cancel()
        async with asyncio.timeout(60):
            with pytest.raises(asyncio.CancelledError):
                await attaching
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLostError, match="did not answer Attach"):
            await WorkerLink.attach(mute_address, 1, timeout_s=0.2)


async def test_a_rank_that_does_not_answer_is_not_waited_for_where_another_one_cannot_be_had(
    mute_address: str, tmp_path: Path
) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLostError, match="nobody"):
            await attach_workers((mute_address, f"unix:{tmp_path / 'nobody'}"), 1, 300.0)


async def test_a_step_of_any_size_reaches_the_worker(tmp_path: Path) -> None:
    """All rows may be assigned at once, each with large fields: here unknown fields, as of a newer gateway."""
    worker = FakeWorker()
    link = await WorkerLink.attach(await worker.start(f"unix:{tmp_path / 'w.sock'}"), 1, timeout_s=60)
    assign = [make_assign(row, [1, 2, 3], [row + 1]) for row in range(5)]
    for each in assign:
        each.row_sampling += _UNKNOWN_FIELD_OF_16_MIB + bytes(1 << 24)
    step = worker_pb2.StepRequest(
        step_id=1,
        scheduler_epoch=1,
        worker_generation=link.info.worker_generation,
        assign=assign,
        batch=make_batch([0], [3], [0]),
    )
    message = worker_pb2.RunRequest(step=step).SerializeToString()
    assert len(message) > DEFAULT_MAX_MESSAGE_BYTES
    async with asyncio.timeout(60):
        await link.write(message)
        while not isinstance(answer := await link.receive(), StepAnswer):
            pass
    assert answer.rows.tolist() == [0]
    await link.close()
    await worker.stop()


async def test_a_rank_that_refuses_while_another_one_has_failed_logs_no_error(monkeypatch):
    """For example while all ranks load their model."""

    has_begun = asyncio.Event()

    async def refuse(*_: object) -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ConnectionError("refused at this moment") from None

    monkeypatch.setattr(worker_link, "_handshake", refuse)
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    attaching = asyncio.create_task(WorkerLink.attach("unix:/nobody", 1, timeout_s=300))
    await has_begun.wait()
    attaching.cancel()
    # pytest.raises would keep references to the tasks.
    with contextlib.suppress(asyncio.CancelledError):
        await attaching
    del attaching
    await asyncio.sleep(0)
    gc.collect()
    assert not reported
