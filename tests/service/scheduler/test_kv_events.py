"""KV events with a subscriber written from vLLM's format: its mirror equals the cache."""

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from quire.runtime.settings import ConfigurationError
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.service.app import serve
from scheduler_svc.settings import SchedulerSettings
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.kv_subscriber import KvSubscriber, until_equal
from tests.support.scheduler_process import (
    GatewayStream,
    make_submit,
    running_scheduler,
    wait_attached,
    wait_nothing_in_use,
)

SMALL_POOL = FakeWorkerConfig(num_blocks=24, block_size=4)


@contextlib.asynccontextmanager
async def publishing(directory: Path, config: FakeWorkerConfig, **settings) -> AsyncIterator[tuple]:
    """A scheduler that publishes; yields its stub and its worker."""
    worker = FakeWorker(config)
    await worker.start(f"unix:{directory}/worker")

    events = {"kv_events": f"ipc://{directory}/events", "kv_events_replay": f"ipc://{directory}/replay"}
    async with running_scheduler(str(directory / "s.sock"), worker.address, **events, **settings) as stub:
        await wait_attached(stub)
        yield stub, worker
    await worker.stop()


@contextlib.contextmanager
def subscribed(directory: Path, topic: str = "") -> Iterator[KvSubscriber]:
    with KvSubscriber.open(f"ipc://{directory}/events", f"ipc://{directory}/replay", topic) as subscriber:
        yield subscriber


@contextlib.asynccontextmanager
async def following(subscriber: KvSubscriber) -> AsyncIterator[None]:
    task = asyncio.create_task(subscriber.follow())
    try:
        yield
        if task.done():
            task.result()
    finally:
        task.cancel()


async def run_requests(stub, handles: range, prompt_len: int = 18, max_tokens: int = 12) -> None:
    stream, _ = await GatewayStream.open(stub)
    for handle in handles:
        await stream.submit(make_submit(handle, prompt_len=prompt_len, max_tokens=max_tokens, tenant=f"t{handle % 2}"))
    await stream.read_until_over(*handles)
    stream.close()


def content_of(stub):
    """Names of the blocks in an idle scheduler's cache, as events name them."""

    async def content() -> set[int]:
        await wait_nothing_in_use(stub)
        blocks = (await stub.InspectBlocks(scheduler_pb2.InspectBlocksRequest())).cached
        return {int.from_bytes(block.block_hash[-8:], "big") for block in blocks}

    return content


async def test_the_mirror_is_the_cache_under_load_eviction_and_the_loss_of_worker_and_scheduler(tmp_path):
    with subscribed(tmp_path) as subscriber:
        async with following(subscriber):
            async with publishing(tmp_path, SMALL_POOL) as (stub, worker):
                await run_requests(stub, range(1, 21))
                await until_equal(subscriber, content_of(stub))
                assert subscriber.blocks
                assert subscriber.num_removed > 0
                assert subscriber.num_clears == 1
                await worker.restart()
                await run_requests(stub, range(21, 25))
                await until_equal(subscriber, content_of(stub))
                assert subscriber.num_clears >= 2
                assert all(len(tokens) == 4 for _, tokens in subscriber.blocks.values())
            num_clears = subscriber.num_clears
            async with publishing(tmp_path, SMALL_POOL) as (stub, _):
                await run_requests(stub, range(25, 29))
                await until_equal(subscriber, content_of(stub))
                assert subscriber.num_clears > num_clears


async def test_what_is_on_disk_is_a_medium_of_its_own(tmp_path):
    config = replace(SMALL_POOL, disk=tmp_path / "disk" / "blocks.kv")
    with subscribed(tmp_path) as subscriber:
        async with following(subscriber), publishing(tmp_path, config, kv_events_disk=True) as (stub, worker):
            for handle in range(1, 12):
                await run_requests(stub, range(handle, handle + 1))
                await until_on_disk(subscriber, worker, at_least=handle)
            await until_equal(subscriber, content_of(stub))
            assert subscriber.on_disk - subscriber.blocks.keys()
            await worker.restart()
            await until_on_disk(subscriber, worker, at_least=11)
            assert subscriber.num_clears >= 2


async def until_on_disk(subscriber: KvSubscriber, worker: FakeWorker, at_least: int) -> None:
    async with asyncio.timeout(60):
        # The other side is a process.
        while len(subscriber.on_disk) < at_least or subscriber.on_disk != worker.on_disk():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_whoever_subscribes_first_gets_all_and_who_comes_later_replays_it(tmp_path):
    async with publishing(tmp_path, SMALL_POOL, kv_events_topic="kv@pod@model", kv_events_format="map") as (stub, _):
        await run_requests(stub, range(1, 6))
        with subscribed(tmp_path, "kv@") as first, subscribed(tmp_path, "other") as deaf:
            async with following(first), following(deaf):
                await until_equal(first, content_of(stub))
                assert first.num_replays == 0
                with subscribed(tmp_path, "kv@pod@model") as late:
                    async with following(late):
                        # It may learn only from a new event that there were earlier ones.
                        handle = 6
                        while not late.next_number:
                            await run_requests(stub, range(handle, handle + 1))
                            handle += 1
                        await until_equal(late, content_of(stub))
                        assert late.num_replays == 1
                await until_equal(first, content_of(stub))
                assert deaf.next_number == 0


async def test_only_replays_of_the_right_form_are_answered(tmp_path, capsys):
    async with publishing(tmp_path, SMALL_POOL) as (stub, _):
        await run_requests(stub, range(1, 3))
        with subscribed(tmp_path) as subscriber:
            await subscriber.replay.send_multipart([b"1"])
            await subscriber.replay.send_multipart([b"", b"1"])
            await subscriber.replay.send_multipart([b"", (10**9).to_bytes(8, "big")])
            assert await subscriber.replay.recv_multipart() == [b"", b"\xff" * 8, b""]
    assert "it takes an id, 0 and 8" in capsys.readouterr().err


async def test_what_is_missing_or_taken_is_named(tmp_path, monkeypatch):
    # A killed scheduler left these sockets behind.
    for name in ("events", "replay"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / name))
    async with publishing(tmp_path, SMALL_POOL):
        for name, why in [("nowhere/events", "no such directory"), ("events", "the socket is in use")]:
            taken = SchedulerSettings(listen=f"unix:{tmp_path}/t", kv_events=f"ipc://{tmp_path}/{name}")
            with pytest.raises(ConfigurationError, match=rf"--kv-events ipc://.*/{name}: .*: {why}"):
                await serve(taken)
        assert (tmp_path / "events").is_socket()
    assert not {"events", "replay"} & {path.name for path in tmp_path.iterdir()}
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "scheduler_svc.service.kv_events")
    with pytest.raises(ConfigurationError, match=r"--kv-events needs zmq, .*; install quire-llm\[events\]"):
        await serve(SchedulerSettings(listen=f"unix:{tmp_path}/t", kv_events="ipc://nowhere"))
