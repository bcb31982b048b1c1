"""The directory of batches after failures: its contents, and the size that it keeps."""

import asyncio
import errno
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway import sqlite
from gateway.api.batches import store as batches
from gateway.api.batches.runner import Batches, BatchLimits, read_lines
from gateway.api.batches.store import BatchStore, Line
from gateway.request.counting import EntryLimits
from gateway.sqlite import NotOwnerError
from quire.rpc.errors import ResourceExhausted, Unavailable

TENANT = "a"


@pytest.fixture
def store(tmp_path) -> Iterator[BatchStore]:
    made = BatchStore(tmp_path, "this", 1 << 20)
    yield made
    made.close()


def names(directory: Path) -> set[str]:
    return {each.name for each in (directory / "files").iterdir()}


def begun_batch(store: BatchStore) -> tuple[str, str]:
    """The id of an answered batch, and the id of its input."""
    file_id, path = store.files.new_path()
    path.write_bytes(b"{}\n")
    store.files.add(TENANT, file_id, "in", "batch")
    batch = store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)
    store.take(1)
    store.begin(batch.id, [Line(1, "a", 0, 2)])
    store.answer(batch.id, 1, b"{}", is_good=True)
    return batch.id, file_id


async def test_results_that_cannot_be_written_leave_no_file(store, tmp_path, monkeypatch):
    batch_id, file_id = begun_batch(store)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(Unavailable, match="no space"):
            await store.finish(batch_id, batches.COMPLETED)
    assert names(tmp_path) == {file_id}
    await store.finish(batch_id, batches.COMPLETED)
    assert names(tmp_path) == {file_id, store.batch(TENANT, batch_id).facts["output_file_id"]}


async def test_results_of_a_batch_that_another_gateway_took_leave_no_file(store, tmp_path):
    batch_id, file_id = begun_batch(store)
    store.owner = "other"
    with pytest.raises(NotOwnerError):
        await store.finish(batch_id, batches.COMPLETED)
    assert names(tmp_path) == {file_id}


async def test_results_that_are_entered_as_their_run_is_stopped_stay(store, tmp_path, monkeypatch):
    batch_id, file_id = begun_batch(store)
    enter, begins, goes_on = store._enter_results, threading.Event(), threading.Event()

    def slow(*arguments: object) -> None:
        begins.set()
        assert goes_on.wait(10)
        enter(*arguments)

    monkeypatch.setattr(store, "_enter_results", slow)
    run = asyncio.create_task(store.finish(batch_id, batches.COMPLETED))
    assert await asyncio.to_thread(begins.wait, 10)
    run.cancel()
    asyncio.get_running_loop().call_soon(goes_on.set)
    with pytest.raises(asyncio.CancelledError):
        await run
    row = await store.run(store.batch, TENANT, batch_id)
    assert row.status == batches.COMPLETED
    assert names(tmp_path) == {file_id, row.facts["output_file_id"]}


@pytest.mark.parametrize("number", [1, 2])
async def test_results_that_are_written_as_their_run_is_stopped_leave_no_file(store, tmp_path, monkeypatch, number):
    batch_id, file_id = begun_batch(store)
    sync, begins, goes_on, syncs = os.fsync, threading.Event(), threading.Event(), itertools.count(1)

    def slow(file: int) -> None:
        if next(syncs) == number:
            begins.set()
            assert goes_on.wait(10)
        sync(file)

    def written(*arguments: object) -> None:
        try:
            write(*arguments)
        finally:
            ended.set()

    write, ended = store._write_results, threading.Event()
    monkeypatch.setattr(store, "_write_results", written)
    monkeypatch.setattr(os, "fsync", slow)
    run = asyncio.create_task(store.finish(batch_id, batches.COMPLETED))
    assert await asyncio.to_thread(begins.wait, 10)
    # Again, as where the lease is found to be another gateway's while the gateway stops.
    for _ in range(2):
        run.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await run
    goes_on.set()
    assert await asyncio.to_thread(ended.wait, 10)
    assert names(tmp_path) == {file_id}
    assert store.batch(TENANT, batch_id).status == batches.IN_PROGRESS


def test_a_file_that_another_gateway_removes_as_this_one_starts_is_passed_over(tmp_path):
    BatchStore(tmp_path, "this", 1 << 20).close()
    # As a file that is gone when it is looked at.
    (tmp_path / "files" / "gone").symlink_to(tmp_path / "nowhere")
    BatchStore(tmp_path, "other", 1 << 20).close()


def test_a_batch_that_begins_as_another_gateway_cancels_it_has_both_times(store, tmp_path, monkeypatch):
    file_id, path = store.files.new_path()
    path.write_bytes(b"{}\n")
    store.files.add(TENANT, file_id, "in", "batch")
    batch = store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)
    store.take(1)
    other = BatchStore(tmp_path, "other", 1 << 20)
    changing = other.changing

    def begins_first():
        with monkeypatch.context() as patched:
            patched.setattr(other, "changing", changing)
            store.begin(batch.id, [Line(1, "a", 0, 2)])
        return changing()

    monkeypatch.setattr(other, "changing", begins_first)
    facts = other.cancel(TENANT, batch.id).facts
    assert {"in_progress_at", "cancelling_at"} <= facts.keys()
    other.close()


async def test_leases_are_renewed_while_results_are_written(store):
    file_id, path = store.files.new_path()
    path.write_bytes(b"{}\n")
    store.files.add(TENANT, file_id, "in", "batch")
    batch = store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)
    store.take(1)
    store.begin(batch.id, [Line(1, "a", 0, 2)])
    is_written = threading.Event()

    def unanswered(_: str) -> bytes:
        assert is_written.wait(10)
        return b"{}"

    async with asyncio.timeout(5):
        finishing = asyncio.create_task(store.finish(batch.id, batches.EXPIRED, unanswered))
        assert await store.run(store.renew, [batch.id]) == {batch.id: batches.IN_PROGRESS}
        is_written.set()
        await finishing
    assert store.batch(TENANT, batch.id).shown()["request_counts"] == {"total": 1, "completed": 0, "failed": 1}


def test_no_tenant_waits_for_the_batches_of_another_one(store):
    def added(tenant: str) -> str:
        file_id, path = store.files.new_path()
        path.write_bytes(b"")
        store.files.add(tenant, file_id, "in", "batch")
        return store.add_batch(tenant, "", file_id, "/v1/completions", 60, None).id

    many, one = [added("many") for _ in range(6)], added("one")
    assert [row.id for row in store.take(4)] == [many[0], one, *many[1:3]]
    late = added("late")
    assert [row.id for row in store.take(0)] == [late]
    assert [row.id for row in store.take(1)] == [many[3]]


def test_of_batches_that_are_done_a_tenant_keeps_the_newest(store, monkeypatch):
    monkeypatch.setattr(batches, "MAX_ENDED", 2)
    file_id, path = store.files.new_path()
    path.write_bytes(b"")
    store.files.add(TENANT, file_id, "in", "batch")
    others = store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)
    store.cancel(TENANT, others.id)
    made: list[str] = []
    for _ in range(4):
        made.append(store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None).id)
        for row in store.take(9):
            if row.id != others.id:
                store.fail(row.id, [])
    newest = store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None).id
    assert store.batch_ids(TENANT) == [newest, *reversed(made[-2:]), others.id]
    assert [row.id for row in store.batches(TENANT, [made[-1], made[0]])] == [made[-1]]


def test_a_file_of_very_many_blank_lines_is_read_no_further(tmp_path):
    limits, line = BatchLimits(3, 1 << 20, 1 << 20, EntryLimits(10)), b'{"custom_id": "a", "method": "POST", '
    line += b'"url": "/v1/completions", "body": {}}'
    path = tmp_path / "in"
    path.write_bytes(b"\n" * 3 + line)
    assert [each.line for each in read_lines(path, "/v1/completions", limits)[0]] == [4]
    path.write_bytes(b"\n" * 1000 + line)
    (error,) = read_lines(path, "/v1/completions", limits)[1]
    assert (error.line, error.code) == (4, "too_many_lines")


async def test_answers_and_results_count_like_files_and_end_what_could_still_begin(store):
    batch_id, file_id = begun_batch(store)
    other_id, path = store.files.new_path()
    path.write_bytes(b"x" * 100)
    store.files._max_bytes = 3 + 2 + 99  # the input, an answer, and less than the other file
    with pytest.raises(ResourceExhausted, match="--max-batch-dir-bytes"):
        store.files.add(TENANT, other_id, "in", "batch")
    await store.finish(batch_id, batches.COMPLETED)
    store.files._max_bytes = 3 + 3 - 1  # the answer has a line end as a result
    with pytest.raises(ResourceExhausted, match="have 6 B,"):
        store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)


def test_a_lease_that_has_passed_starts_no_second_run_at_the_gateway_that_runs_the_batch(store, monkeypatch):
    monkeypatch.setattr(sqlite, "LEASE_S", -1.0)
    batch_id, _ = begun_batch(store)
    assert store.take(1, running=[batch_id]) == []
    assert [row.id for row in store.take(1)] == [batch_id]


def test_a_batch_that_fails_midway_leaves_no_answer_that_counts(store):
    batch_id, file_id = begun_batch(store)
    store.fail(batch_id, [])
    assert store.batch(TENANT, batch_id).shown()["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    store.files._max_bytes = 3  # the input
    assert store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)


async def test_a_batch_that_is_taken_in_the_moment_of_the_stop_is_left_to_the_next_start(store):
    generator = SimpleNamespace(is_draining=False, has_replica=True)
    file_id, path = store.files.new_path()
    path.write_bytes(b"{}\n")
    store.files.add(TENANT, file_id, "in", "batch")
    batch = store.add_batch(TENANT, "", file_id, "/v1/completions", 60, None)
    runner = Batches(
        *(cast(Any, each) for each in (generator, store, None, None, None, None)), gateway_id="this", concurrency=1
    )
    take, stopping = store.take, list[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    is_taken = threading.Event()

    def slow_take(*arguments: Any) -> Any:
        loop.call_soon_threadsafe(begin_to_stop)
        assert is_taken.wait(10)
        return take(*arguments)

    def begin_to_stop() -> None:
        stopping.append(asyncio.create_task(runner.stop_runs()))
        loop.call_later(0.1, is_taken.set)

    store.take = slow_take
    await runner._look_after()
    await asyncio.gather(*stopping)
    assert not runner._runs
    assert [row.id for row in take(1)] == [batch.id]
