"""Blocks move between two workers over gRPC: only whole, sealed blocks of one namespace."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32, encode_int32
from quire.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, from_rpc_error
from quire.service.compatibility import ModelFingerprint
from quire.worker.v1 import worker_pb2
from tests.support.tiny_causal_lm import TinyCausalLM
from tests.support.worker_client import StepClient, attached_client, make_assign, make_batch, worker_stub
from tests.support.worker_server import SMALL_WORKER, running_worker
from worker_svc.device.disk_tier import BlockFile
from worker_svc.device.seals import SealInventory
from worker_svc.protocol import transfers

MODEL = ModelFingerprint("a", "b", "c")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
LEASE = b"a lease"
HASHES = [hashlib.sha256(bytes([number])).digest() for number in range(3)]


@dataclass
class Pair:
    """Two workers, each with a scheduler's session."""

    addresses: list[str]
    source: StepClient
    target: StepClient

    async def offer(self, blocks: list[int], hashes: list[bytes], lease: bytes = LEASE, lease_ms: int = 60_000) -> None:
        offer = worker_pb2.OfferBlocks(
            lease=lease, block_ids=encode_int32(blocks), hashes=b"".join(hashes), lease_ms=lease_ms
        )
        await self.source.write(worker_pb2.RunRequest(offer_blocks=offer))

    async def move(self, blocks: list[int], hashes: list[bytes], **source: Any) -> list[int]:
        """Moves blocks; returns the indices of blocks that did not come."""
        fields: dict[str, Any] = {
            "kv_namespace": self.target.info.kv_namespace,
            "endpoints": self.addresses[:1],
            "lease": LEASE,
        }
        move = worker_pb2.MoveBlocks(
            number=1,
            source=common_pb2.KvSource(**fields | source),
            hashes=b"".join(hashes),
            block_ids=encode_int32(blocks),
            timeout_ms=5_000,
        )
        await self.target.write(worker_pb2.RunRequest(move_blocks=move))
        return decode_int32((await answer(self.target, "moved")).failed, "failed").tolist()


async def answer(client: StepClient, kind: str) -> Any:
    while (response := await client._read()).WhichOneof("message") != kind:
        pass
    return getattr(response, kind)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    directories = [tmp_path / name for name in ("source", "target")]
    for directory in directories:
        directory.mkdir()
    async with (
        running_worker(directories[0], TinyCausalLM(), fingerprint=MODEL) as first,
        running_worker(directories[1], TinyCausalLM(), fingerprint=MODEL) as second,
        attached_client(first, 1) as source,
        attached_client(second, 1) as target,
    ):
        yield Pair([first, second], source, target)


async def compute(
    client: StepClient, blocks: list[int], computed: int = 0, row: int = 0, prompt: list[int] = PROMPT
) -> tuple[bytes, bytes]:
    """The next token after the prompt and its log probability; the pool has the first `computed` tokens."""
    result = await client.run(
        assign=[make_assign(row, prompt, blocks, logprobs=0)],
        batch=make_batch([row], [len(prompt) - computed], [computed]),
    )
    return result.token_ids, result.token_logprobs.chosen_logprobs


async def test_a_sequence_goes_on_from_the_blocks_of_another_worker(pair: Pair) -> None:
    await compute(pair.source, [7, 3, 5])
    # Only the last token, as at the other worker.
    drawn = await compute(pair.source, [7, 3, 6], computed=8, row=1)
    await pair.offer([7, 3], HASHES[:2])
    assert await pair.move([11, 12], HASHES[:2]) == []
    assert (await answer(pair.source, "fetched")).done
    assert await compute(pair.target, [11, 12, 13], computed=8) == drawn
    # Zeros in the blocks must give another token, or this test would show nothing.
    assert await compute(pair.target, [21, 22, 23], computed=8, row=1) != drawn
    async with attached_client(pair.addresses[1], 2) as later:
        sealed = later.attached
    assert decode_int32(sealed.sealed_block_ids, "sealed").tolist() == [11, 12]
    assert sealed.sealed_hashes == b"".join(HASHES[:2])


async def test_blocks_that_are_not_offered_or_were_written_since_do_not_come(pair: Pair) -> None:
    await compute(pair.source, [7, 3, 5])
    await pair.offer([7, 3], HASHES[:2])
    await compute(pair.source, [9, 3, 6], row=1)
    assert await pair.move([11, 12, 13], HASHES) == [1, 2]


async def test_blocks_come_that_a_step_before_the_offer_is_yet_to_count_as_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    await compute(pair.source, [7, 3, 5])
    is_offered = threading.Event()
    begin_write, offer = SealInventory.begin_write, transfers.Transfers.offer

    def begin_late(seals: SealInventory, block_ids: np.ndarray, step_number: int) -> None:
        assert is_offered.wait(60)
        begin_write(seals, block_ids, step_number)

    def offer_first(of: transfers.Transfers, message: worker_pb2.OfferBlocks) -> None:
        offer(of, message)
        is_offered.set()

    monkeypatch.setattr(SealInventory, "begin_write", begin_late)
    monkeypatch.setattr(transfers.Transfers, "offer", offer_first)
    again = make_assign(1, PROMPT, [7, 3, 5])
    await pair.source.send(pair.source.step(assign=[again], batch=make_batch([1], [len(PROMPT)], [0])))
    await pair.offer([7, 3], HASHES[:2])
    await pair.source.result()
    assert await pair.move([11, 12], HASHES[:2]) == []


@pytest.mark.parametrize(
    "source", [{"lease": b"another"}, {"kv_namespace": "another"}, {"endpoints": ["unix:/nowhere"]}, {"endpoints": []}]
)
async def test_what_cannot_be_fetched_is_no_error(pair: Pair, source: dict[str, Any]) -> None:
    await pair.offer([7], HASHES[:1])
    assert await pair.move([11], HASHES[:1], **source) == [0]
    assert await compute(pair.target, [11, 12, 13]) == await compute(pair.source, [1, 2, 3])


async def test_a_lease_is_over_after_its_time(pair: Pair) -> None:
    await pair.offer([7], HASHES[:1], lease_ms=1)
    await asyncio.sleep(0.05)
    assert await pair.move([11], HASHES[:1]) == [0]


async def test_nothing_is_offered_any_more_once_another_scheduler_is_attached(pair: Pair) -> None:
    await pair.offer([7], HASHES[:1])
    async with attached_client(pair.addresses[0], 2):
        assert await pair.move([11], HASHES[:1]) == [0]


@pytest.mark.parametrize(
    ("fields", "error"), [({"kv_namespace": "another"}, FailedPrecondition), ({"lease": b"another"}, NotFound)]
)
async def test_a_caller_of_another_kind_is_refused(pair: Pair, fields: dict[str, Any], error: type) -> None:
    await pair.offer([7], HASHES[:1])
    request: dict[str, Any] = {
        "kv_namespace": pair.source.info.kv_namespace,
        "lease": LEASE,
        "hashes": HASHES[0],
    } | fields
    async with worker_stub(pair.addresses[0]) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in stub.FetchBlocks(worker_pb2.FetchBlocksRequest(**request)):
                pass
    assert isinstance(from_rpc_error(raised.value), error)


@pytest.mark.parametrize(
    ("blocks", "hashes"), [([40], HASHES[:1]), ([1, 1], HASHES[:2]), ([1, 2], HASHES[:1])], ids=str
)
async def test_blocks_that_make_no_sense_end_the_stream(pair: Pair, blocks: list[int], hashes: list[bytes]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await pair.move(blocks, hashes)
    assert isinstance(from_rpc_error(raised.value), InvalidArgument)


@pytest.fixture
async def with_disk(tmp_path: Path) -> AsyncIterator[StepClient]:
    settings = replace(SMALL_WORKER, kv_disk=tmp_path / "kv", kv_disk_space=1 << 20)
    async with (
        running_worker(tmp_path, TinyCausalLM(), settings, fingerprint=MODEL) as address,
        attached_client(address, 1) as client,
    ):
        yield client


async def ask(client: StepClient, blocks: list[int], hashes: list[bytes], timeout_ms: int) -> None:
    move = worker_pb2.MoveBlocks(
        number=1, hashes=b"".join(hashes), block_ids=encode_int32(blocks), timeout_ms=timeout_ms
    )
    await client.write(worker_pb2.RunRequest(move_blocks=move))


async def from_disk(client: StepClient, blocks: list[int], hashes: list[bytes], timeout_ms: int = 5_000) -> list[int]:
    """Reads blocks from disk; returns the indices of blocks that did not come."""
    await ask(client, blocks, hashes, timeout_ms)
    return decode_int32((await answer(client, "moved")).failed, "failed").tolist()


async def seal(client: StepClient, blocks: list[int]) -> worker_pb2.TierChanged:
    """Computes the prompt into these blocks and seals the full ones. Returns the new blocks on disk."""
    await client.run(
        assign=[make_assign(0, PROMPT, blocks)],
        batch=make_batch([0], [len(PROMPT)], [0]),
        sealed_block_ids=encode_int32(blocks[:2]),
        sealed_hashes=b"".join(HASHES[:2]),
    )
    return await answer(client, "tier_changed")


async def test_a_sequence_goes_on_from_the_blocks_on_disk(with_disk: StepClient) -> None:
    told = await seal(with_disk, [7, 3, 5])
    assert (decode_int32(told.slots, "slots").tolist(), told.hashes) == ([0, 1], HASHES[1] + HASHES[0])
    drawn = await compute(with_disk, [7, 3, 6], computed=8, row=1)
    assert await from_disk(with_disk, [11, 12, 13], HASHES) == [2]
    assert await compute(with_disk, [11, 12, 14], computed=8, row=2) == drawn


async def test_a_scheduler_that_attaches_is_told_what_is_on_disk(with_disk: StepClient, tmp_path: Path) -> None:
    await seal(with_disk, [7, 3, 5])
    async with attached_client(f"unix:{tmp_path / 'worker'}", 2) as later:
        assert (await answer(later, "tier_changed")).hashes == HASHES[1] + HASHES[0]


async def test_damage_on_disk_is_told_and_is_no_error(with_disk: StepClient, tmp_path: Path) -> None:
    await seal(with_disk, [7, 3, 5])
    path = tmp_path / "kv" / "blocks.kv"
    data = bytearray(path.read_bytes())
    data[4096 + 48 + 100] ^= 1
    path.write_bytes(data)
    await ask(with_disk, [11, 12], HASHES[:2], 5_000)
    told = await answer(with_disk, "tier_changed")
    assert (decode_int32(told.slots, "slots").tolist(), told.hashes) == ([0], b"")
    assert decode_int32((await answer(with_disk, "moved")).failed, "failed").tolist() == [1]


async def test_what_comes_from_a_slow_disk_after_its_time_is_not_written(
    with_disk: StepClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seal(with_disk, [7, 3, 5])
    is_reading, may_read = threading.Event(), threading.Event()
    read = BlockFile.read

    def read_late(file: BlockFile, name: bytes, into: np.ndarray) -> bool:
        is_reading.set()
        assert may_read.wait(60)
        return read(file, name, into)

    monkeypatch.setattr(BlockFile, "read", read_late)
    assert await from_disk(with_disk, [11, 12], HASHES[:2], timeout_ms=1_000) == [0, 1]
    assert is_reading.is_set()
    # Another sequence now has the blocks.
    other = PROMPT[::-1]
    await compute(with_disk, [11, 12, 14], row=1, prompt=other)
    drawn = await compute(with_disk, [11, 12, 15], computed=8, row=2, prompt=other)
    may_read.set()
    assert await from_disk(with_disk, [20], HASHES[:1]) == []
    assert await compute(with_disk, [11, 12, 16], computed=8, row=3, prompt=other) == drawn


async def test_blocks_that_came_before_the_memory_was_released_are_not_final(
    with_disk: StepClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await seal(with_disk, [7, 3, 5])
    has_first, may_read = threading.Event(), threading.Event()
    read = BlockFile.read

    def read_one(file: BlockFile, name: bytes, into: np.ndarray) -> bool:
        if name == HASHES[1]:
            has_first.set()
            assert may_read.wait(60)
        return read(file, name, into)

    monkeypatch.setattr(BlockFile, "read", read_one)
    monkeypatch.setattr(transfers, "_READ_AT_ONCE", 1)
    await ask(with_disk, [11, 12], HASHES[:2], 60_000)
    assert await asyncio.to_thread(has_first.wait, 60)
    async with worker_stub(f"unix:{tmp_path / 'worker'}") as stub:
        await stub.ReleaseMemory(worker_pb2.ReleaseMemoryRequest(scheduler_epoch=2))
    may_read.set()
    async with attached_client(f"unix:{tmp_path / 'worker'}", 3) as later:
        assert not later.attached.sealed_block_ids
