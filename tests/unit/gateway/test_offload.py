import asyncio
import threading
import time
from contextlib import suppress

import pytest

from gateway.offload import LONG_BYTES, FairExecutor
from quire.rpc.errors import ResourceExhausted

LONG = 2 * LONG_BYTES
SHORT = 100


class Jobs:
    """Jobs whose order is recorded; `blocked` ones run until `release`."""

    def __init__(self, executor: FairExecutor) -> None:
        self._executor = executor
        self._gate = threading.Event()
        self.ran: list[str] = []

    def start(self, tenant: str, name: str, num_bytes: int) -> asyncio.Task[None]:
        return asyncio.create_task(self._executor.run(tenant, num_bytes, self.ran.append, name))

    async def block(self, tenant: str, num_bytes: int) -> asyncio.Task[bool]:
        """A job that holds a thread until `release`."""
        began = threading.Event()

        def wait() -> bool:
            began.set()
            return self._gate.wait(60)

        task = asyncio.create_task(self._executor.run(tenant, num_bytes, wait))
        await asyncio.to_thread(began.wait, 60)
        return task

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def make_jobs():
    executors, made = [], []

    def make(num_threads, **limits) -> Jobs:
        executors.append(FairExecutor(num_threads, **limits))
        made.append(Jobs(executors[-1]))
        return made[-1]

    yield make
    for jobs in made:
        jobs.release()
    for executor in executors:
        executor.shutdown()


async def until_waiting() -> None:
    """Lets tasks that were just created submit their work."""
    await asyncio.sleep(0)


async def test_results_and_errors_are_those_of_the_function():
    executor = FairExecutor(1)
    assert await executor.run("a", SHORT, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await executor.run("a", SHORT, divmod, 7, 0)
    assert await executor.run("a", LONG, divmod, 7, 2) == (3, 1)
    executor.shutdown()


async def test_tenants_get_the_same_bytes(make_jobs):
    jobs = make_jobs(1)
    await jobs.block("a", SHORT)
    tasks = [jobs.start("a", "a", 3 * LONG) for _ in range(20)]
    tasks += [jobs.start("b", "b", LONG) for _ in range(20)]
    await until_waiting()
    jobs.release()
    await asyncio.gather(*tasks)
    for end in (8, 16, 24):
        first = jobs.ran[:end]
        assert abs(3 * first.count("a") - first.count("b")) <= 3


async def test_a_tenant_that_comes_later_has_no_claim_on_earlier_time(make_jobs):
    jobs = make_jobs(1)
    await jobs.block("a", SHORT)
    tasks = [jobs.start("a", f"a{number}", LONG) for number in range(4)]
    await until_waiting()

    async def come() -> None:
        await tasks[1]
        await asyncio.gather(*(jobs.start("b", "b", LONG) for _ in range(4)))

    later = asyncio.create_task(come())
    jobs.release()
    await asyncio.gather(*tasks, later)
    assert jobs.ran.index("a3") < len(jobs.ran) - 2


async def test_short_work_runs_while_long_work_waits(make_jobs):
    jobs = make_jobs(2)
    await jobs.block("a", LONG)
    long = [jobs.start("a", "long", LONG) for _ in range(5)]
    await until_waiting()
    await jobs.start("a", "short", SHORT)
    await jobs.start("b", "short", SHORT)
    assert jobs.ran == ["short", "short"]
    jobs.release()
    await asyncio.gather(*long)


async def test_a_tenant_with_too_many_bytes_waiting_is_refused(make_jobs):
    jobs = make_jobs(1, max_waiting_bytes=8 * LONG)
    await jobs.block("a", SHORT)
    waiting = [jobs.start("a", "a", LONG) for _ in range(3)]
    await until_waiting()
    with pytest.raises(ResourceExhausted, match=r"this tenant's .* exceed 512.0 KiB") as refused:
        await jobs.start("a", "refused", LONG)
    assert (refused.value.reason, refused.value.retry_after_ms) == ("WORK_QUEUE_FULL", 1000)
    waiting.append(jobs.start("b", "b", 100 * LONG))  # One job of a tenant is always taken.
    await until_waiting()
    with pytest.raises(ResourceExhausted):
        await jobs.start("b", "refused", SHORT)
    jobs.release()
    await asyncio.gather(*waiting)
    assert sorted(jobs.ran) == ["a", "a", "a", "b"]


async def test_work_of_a_caller_that_left_is_not_run_and_leaves_room(make_jobs):
    jobs = make_jobs(1, max_waiting_bytes=4 * LONG)
    await jobs.block("a", SHORT)
    for _ in range(5):
        gone = jobs.start("a", "gone", LONG)
        await until_waiting()
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone
    last = jobs.start("a", "last", LONG)
    await until_waiting()
    jobs.release()
    await last
    assert jobs.ran == ["last"]


@pytest.mark.parametrize("num_turns", range(5))
async def test_a_caller_that_leaves_as_its_turn_comes_passes_it_on(make_jobs, num_turns):
    jobs = make_jobs(1)
    running = await jobs.block("a", SHORT)
    left, behind = jobs.start("a", "left", SHORT), jobs.start("a", "behind", SHORT)
    await until_waiting()
    jobs.release()
    # The loop is notified of the function's end in the next turns.
    time.sleep(0.05)  # noqa: ASYNC251 (the loop is to stand still)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    left.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(running, behind, jobs.start("b", "last", SHORT))
        with suppress(asyncio.CancelledError):
            await left
    assert jobs.ran[-2:] == ["behind", "last"]


async def test_a_thread_is_taken_until_the_function_ends_also_if_the_caller_left(make_jobs):
    jobs = make_jobs(1)
    gone = await jobs.block("a", SHORT)
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    next_one = jobs.start("a", "next", SHORT)
    await until_waiting()
    assert jobs.ran == []
    jobs.release()
    await next_one


async def test_a_full_queue_still_takes_one_job_of_each_tenant(make_jobs):
    jobs = make_jobs(1, max_waiting_bytes=4 * LONG)
    await jobs.block("a", SHORT)
    waiting = [jobs.start(tenant, tenant, LONG) for tenant in ("a", "b", "c", "d", "e")]
    await until_waiting()
    with pytest.raises(ResourceExhausted, match="of requests wait"):
        await jobs.start("e", "refused", SHORT)
    jobs.release()
    await asyncio.gather(*waiting)
