"""The worker's service: one loaded worker, and its Run calls with steps in and answers out.

The reader of a call judges, checks and queues steps; the device threads post outputs to the event loop; the generator
`responses` sends all ready answers. An error that the reader finds is sent after the answers to all earlier steps, so
that the scheduler knows the last step that ran.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import grpc.aio

from quire.messages.arrays import encode_int32
from quire.model_files.adapter_files import UnusableAdapterError
from quire.model_files.progress import ASLEEP_WITHOUT_WEIGHTS, STARTING, LoadProgress
from quire.rpc.errors import (
    FailedPrecondition,
    Internal,
    NotFound,
    QuireError,
    Unavailable,
    Unimplemented,
    invalid_field,
)
from quire.rpc.server import UNLIMITED_MESSAGE_BYTES, RpcServer
from quire.rpc.tls import TlsIdentity
from quire.runtime import clock
from quire.runtime.failpoint import failpoint
from quire.service.compatibility import WORKER_PROTOCOL, ProtocolVersions
from quire.tracing import Tracer
from quire.worker.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.device.device_loop import DeviceLoop, StepLane, StepRunner
from worker_svc.device.disk_tier import DiskTier
from worker_svc.device.row_ledger import RowLedger
from worker_svc.device.seals import BlockStore
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.session import Session, Sessions
from worker_svc.protocol.step_messages import (
    StepDecoder,
    acknowledgement,
    attached_message,
    epoch_of,
    protocol_of,
    result_message,
    tier_messages,
)
from worker_svc.protocol.tracing import PrefillSpans
from worker_svc.protocol.transfers import OnFetched, Transfers
from worker_svc.step import LoadAdapter, SealedBlocks, StepOutput, SupersededError, WorkerInfo

HEARTBEAT_INTERVAL_S = 0.5
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
FETCH_BLOCKS = f"/{SERVICE_NAME}/FetchBlocks"
_RETRY_WHILE_LOADING_MS = 200
_HELD_WHILE_LOADING_S = 0.25
"""At least a scheduler's delay between two calls, so that there always is a waiting call."""
_NO_STEP = 0
"""The number of the step at which ranks agree on an epoch, before the first step of a session."""
_RANKS_TIMEOUT_S = 3.0
"""Less than a scheduler waits for the answer, so that it learns of missing ranks."""
_logger = logging.getLogger(__name__)


class SealingRunner(StepRunner, Protocol):
    """A runner that knows the blocks whose content is final."""

    def sealed_blocks(self) -> SealedBlocks: ...

    def release_memory(self) -> None: ...


class Adapters(Protocol):
    """`AdapterSlots`, or a fake. All but `start_load` is for the thread that runs the steps."""

    @property
    def num_bytes(self) -> int: ...

    def start_load(self, directory: Path, digest: bytes) -> "Future[Any]": ...

    def put(self, slot: int, loaded: Any) -> None: ...

    def clear(self) -> None: ...


class Worker:
    """One loaded worker: its sessions, its rows, and the threads that run its steps. Used by the event loop."""

    def __init__(
        self,
        info: WorkerInfo,
        runner: SealingRunner,
        device_loop: DeviceLoop,
        agree: Callable[[int, int], object] = lambda epoch, step_id: None,
        prepare: Callable[[bytes], "Future[Any] | None"] | None = None,
        adapters: Adapters | None = None,
        blocks: BlockStore | None = None,
        tls: TlsIdentity | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        """
        Args:
            agree: `Ranks.agree`, for a worker of several ranks.
            prepare: compiles the constraint of a serialized RowSampling, and returns None if it has none to compile;
                without `prepare` no row has a constraint.
            adapters: there are some if `info.limits.max_adapters` is above 0.
            blocks: the contents of blocks, if `info.kv_namespace` names their format; `tls` identifies this worker to
                workers that it fetches blocks from.
            disk: a further place for final blocks.
        """
        self.info = info
        self.decoder = StepDecoder(info)
        self.runner = runner
        self.device_loop = device_loop
        self._agree = agree
        self._prepare = prepare
        self.ledger = RowLedger(info.pool, info.model, info.limits)
        self._sessions = Sessions(info.worker_generation, info.limits.max_steps_in_flight)
        self._session: Session | None = None
        self._supersede: Callable[[QuireError], None] | None = None
        # The session of the last `release_memory`, with which this process ends.
        self._releasing: Session | None = None
        self._adapters = adapters
        # The load of each slot that has not ended.
        self._reads: dict[int, asyncio.Future[Any]] = {}
        self.disk = disk
        self.transfers = None if blocks is None else Transfers(info, blocks, device_loop.call, tls, disk)

    def attach(
        self,
        epoch: int,
        on_superseded: Callable[[QuireError], None],
        on_fetched: OnFetched = lambda lease, is_done: None,
    ) -> Session:
        """Gives the worker to a scheduler: the previous session ends, all rows are released, and blocks that move for
        it get no seal any more.

        Args:
            on_superseded: Called when a higher epoch takes the worker away from this session.
            on_fetched: Called with fetched blocks that this session offers.

        Raises:
            FailedPrecondition: the epoch is stale, or attached at this moment.
        """
        session = self._sessions.attach(epoch, clock.monotonic())
        if self._supersede is not None:
            self._supersede(SupersededError(f"epoch {epoch} has taken this worker over"))
        self._session, self._supersede = session, on_superseded
        self.ledger.reset()
        if self.transfers is not None:
            self.transfers.begin_session(on_fetched)
        self._cancel_reads()
        return session

    def detach(self, session: Session) -> None:
        """Ends a session, whose scheduler gets no further messages. Idempotent, also if another one has begun."""
        session.end()
        if self._session is session:
            self._session = self._supersede = None
            if self.transfers is not None:
                self.transfers.end_session()
            self._cancel_reads()

    def _cancel_reads(self) -> None:
        """Cancels the reads of adapters, which no caller waits for any more."""
        for slot in list(self._reads):
            self._reads.pop(slot).cancel()

    async def sealed_blocks(self, epoch: int, ranks_timeout_s: float = _RANKS_TIMEOUT_S) -> SealedBlocks:
        """Waits until all steps of earlier sessions are finished; returns the blocks whose content is final then.

        Each of several ranks waits until all ranks have reached this epoch. A rank that waits in a step which its
        scheduler did not send to all ranks drops that step meanwhile.

        Raises:
            SupersededError: another rank is at a higher epoch.
            Unavailable: no step runs, and not all ranks have come within the timeout. The device still waits until they
                reach this epoch or a higher one.
        """

        def take_inventory() -> SealedBlocks:
            self._agree(epoch, _NO_STEP)
            if self._adapters is not None:
                self._adapters.clear()
            return self.runner.sealed_blocks()

        inventory = self.device_loop.call(take_inventory)
        taken = asyncio.wrap_future(inventory)
        try:
            while not taken.done():
                await asyncio.wait([taken], timeout=ranks_timeout_s)
                if not taken.done() and not self.busy_ms() and self.info.world_size > 1:
                    raise Unavailable(
                        f"this is rank {self.info.rank} of {self.info.world_size}, and not all were attached under "
                        f"epoch {epoch} within {ranks_timeout_s:g} s; --workers of a scheduler must name all ranks of "
                        "one group, in order"
                    )
            return taken.result()
        finally:
            # Directly: the event loop's future would pass it on in the loop's next turn.
            inventory.cancel()
            if not taken.cancel():
                taken.exception()  # Otherwise the event loop logs one that came too late.

    async def release_memory(self, epoch: int, stopping: threading.Event | None = None) -> None:
        """Gives the memory of the KV pool back to the system, after all steps of earlier sessions.

        Args:
            stopping: this process ends then, once all ranks are to end; it is set before another one may, and cleared
                where this one does not.

        Raises:
            FailedPrecondition: as `attach`.
            Unimplemented: the pool is on a device whose memory goes back only when the process ends; nothing was
                changed.
        """
        device = self.info.model.device
        if device != "cpu" and stopping is None:
            raise Unimplemented(
                f"the KV pool is on {device}, whose memory goes back only with the weights: use level 2",
                reason="POOL_STAYS",
            )
        session = self.attach(epoch, lambda error: None)
        if stopping is not None:
            self._releasing = session
            stopping.set()

        def release() -> None:
            # A rank may wait for the others in a step that they never got, until they are at a higher epoch.
            self._agree(epoch, _NO_STEP)
            self.runner.release_memory()

        try:
            await asyncio.wrap_future(self.device_loop.call(release))
        except BaseException:
            # Else one of a higher epoch is underway.
            if stopping is not None and self._releasing is session:
                stopping.clear()
            raise
        finally:
            self.detach(session)

    def prepare(self, row_sampling: bytes, on_done: Callable[[], object]) -> None:
        """Compiles the constraint of a row to come; then calls `on_done`, in any thread, whether it could or not."""
        compiled = None if self._prepare is None else self._prepare(row_sampling)
        if compiled is None:
            on_done()
        else:
            compiled.add_done_callback(lambda _: on_done())

    def load_adapter(self, load: LoadAdapter) -> Coroutine[Any, Any, str | None]:
        """Begins to load an adapter, which is read during the steps. The returned coroutine puts it into its slot when
        the steps queued before are finished; its result is why this failed, or None. An earlier unfinished load of the
        slot fails: it may never end."""
        assert self._adapters is not None, "a slot, which `StepDecoder` has checked"
        self.ledger.begin_load(load.slot)
        before = self._reads.get(load.slot)
        read = self._reads[load.slot] = asyncio.wrap_future(self._adapters.start_load(load.directory, load.digest))
        if before is not None:
            before.cancel()
        return self._load(load, self._adapters, read)

    async def _load(self, load: LoadAdapter, adapters: Adapters, read: asyncio.Future[Any]) -> str | None:
        def is_last() -> bool:
            return self._reads.get(load.slot) is read

        def put(loaded: Any) -> None:
            if is_last():
                adapters.put(load.slot, loaded)

        failure: str | None = None
        try:
            loaded = await read
            await asyncio.wrap_future(self.device_loop.call(partial(put, loaded)))
        except asyncio.CancelledError:
            if is_last():
                # It is the session that ends.
                raise
        except Exception as error:
            failure = str(error)
            if not isinstance(error, UnusableAdapterError):
                _logger.exception("adapter %s could not be loaded", load.directory)
                failure = f"adapter {load.directory} could not be loaded: {type(error).__name__}: {error}"
            await asyncio.wrap_future(self.device_loop.call(partial(put, None)))
        if not is_last():
            return f"adapter {load.directory}: the next load of slot {load.slot} came before it was read"
        del self._reads[load.slot]
        self.ledger.end_load(load.slot, failure is None)
        return failure

    def adapter_bytes(self) -> int:
        """Memory that the adapters in all slots take."""
        return 0 if self._adapters is None else self._adapters.num_bytes

    def busy_ms(self) -> int:
        """Milliseconds that the device has been in its current step; 0 if idle."""
        return self.device_loop.busy_ms()


class StepStream:
    """The state of one Run call. FailedPrecondition when the epoch is refused."""

    def __init__(
        self, worker: Worker, metrics: WorkerMetrics, tracer: Tracer | None, epoch: int, *, heartbeat_interval_s: float
    ) -> None:
        self._worker = worker
        self._metrics = metrics
        self._spans = PrefillSpans(tracer, worker.info.rank)
        self._heartbeat_interval_s = heartbeat_interval_s
        # None: everything was read, and everything is answered.
        self._outgoing: asyncio.Queue[worker_pb2.RunResponse | QuireError | None] = asyncio.Queue()
        # Adapters that are loaded, and blocks that are fetched.
        self._beside: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._session = worker.attach(epoch, self._outgoing.put_nowait, self._send_fetched)
        self._post = post = asyncio.get_running_loop().call_soon_threadsafe
        self._answer = result_message if worker.info.rank == 0 else acknowledgement
        self._lane = StepLane(
            on_output=lambda output: post(self._finish, output),
            on_failure=lambda step_id, error: post(self._fail, step_id, error),
        )

    async def responses(
        self, requests: AsyncIterator[worker_pb2.RunRequest]
    ) -> AsyncGenerator[worker_pb2.RunResponse, None]:
        """Serves the call after its first message. Raises the QuireError that ends it."""
        session = self._session
        _logger.info("epoch %d attached", session.epoch)
        tasks: list[asyncio.Task[None]] = []
        try:
            sealed = await self._worker.sealed_blocks(session.epoch)
            failpoint("worker.attach.before_inventory")
            self._metrics.sessions.inc()
            yield attached_message(session.epoch, self._worker.info, sealed)
            if self._worker.disk is not None:
                self._worker.disk.follow(self._send_tier_changes)
            tasks = [asyncio.create_task(self._read(requests)), asyncio.create_task(self._send_heartbeats())]
            while (item := await self._outgoing.get()) is not None:
                if isinstance(item, QuireError):
                    raise item
                yield item
        finally:
            session.end()
            self._spans.close()
            tasks += self._beside
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if self._worker.disk is not None:
                self._worker.disk.unfollow(self._send_tier_changes)
            self._worker.detach(session)
            _logger.info("epoch %d ended after step %d", session.epoch, session.last_finished_step_id)

    async def _read(self, requests: AsyncIterator[worker_pb2.RunRequest]) -> None:
        end: QuireError | None = None
        try:
            async for request in requests:
                self._handle(request)
        except QuireError as error:
            end = error
        except Exception as error:
            _logger.exception("a step could not be taken")
            end = Internal(f"the step could not be taken: {error}", reason="UNEXPECTED")
        await self._idle.wait()
        self._outgoing.put_nowait(end)

    def _handle(self, request: worker_pb2.RunRequest) -> None:
        """Begins the work of a message.

        Raises:
            FailedPrecondition: it attaches again.
            InvalidArgument: it holds nothing, or something that this worker cannot do.
        """
        match request.WhichOneof("message"):
            case "step":
                self._queue_step(request.step)
            case "move_blocks":
                self._start_moving(request.move_blocks)
            case "offer_blocks":
                self._transfers.offer(request.offer_blocks)
            case "prepare":
                prepared = worker_pb2.RunResponse(prepared={"number": request.prepare.number})
                self._worker.prepare(request.prepare.row_sampling, lambda: self._send(prepared))
            case "load_adapter":
                self._start_loading(request.load_adapter)
            case "attach":
                problem = "this stream is attached; open another to attach again"
                raise FailedPrecondition(problem, reason="ALREADY_ATTACHED")
            case _:
                raise invalid_field("message", "is missing; expected step")

    def _send_tier_changes(self, changes: Sequence[tuple[int, bytes | None]]) -> None:
        for message in tier_messages(changes):
            self._send(message)

    def _send(self, message: worker_pb2.RunResponse) -> None:
        """Sends a message; for other threads."""
        # The loop may be closed by then: this process ends.
        with suppress(RuntimeError):
            self._post(self._outgoing.put_nowait, message)

    def _start_loading(self, message: worker_pb2.LoadAdapter) -> None:
        loading = self._worker.load_adapter(self._worker.decoder.load_adapter(message))

        async def load() -> worker_pb2.RunResponse:
            loaded = worker_pb2.AdapterLoaded(number=message.number, failure=await loading)
            return worker_pb2.RunResponse(adapter_loaded=loaded)

        self._answer_later(load())

    @property
    def _transfers(self) -> Transfers:
        """Raises InvalidArgument where the blocks of this worker go nowhere."""
        if self._worker.transfers is None:
            raise invalid_field("message", "moves blocks, and this worker has no kv_namespace")
        return self._worker.transfers

    def _send_fetched(self, lease: bytes, is_done: bool) -> None:
        fetched = worker_pb2.BlocksFetched(lease=lease, done=is_done)
        self._outgoing.put_nowait(worker_pb2.RunResponse(fetched=fetched))

    def _start_moving(self, message: worker_pb2.MoveBlocks) -> None:
        moving = self._transfers.move(self._transfers.move_of(message))

        async def move() -> worker_pb2.RunResponse:
            moved = worker_pb2.BlocksMoved(number=message.number, failed=encode_int32(await moving))
            return worker_pb2.RunResponse(moved=moved)

        self._answer_later(move())

    def _answer_later(self, work: Coroutine[Any, Any, worker_pb2.RunResponse]) -> None:
        """Runs a task during the steps, and sends its answer, unless the session ends before."""

        async def answer() -> None:
            self._outgoing.put_nowait(await work)

        task = asyncio.create_task(answer())
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def _queue_step(self, message: worker_pb2.StepRequest) -> None:
        """Queues the next step when it is valid."""
        self._session.check(message)
        admitted = self._worker.ledger.admit(self._worker.decoder.decode(message))
        self._session.start(message.step_id)
        failpoint("worker.step.admitted")
        self._spans.step_starts(admitted.step, {each.row: each.traceparent for each in message.traced})
        self._idle.clear()
        if self._worker.disk is not None:
            pool = self._worker.info.pool
            self._worker.disk.hit(admitted.step.cached_blocks(pool.block_size, pool.groups))
        self._worker.device_loop.submit(self._lane, admitted)

    def _finish(self, output: StepOutput) -> None:
        self._session.finish(output.step_id)
        if not self._session.ended:
            self._worker.ledger.record_output(output)
        self._spans.step_ends(output)
        self._metrics.step_finished(output)
        self._outgoing.put_nowait(self._answer(output))
        if not self._session.num_in_flight:
            self._idle.set()

    def _fail(self, step_id: int, error: BaseException) -> None:
        self._session.end()
        if isinstance(error, SupersededError):
            self._outgoing.put_nowait(error)
            return
        self._metrics.step_failures.inc()
        detail = f"step {step_id} failed on the device: {type(error).__name__}: {error}"
        self._outgoing.put_nowait(Internal(detail, reason="STEP_FAILED"))

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            # Any other response is a sign of life too, and a peer that does not read must not fill memory.
            if self._outgoing.empty():
                last, busy_ms = self._session.last_finished_step_id, self._worker.busy_ms()
                heartbeat = worker_pb2.Heartbeat(last_step_id=last, busy_ms=busy_ms)
                self._outgoing.put_nowait(worker_pb2.RunResponse(heartbeat=heartbeat))


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """quire.worker.v1.WorkerService of one worker. Until it is loaded, every call is UNAVAILABLE, with the progress of
    loading; Run waits a moment before, in which the worker may become ready.

    Attributes:
        wanted: A scheduler has called Run.
        discarded: The process is to end, and with it the weights; calls are for the next one.
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        tracer: Tracer | None = None,
        *,
        heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S,
        stopping: threading.Event | None = None,
    ) -> None:
        """`stopping` is set before other ranks may end, where the weights are discarded."""
        self.wanted, self.discarded = asyncio.Event(), asyncio.Event()
        self._stopping = stopping or threading.Event()
        self._metrics = metrics
        self._tracer = tracer
        self._heartbeat_interval_s = heartbeat_interval_s
        self._loaded: Worker | None = None
        self._opened = asyncio.Event()
        self._loading = LoadProgress(STARTING)
        # The last reason to refuse a scheduler.
        self._refused: str | None = None

    def report_loading(self, progress: LoadProgress) -> None:
        """Sets the progress that calls are refused with until `open`. May be called in any thread."""
        self._loading = progress

    def open(self, worker: Worker) -> None:
        """Serves calls from now on."""
        self._loaded = worker
        self._opened.set()
        if worker.transfers is not None:
            worker.transfers.metrics = self._metrics
        if worker.disk is not None:
            worker.disk.start(self._metrics.on_disk)

    async def stop_disk(self) -> None:
        """Writes the final blocks to disk, after the last step."""
        if self._loaded is not None and self._loaded.disk is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._loaded.disk.stop)

    async def wait_until_fetched(self, timeout_s: float) -> None:
        """Waits until no block is offered to other workers any more."""
        if self._loaded is not None and self._loaded.transfers is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._loaded.transfers.wait_until_fetched()

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        attach = await anext(request_iterator, worker_pb2.RunRequest())
        epoch = self._epoch_of(attach)
        self.wanted.set()
        # A scheduler that tries again and again has the worker as soon as it is loaded.
        with suppress(TimeoutError):
            async with asyncio.timeout(_HELD_WHILE_LOADING_S):
                await self._opened.wait()
        worker = self._worker()
        self._epoch_of(attach, protocol_of(worker.info.pool))
        stream = StepStream(worker, self._metrics, self._tracer, epoch, heartbeat_interval_s=self._heartbeat_interval_s)
        async with aclosing(stream.responses(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def FetchBlocks(
        self, request: worker_pb2.FetchBlocksRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.FetchBlocksResponse]:
        transfers = self._worker().transfers
        if transfers is None:
            raise NotFound("the blocks of this worker go nowhere", reason="LEASE_UNKNOWN")
        async with aclosing(transfers.serve_fetch(request)) as responses:
            async for response in responses:
                yield response

    async def ReleaseMemory(
        self, request: worker_pb2.ReleaseMemoryRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.ReleaseMemoryResponse:
        if not request.discard_weights:
            await self._worker().release_memory(request.scheduler_epoch)
        elif self._loading.phase != ASLEEP_WITHOUT_WEIGHTS:
            await self._worker().release_memory(request.scheduler_epoch, self._stopping)
            self.report_loading(LoadProgress(ASLEEP_WITHOUT_WEIGHTS))
            self.discarded.set()
        return worker_pb2.ReleaseMemoryResponse()

    def _epoch_of(self, request: worker_pb2.RunRequest, ours: ProtocolVersions = WORKER_PROTOCOL) -> int:
        try:
            return epoch_of(request, ours)
        except FailedPrecondition as error:
            # A refused scheduler tries again several times a second.
            if str(error) != self._refused:
                self._refused = str(error)
                _logger.warning("refused: %s", error)
            raise

    def _worker(self) -> Worker:
        if self._loaded is None or self.discarded.is_set():
            loading = self._loading
            raise Unavailable(
                f"the worker is loading its model: {loading}",
                reason="LOADING",
                retry_after_ms=_RETRY_WHILE_LOADING_MS,
                metadata=loading.metadata(),
            )
        return self._loaded


async def start_server(servicer: WorkerServicer, address: str, **options: Any) -> RpcServer:
    """Listens and serves; `options` are passed to `RpcServer.start`.

    Steps may have any size: one step may assign all rows, each with a long prompt or a long list of allowed tokens, and
    a step of a request that a scheduler has accepted must run.
    """
    return await RpcServer.start(
        address,
        lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server),
        [SERVICE_NAME],
        max_message_bytes=UNLIMITED_MESSAGE_BYTES,
        **options,
    )
