"""The step streams to the workers of a replica: to one worker, or to a group of ranks that is driven as one."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

import grpc
import grpc.aio

from quire.model_files.progress import LoadProgress
from quire.rpc.channel import open_channel
from quire.rpc.errors import FailedPrecondition, InvalidArgument, QuireError, Unavailable, from_rpc_error
from quire.rpc.server import UNLIMITED_MESSAGE_BYTES
from quire.rpc.tls import TlsIdentity
from quire.runtime.failpoint import failpoint
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import check_model
from quire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_svc.core.moves import CommonTier, KvSource
from scheduler_svc.service.worker_messages import (
    Fetched,
    Prepared,
    RankPlace,
    StepAnswer,
    TierChanged,
    WorkerAnswer,
    answer_from,
    attach_message,
    replica_info,
    sealed_blocks,
)

_RUN = "/quire.worker.v1.WorkerService/Run"
_CHECK_INTERVAL_S = 1.0
_MAX_SILENT_CHECKS = 10
"""A live worker sends a heartbeat every half second."""
_OTHER_SCHEDULER = frozenset({"NEWER_SCHEDULER", "EPOCH_ATTACHED"})
"""Reasons with which a worker reports that it has another scheduler. An epoch is attached only once, so EPOCH_ATTACHED
is about a scheduler that started in the same millisecond."""
_STEP_FAILURES = frozenset({"STEP_FAILED", "UNEXPECTED"})
"""Reasons with which a worker reports that it could not run or accept a step."""
_CALL_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""The exceptions of an operation on a broken call."""


class WorkerLostError(Exception):
    """The worker's stream broke, or the worker does not answer. Every step in flight is void."""

    @property
    def refusal(self) -> str | None:
        """The worker's error about the oldest step in flight: it answers all steps before the one that it refuses.

        None if the worker was lost for another reason (it died, hangs, or belongs to another scheduler), which says
        nothing about the step.
        """
        status = self._status
        if status is None or not (isinstance(status, InvalidArgument) or status.reason in _STEP_FAILURES):
            return None
        return status.message

    @property
    def is_unexplained(self) -> bool:
        """Whether the reason of the loss is unknown. The worker may have died or hung because of a step, or the link
        broke.

        A reason other than the status's own can only come from a live worker.
        """
        return self._status is None or self._status.reason == self._status.default_reason

    @property
    def detail(self) -> str | None:
        """The error in the worker's answer; None if it did not answer."""
        return None

    @property
    def loading(self) -> LoadProgress | None:
        """The worker's progress in loading its model; None if it reports none."""
        return None if self._status is None else LoadProgress.of_metadata(self._status.metadata)

    @property
    def _status(self) -> QuireError | None:
        """The status that the worker ended the stream with; None if the scheduler gave the stream up."""
        return from_rpc_error(self.__cause__) if isinstance(self.__cause__, grpc.aio.AioRpcError) else None


class WorkerRefusedError(WorkerLostError):
    """The worker's release or pool does not fit: attaching fails until the worker or the scheduler is replaced."""


class WorkerTakenError(WorkerLostError):
    """The worker has a scheduler that started later than this one, and keeps it."""


class WorkerFaultyError(WorkerLostError):
    """The worker is alive, and hangs or sends invalid answers."""


class WorkerHangsError(WorkerFaultyError):
    """The worker has not answered a step in time."""


class InvalidAnswerError(WorkerFaultyError):
    """The worker's answer is invalid; `__cause__` says why."""

    @property
    def detail(self) -> str | None:
        return str(self.__cause__)


class RanksDisagreeError(WorkerFaultyError):
    """A rank sampled other tokens than rank 0, so its rows now differ from the scheduler's and from other ranks'."""

    @property
    def detail(self) -> str | None:
        return str(self)


class WorkerLink:
    """The link to one worker, made by `attach`. Orders go out in order, steps are answered in the same order.

    Attributes:
        info: The worker's properties.
        address: Its address, for messages.
        sealed: The blocks that it held as final when it was attached.
        kv_source: Where other replicas find its blocks, without a lease.
        place: Its rank, and the number of ranks.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall,
        attached: worker_pb2.Attached,
        address: str,
    ) -> None:
        self.info = replica_info(attached.info)
        self.place = RankPlace(attached.info.rank, attached.info.world_size)
        self.sealed = sealed_blocks(attached)
        self.kv_source = KvSource(attached.info.kv_namespace, (attached.info.transfer_endpoint or address,))
        self.address = address
        self._channel = channel
        self._call = call
        self._num_received = 0
        self._is_silent = False
        self._watching = asyncio.create_task(self._watch(), name=f"watch worker {address}")

    @classmethod
    async def attach(cls, address: str, epoch: int, timeout_s: float, tls: TlsIdentity | None = None) -> "WorkerLink":
        """Attaches a worker under a new epoch. Raises WorkerLostError if that fails or takes longer than the timeout,
        WorkerTakenError if a newer scheduler has it."""
        channel = _open(address, tls)
        # Requests are serialized here, once for all ranks, so the call takes bytes.
        call = channel.stream_stream(_RUN, response_deserializer=worker_pb2.RunResponse.FromString)()
        # In a separate task: a gRPC call that is cancelled while it starts swallows its caller's cancellation.
        handshake = asyncio.create_task(_handshake(call, epoch))
        try:
            await asyncio.wait([handshake], timeout=timeout_s)
            if not handshake.done():
                raise WorkerLostError(f"worker {address} did not answer Attach within {timeout_s:.0f} s")
            return cls(channel, call, handshake.result(), address)
        except BaseException as error:
            call.cancel()
            await channel.close()
            # The call's end does not wake a write that waits for the connection.
            handshake.cancel()
            await asyncio.gather(handshake, return_exceptions=True)
            if isinstance(error, (*_CALL_ERRORS, FailedPrecondition, InvalidArgument)):
                raise _kind_of_refusal(error)(f"cannot attach to worker {address}: {_describe(error)}") from error
            raise

    async def write(self, message: bytes) -> None:
        """Sends a serialized order. Raises WorkerLostError."""
        try:
            await self._call.write(message)
        except _CALL_ERRORS as error:
            raise WorkerLostError(f"worker {self.address} left: {_describe(error)}") from error

    async def receive(self) -> WorkerAnswer | None:
        """The next answer, or None for a heartbeat. Raises WorkerLostError."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            if not self._is_silent:
                raise
            silent_s = _MAX_SILENT_CHECKS * _CHECK_INTERVAL_S
            raise WorkerLostError(f"worker {self.address} has been silent for {silent_s:.0f} s") from None
        except grpc.aio.AioRpcError as error:
            raise WorkerLostError(f"worker {self.address} left: {_describe(error)}") from error
        self._num_received += 1
        if not isinstance(response, worker_pb2.RunResponse):
            raise WorkerLostError(f"worker {self.address} ended the stream: {await self._call.details()}")
        try:
            return answer_from(response, self.info.vocab_size)
        except InvalidArgument as error:
            raise InvalidAnswerError(f"worker {self.address} sent a malformed result: {error}") from error

    async def close(self) -> None:
        self._watching.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _watch(self) -> None:
        """Ends the call to a silent worker. Silence is counted in checks, not in time, so that a pause of this process
        does not count as silence of the worker."""
        silent = 0
        while silent < _MAX_SILENT_CHECKS:
            received = self._num_received
            await asyncio.sleep(_CHECK_INTERVAL_S)
            silent = silent + 1 if self._num_received == received else 0
        self._is_silent = True
        self._call.cancel()


class WorkerGroup:
    """The links to several ranks, driven as one, with the attributes of a link to one worker. Each rank gets the same
    bytes of every order. The answer of rank 0 counts once all ranks have answered. The group is lost with any of its
    ranks."""

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        first, *others = self._links = tuple(links)
        self.info = first.info
        self.address = ", ".join(link.address for link in links)
        # Each rank holds a part of every block, so a block that one rank has lost is useless.
        everywhere = set(first.sealed).intersection(*(link.sealed for link in others))
        self.sealed = [entry for entry in first.sealed if entry in everywhere]
        sources = [link.kv_source for link in links]
        namespaces = {source.kv_namespace for source in sources}
        self.kv_source = KvSource(
            first.kv_source.kv_namespace if len(namespaces) == 1 else "",
            tuple(endpoint for source in sources for endpoint in source.endpoints),
        )
        self._answers: asyncio.Queue[tuple[int, WorkerAnswer | Exception | None]] = asyncio.Queue()
        # For each rank, its answers to steps that not all ranks have answered.
        self._unmatched: list[deque[StepAnswer]] = [deque() for _ in links]
        # Ranks that have sent a heartbeat since the group's last one.
        self._alive: set[int] = set()
        # The answers of ranks to each preparation, by its number.
        self._prepared: defaultdict[int, list[Prepared]] = defaultdict(list)
        self._tier = CommonTier(len(links))
        self._readers = [asyncio.create_task(self._read(rank, link)) for rank, link in enumerate(links)]

    async def receive(self) -> WorkerAnswer | None:
        """The next answer of rank 0, once all ranks have answered the step, or None once each rank has sent a heartbeat
        (so no step counts as late while one rank is silent). Fetches by other replicas are returned for each rank.

        Raises:
            WorkerLostError: a rank was lost, or sampled other tokens than rank 0.
        """
        while not all(self._unmatched):
            rank, answer = await self._answers.get()
            match answer:
                case StepAnswer():
                    self._unmatched[rank].append(answer)
                case None:
                    self._alive.add(rank)
                    if len(self._alive) == len(self._links):
                        self._alive.clear()
                        return None
                case Prepared():
                    answers = self._prepared[answer.number]
                    answers.append(answer)
                    if len(answers) == len(self._links):
                        del self._prepared[answer.number]
                        failed = frozenset[int]().union(*(each.failed for each in answers))
                        return replace(next((each for each in answers if each.failure), answer), failed=failed)
                case TierChanged():
                    slots, hashes = self._tier.change(rank, answer.slots, answer.hashes)
                    if slots:
                        return TierChanged(slots, hashes)
                case Fetched():
                    return answer
                case Exception():
                    raise answer
        return self._next_matched()

    def _next_matched(self) -> StepAnswer:
        """Rank 0's answer to the oldest step, which all ranks have answered. Raises RanksDisagreeError."""
        first, *others = (answers.popleft() for answers in self._unmatched)
        for link, answer in zip(self._links[1:], others, strict=True):
            crc32s = {first.token_ids_crc32, answer.token_ids_crc32} - {None}
            if len(crc32s) > 1:
                raise RanksDisagreeError(
                    f"worker {link.address}, rank {link.place.rank}, sampled other tokens in step "
                    f"{first.result.step_id} than rank 0, worker {self._links[0].address}"
                )
        return first

    async def close(self) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links))

    async def write(self, message: bytes) -> None:
        first, *others = self._links
        await asyncio.gather(first.write(message), *(self._write_to_other(link, message) for link in others))

    async def _write_to_other(self, link: WorkerLink, message: bytes) -> None:
        failpoint("scheduler.step.between_ranks")
        await link.write(message)

    async def _read(self, rank: int, link: WorkerLink) -> None:
        while True:
            try:
                self._answers.put_nowait((rank, await link.receive()))
            except Exception as error:
                # Catches every error, because the task is awaited only when the group is closed.
                self._answers.put_nowait((rank, error))
                return


Workers = WorkerLink | WorkerGroup
"""The attached workers of a replica."""


async def attach_workers(
    addresses: Sequence[str], epoch: int, timeout_s: float, tls: TlsIdentity | None = None
) -> Workers:
    """Attaches all ranks of a replica under one epoch, or none. Fails with the first rank that cannot be attached.

    Args:
        addresses: in order of rank.

    Raises:
        WorkerLostError: one of them cannot be attached, or they are not the ranks of one group.
    """
    attaching = [asyncio.create_task(WorkerLink.attach(address, epoch, timeout_s, tls)) for address in addresses]
    try:
        await asyncio.wait(attaching, return_when=asyncio.FIRST_EXCEPTION)
        for task in attaching:
            if task.done():
                task.result()
        links = [task.result() for task in attaching]
        _check_places(links)
    except BaseException:
        for task in attaching:
            task.cancel()
        outcomes = await asyncio.gather(*attaching, return_exceptions=True)
        await asyncio.gather(*(outcome.close() for outcome in outcomes if isinstance(outcome, WorkerLink)))
        raise
    return links[0] if len(links) == 1 else WorkerGroup(links)


async def release_memory(
    addresses: Sequence[str], epoch: int, timeout_s: float, tls: TlsIdentity | None = None, *, discard_weights: bool
) -> None:
    """Makes all ranks of a replica release the memory of their KV pools, and of their weights with `discard_weights`.
    No link to them may be open. If one rank fails, the calls to the others are cancelled.

    Raises:
        QuireError: a rank cannot release memory, or did not answer.
    """

    async def of(address: str) -> None:
        try:
            channel = _open(address, tls)
        except WorkerLostError as error:
            raise Unavailable(str(error), reason="NO_WORKER") from error
        async with channel:
            request = worker_pb2.ReleaseMemoryRequest(scheduler_epoch=epoch, discard_weights=discard_weights)
            try:
                await worker_pb2_grpc.WorkerServiceStub(channel).ReleaseMemory(request, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error

    releasing = [asyncio.create_task(of(address)) for address in addresses]
    try:
        await asyncio.gather(*releasing)
    finally:
        for each in releasing:
            each.cancel()
        await asyncio.gather(*releasing, return_exceptions=True)


def _kind_of_refusal(error: Exception) -> type[WorkerLostError]:
    if isinstance(error, grpc.aio.AioRpcError):
        error = from_rpc_error(error)
    if not isinstance(error, FailedPrecondition):
        return WorkerLostError
    if error.reason in _OTHER_SCHEDULER:
        return WorkerTakenError
    return WorkerRefusedError if error.reason == "PROTOCOL_VERSION" else WorkerLostError


def _open(address: str, tls: TlsIdentity | None) -> grpc.aio.Channel:
    try:
        return open_channel(address, tls=tls, max_message_bytes=UNLIMITED_MESSAGE_BYTES)
    except ConfigurationError as error:  # while certificates are renewed, files may not fit each other
        raise WorkerLostError(str(error)) from error


async def _handshake(call: grpc.aio.StreamStreamCall, epoch: int) -> worker_pb2.Attached:
    await call.write(attach_message(epoch))
    response = await call.read()
    if not isinstance(response, worker_pb2.RunResponse) or not response.HasField("attached"):
        raise WorkerLostError("the worker did not answer Attach with Attached")
    return response.attached


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


def _check_places(links: Sequence[WorkerLink]) -> None:
    """Raises WorkerLostError unless the links are the ranks of one group, in order, and equal in all properties that a
    plan needs."""
    first = links[0]
    for rank, link in enumerate(links):
        if link.place != RankPlace(rank, len(links)):
            raise WorkerLostError(
                f"worker {link.address} is rank {link.place.rank} of {link.place.world_size}; "
                f"--workers names it as rank {rank} of {len(links)}"
            )
        if replace(link.info, fingerprint=first.info.fingerprint) != first.info:
            raise WorkerLostError(f"worker {link.address} differs from rank 0: {_difference(first, link)}")
        _check_tokenizers(first, link)
        try:
            check_model(first.info.fingerprint, link.info.fingerprint, us="rank 0", them=f"worker {link.address}")
        except FailedPrecondition as error:
            raise WorkerLostError(str(error)) from error


def _check_tokenizers(first: WorkerLink, other: WorkerLink) -> None:
    """Each rank compiles constraints with its own tokenizer, so all ranks must have the same tokenizer, or none."""
    for lacking, having in ((first, other), (other, first)):
        if having.info.fingerprint.tokenizer and not lacking.info.fingerprint.tokenizer:
            raise WorkerLostError(
                f"worker {lacking.address}, rank {lacking.place.rank}, has no tokenizer.json, and worker "
                f"{having.address}, rank {having.place.rank}, has one; give both the same model by --model"
            )


def _difference(first: WorkerLink, other: WorkerLink) -> str:
    if replace(other.info, worker_generation=first.info.worker_generation) == first.info:
        return "it belongs to another start of the group"
    return f"{other.info} and {first.info}"
