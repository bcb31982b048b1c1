"""Transfers of blocks: a worker's scheduler offers its blocks to other workers, and fetches blocks from them or from a
tier below the pool.

Workers fetch blocks by their hashes, under a lease. Each received block is checked by its CRC-32, and then written in a
thread during the steps. No failure here is an error of a request: blocks that do not arrive are computed.

No byte may ever be wrong, therefore:

- Bytes go only between workers of one namespace (`WorkerInfo.kv_namespace`).
- A block that was written since it was offered is not sent: the inventory counts the writes of each block, before and
  after it is read.
- Blocks are written after all steps that came before the move. No later step names them until the move is answered.
- A move that took too long is answered, and the next scheduler that attaches may use all blocks. From then on nothing
  of that move, or of a session before, is written.
"""

import asyncio
import logging
import threading
import zlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from quire.messages.arrays import decode_int32, encode_int32
from quire.rpc.channel import open_channel
from quire.rpc.errors import FailedPrecondition, InvalidArgument, NotFound, invalid_field
from quire.rpc.server import UNLIMITED_MESSAGE_BYTES
from quire.rpc.tls import TlsIdentity
from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from quire.runtime.settings import ConfigurationError
from quire.worker.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.device.disk_tier import DiskTier
from worker_svc.device.seals import BlockStore
from worker_svc.metrics import WorkerMetrics
from worker_svc.step import HASH_BYTES, Int32Array, SealedBlocks, WorkerInfo, check_distinct

_MESSAGE_BYTES = 1 << 19
"""As many blocks as fit go in one message; at least one."""
_READ_AT_ONCE = 16
_OFFER_WAIT_S = 1.0
"""A fetch may come before the offer that it is about, which takes another way."""
_REPORT_INTERVAL_S = 0.5
T = TypeVar("T")
_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Offer:
    """Offered blocks, with their indices by hash; the number of writes of each block after the earlier steps; the
    number of present fetches, and the end of the offer."""

    blocks: Int32Array
    index_of: dict[bytes, int]
    writes: "Future[NDArray[np.int64]]"
    lease_s: float
    expires_at: float
    num_calls: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Blocks to fetch: of each its id here, and its hash. Without a `source` they come from the tier."""

    source: Any | None
    block_ids: Int32Array
    hashes: NDArray[np.uint8]
    timeout_s: float


OnFetched = Callable[[bytes, bool], object]
"""Called when blocks of a lease were fetched, with whether this call is over and no other one fetches from the
lease."""


def _ignore(lease: bytes, is_done: bool) -> None:
    """No scheduler is attached."""


class Transfers:
    """The blocks of one worker that come and go. Used by the event loop."""

    def __init__(
        self,
        info: WorkerInfo,
        store: BlockStore,
        call_device: Callable[[Callable[[], Any]], "Future[Any]"],
        tls: TlsIdentity | None = None,
        tier: DiskTier | None = None,
    ) -> None:
        """`call_device` runs a function when all steps before it are finished; `tls` identifies this worker."""
        self.metrics: WorkerMetrics | None = None
        self._info = info
        self._store = store
        self._call_device = call_device
        self._tls = tls
        self._tier = tier
        self._offers: dict[bytes, _Offer] = {}
        self._news = asyncio.Event()
        self._on_fetched: OnFetched = _ignore
        # Held while blocks are written, which only these moves may do.
        self._lock = threading.Lock()
        self._moving = set[Move]()

    def begin_session(self, on_fetched: OnFetched) -> None:
        """Another scheduler has the worker: nothing is offered, and no move that began before writes any more."""
        with self._lock:
            self._moving.clear()
        self._offers.clear()
        self._on_fetched = on_fetched

    def end_session(self) -> None:
        """The scheduler is gone. Its offers can be fetched until another scheduler attaches."""
        self._on_fetched = _ignore

    # Blocks that others fetch

    def offer(self, message: worker_pb2.OfferBlocks) -> None:
        """Lets others fetch blocks. InvalidArgument for blocks that the pool does not have."""
        blocks, hashes = self._blocks_of(message.block_ids, message.hashes, "offer_blocks")
        now = clock.monotonic()
        self._offers = {lease: each for lease, each in self._offers.items() if each.num_calls or each.expires_at > now}
        # A step with drafts counts as a writer of each block that its row may be in, even if the block turns out final.
        writes = self._call_device(partial(self._store.seals.num_writes, blocks))
        index_of = {content.tobytes(): index for index, content in enumerate(hashes)}
        lease_s = message.lease_ms / 1e3
        self._offers[message.lease] = _Offer(blocks, index_of, writes, lease_s, now + lease_s)
        self._news.set()
        self._news = asyncio.Event()

    async def serve_fetch(
        self, request: worker_pb2.FetchBlocksRequest
    ) -> AsyncGenerator[worker_pb2.FetchBlocksResponse, None]:
        """Serves one call of FetchBlocks."""
        if request.kv_namespace != self._info.kv_namespace or not self._info.kv_namespace:
            raise FailedPrecondition("the blocks of this worker mean something else", reason="KV_NAMESPACE")
        names = [request.hashes[start : start + HASH_BYTES] for start in range(0, len(request.hashes), HASH_BYTES)]
        offer = await self._offer_of(request.lease)
        offer.num_calls += 1
        reported_at = clock.monotonic()
        try:
            writes = await asyncio.shield(asyncio.wrap_future(offer.writes))
            pairs = [(index, offer.index_of[name]) for index, name in enumerate(names) if name in offer.index_of]
            wanted = [(index, offer.blocks[at], writes[at]) for index, at in pairs]
            for part in _parts(wanted, max(1, _MESSAGE_BYTES // self._store.block_bytes)):
                response = await asyncio.get_running_loop().run_in_executor(None, self._read, part)
                failpoint("worker.fetch.before_write")
                yield response
                self._count("sent", len(response.content))
                if (now := clock.monotonic()) - reported_at >= _REPORT_INTERVAL_S and self._offers.get(
                    request.lease
                ) is offer:
                    reported_at, offer.expires_at = now, now + offer.lease_s
                    self._on_fetched(request.lease, False)
        finally:
            offer.num_calls -= 1
            if not offer.num_calls and self._offers.get(request.lease) is offer:
                del self._offers[request.lease]
                self._on_fetched(request.lease, True)

    async def _offer_of(self, lease: bytes) -> _Offer:
        """Waits for the offer under a lease. Raises NotFound if there is none soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_OFFER_WAIT_S):
                while lease not in self._offers:
                    await self._news.wait()
        offer = self._offers.get(lease)
        if offer is None or (not offer.num_calls and offer.expires_at <= clock.monotonic()):
            raise NotFound("nothing is offered under this lease", reason="LEASE_UNKNOWN")
        return offer

    async def wait_until_fetched(self) -> None:
        """Waits until nothing is offered any more; for a worker that ends."""
        while self._offers:
            now = clock.monotonic()
            for lease in [lease for lease, each in self._offers.items() if not each.num_calls]:
                if self._offers[lease].expires_at <= now:
                    del self._offers[lease]
            await asyncio.sleep(_REPORT_INTERVAL_S / 10)

    def _read(self, part: Sequence[tuple[int, int, int]]) -> worker_pb2.FetchBlocksResponse:
        """Runs in a thread. Blocks that were written since they were offered are left out."""
        indices, ids, writes = np.array(part, np.int64).T
        blocks = ids.astype(np.int32)
        contents = self._store.read(blocks)
        is_current = self._store.seals.num_writes(blocks) == writes
        contents = contents[is_current]
        return worker_pb2.FetchBlocksResponse(
            indices=encode_int32(indices[is_current]),
            content=contents.tobytes(),
            crc32=_crc32s(contents),
        )

    # Blocks that are fetched

    def move_of(self, message: worker_pb2.MoveBlocks) -> Move:
        """InvalidArgument for blocks that the pool does not have."""
        blocks, hashes = self._blocks_of(message.block_ids, message.hashes, "move_blocks")
        check_distinct(blocks, "move_blocks.block_ids", "block")
        return Move(message.source if message.HasField("source") else None, blocks, hashes, message.timeout_ms / 1e3)

    def _blocks_of(self, block_ids: bytes, hashes: bytes, field: str) -> tuple[Int32Array, NDArray[np.uint8]]:
        blocks = decode_int32(block_ids, f"{field}.block_ids", minimum=0, below=self._info.pool.num_gpu_blocks)
        if len(hashes) != HASH_BYTES * len(blocks):
            raise invalid_field(f"{field}.hashes", f"has {len(hashes)} bytes for {len(blocks)} blocks")
        return blocks, np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES)

    def move(self, move: Move) -> Coroutine[Any, Any, list[int]]:
        """Returns a coroutine that fetches blocks for the present session and seals the received ones. Its result is
        the list of the other blocks' indices."""
        self._moving.add(move)
        return self._move(move)

    async def _move(self, move: Move) -> list[int]:
        came = set[int]()
        # In a task of its own: a gRPC call that is cancelled while it starts swallows the cancellation of its caller.
        fetching = asyncio.create_task(self._fetch(move, came))
        try:
            await asyncio.wait([fetching], timeout=move.timeout_s)
            problem = str(fetching.exception() or "") if fetching.done() else f"took over {move.timeout_s:g} s"
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
            indices = np.array(sorted(came), np.int64)
            self._end_transfer(move, SealedBlocks(move.block_ids[indices], move.hashes[indices]))
        failed = [index for index in range(len(move.block_ids)) if index not in came]
        if failed:
            if move.source is not None:
                self._count("failed", len(failed) * self._store.block_bytes)
            _logger.info(
                "%d of %d blocks did not come and are computed: %s",
                len(failed),
                len(move.block_ids),
                problem or "they were not sent, or damaged on the way",
            )
        return failed

    async def _fetch(self, move: Move, came: set[int]) -> None:
        """Adds the received blocks to `came`. Raises the error that keeps the others from coming."""
        if (source := move.source) is None:
            return await self._fetch_from_tier(move, came)
        if source.kv_namespace != self._info.kv_namespace or len(source.endpoints) != self._info.world_size:
            raise ConfigurationError("the blocks are of another kind")
        if len(move.block_ids):
            await self._begin_transfer(move)
        request = worker_pb2.FetchBlocksRequest(
            kv_namespace=source.kv_namespace, lease=source.lease, hashes=move.hashes.tobytes()
        )
        endpoint = source.endpoints[self._info.rank]
        async with open_channel(endpoint, tls=self._tls, max_message_bytes=UNLIMITED_MESSAGE_BYTES) as channel:
            call: Any = worker_pb2_grpc.WorkerServiceStub(channel).FetchBlocks(request)
            try:
                async for response in call:
                    write = partial(self._write_received, move, response)
                    came.update(await asyncio.get_running_loop().run_in_executor(None, write))
                    failpoint("worker.move.written")
            except grpc.aio.AioRpcError as error:
                raise ConnectionError(f"{error.code().name}: {error.details()}") from error
            finally:
                call.cancel()

    async def _fetch_from_tier(self, move: Move, came: set[int]) -> None:
        if (tier := self._tier) is None:
            raise ConfigurationError("this worker has no tier")
        await self._begin_transfer(move)
        for part in _parts(range(len(move.hashes)), _READ_AT_ONCE):
            came.update(await asyncio.wrap_future(tier.submit(partial(self._copy, move, tier, part))))
            failpoint("worker.move.written")

    async def _begin_transfer(self, move: Move) -> None:
        """Waits until all earlier steps are finished."""

        def begin() -> None:
            with self._lock:
                self._check(move)
                self._store.seals.begin_transfer(move.block_ids)

        await asyncio.wrap_future(self._call_device(begin))

    def _copy(self, move: Move, tier: DiskTier, part: Sequence[int]) -> list[int]:
        """Runs in a thread: writes the blocks with these indices that the tier has, and returns which these are."""
        contents = np.empty((len(part), self._store.block_bytes), np.uint8)
        found: list[int] = []
        for index in part:
            if tier.read(move.hashes[index].tobytes(), contents[len(found)]):
                found.append(index)
        self._write(move, np.array(found, np.int64), contents[: len(found)])
        return found

    def _write(self, move: Move, indices: NDArray[np.integer], contents: NDArray[np.uint8]) -> None:
        with self._lock:
            self._check(move)
            self._store.write(move.block_ids[indices], contents)

    def _write_received(self, move: Move, response: worker_pb2.FetchBlocksResponse) -> list[int]:
        """Runs in a thread: writes the blocks of one message that are whole, and returns their indices."""
        count, size = len(move.block_ids), self._store.block_bytes
        indices = decode_int32(response.indices, "indices", minimum=0, below=count)
        check_distinct(indices, "indices", "block")
        if len(response.content) != size * len(indices) or len(response.crc32) != len(indices):
            raise InvalidArgument(f"{len(indices)} blocks came with {len(response.content)} bytes")
        contents = np.frombuffer(response.content, np.uint8).reshape(len(indices), size)
        is_whole = np.array(_crc32s(contents), np.uint32) == np.array(response.crc32, np.uint32)
        self._write(move, indices[is_whole], contents[is_whole])
        self._count("received", int(is_whole.sum()) * size)
        return indices[is_whole].tolist()

    def _end_transfer(self, move: Move, sealed: SealedBlocks) -> None:
        """Whatever comes from now on is not written."""
        with self._lock:
            if move in self._moving and len(sealed.block_ids):
                self._store.seals.end_transfer(sealed)
            self._moving.discard(move)

    def _check(self, move: Move) -> None:
        if move not in self._moving:
            raise ConnectionError("it took too long, or another scheduler has the worker")

    def _count(self, what: str, num_bytes: int) -> None:
        if self.metrics is not None:
            self.metrics.moved(what, num_bytes)


def _crc32s(contents: NDArray[np.uint8]) -> list[int]:
    return [zlib.crc32(each.data) for each in np.ascontiguousarray(contents)]


def _parts(wanted: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(wanted), size):
        yield wanted[start : start + size]
