"""The thread of a store, where tenants and the gateway take turns, and its transactions."""

import asyncio
import sqlite3
import threading
from collections.abc import Coroutine
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.auth.caller import Access, Caller, set_caller
from gateway.auth.quota import Account, Limits
from gateway.sqlite import Store


class Blobs(Store):
    tables = "CREATE TABLE IF NOT EXISTS blobs (data BLOB);"
    description = "the store of blobs"


async def call(tenant: str | None, work: Coroutine[Any, Any, object]) -> None:
    if tenant is not None:
        set_caller(Caller(tenant, Access(), Account(Limits(), lambda: 0.0)))
    await work


async def test_nobody_waits_for_the_many_calls_of_another_tenant() -> None:
    store, has_begun, is_free = Blobs(None, "--blobs"), threading.Event(), threading.Event()
    done = list[str]()
    asked = [("many", "a"), ("many", "b"), ("many", "c"), (None, "own"), ("one", "d"), ("one", "e")]
    async with asyncio.TaskGroup() as group:
        group.create_task(call("many", store.run(lambda: has_begun.set() or is_free.wait(10))))
        assert await asyncio.to_thread(has_begun.wait, 10)
        tasks = [group.create_task(call(tenant, store.run(done.append, name))) for tenant, name in asked]
        await asyncio.sleep(0)
        # A cancelled call gives up its work if that has not begun, and its turn.
        tasks[1].cancel()
        await asyncio.wait(tasks[1:2])
        is_free.set()
    assert done == ["a", "own", "d", "e", "c"]
    store.close()


def test_a_store_waits_while_another_gateway_makes_its_file(tmp_path: Path) -> None:
    path = tmp_path / "blobs.db"
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.2, lambda: other.execute("COMMIT"))
        timer.start()
        store = Blobs(path, "--blobs")
        timer.join()
    store.change("INSERT INTO blobs VALUES (?)", b"small")
    assert store.rows("SELECT data FROM blobs") == [(b"small",)]
    store.close()


async def test_what_the_work_raises_is_raised_and_the_store_goes_on() -> None:
    store = Blobs(None, "--blobs")
    with pytest.raises(ZeroDivisionError):
        await store.run(lambda: 1 // 0)
    assert await store.run(int, "5") == 5
    store.close()


def test_a_full_disk_in_a_transaction_is_named_and_the_next_transaction_begins() -> None:
    store = Blobs(None, "--blobs")
    store.rows("PRAGMA max_page_count = 5")
    with pytest.raises(sqlite3.Error, match="full"), store.changing():
        store.change("INSERT INTO blobs VALUES (?)", bytes(100_000))
    with store.changing():
        store.change("INSERT INTO blobs VALUES (?)", b"small")
    store.close()
