"""The step stream to one worker."""

import asyncio

import grpc
import grpc.aio

from quire.rpc.channel import open_channel
from quire.rpc.errors import FailedPrecondition, InvalidArgument, from_rpc_error
from quire.rpc.server import UNLIMITED_MESSAGE_BYTES
from quire.rpc.tls import TlsIdentity
from quire.settings import ConfigurationError
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.step import StepPlan
from scheduler_svc.service.worker_convert import (
    RankPlace,
    StepAnswer,
    attach_message,
    replica_info,
    sealed_blocks,
    step_answer,
    step_message,
)

_RUN = "/quire.worker.v1.WorkerService/Run"
_LOOK_INTERVAL_S = 1.0
_MOST_SILENT_LOOKS = 10
"""A living worker sends a heartbeat each half a second."""

_CALL_ERRORS = (grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What an operation on a broken call raises."""


class WorkerLostError(Exception):
    """The worker's stream broke, or the worker does not answer. Every step in flight is void."""


class WorkerRefusedError(WorkerLostError):
    """The worker cannot be used as it is, and trying again does not help before one of the two is another release."""


class WorkerHangsError(WorkerLostError):
    """The worker lives, but has not answered a step in time."""


class InvalidAnswerError(WorkerLostError):
    """The worker lives, but what it answered makes no sense: `__cause__` says why."""


class WorkerLink:
    """An attached worker, made by `attach`. Steps go out in order, results come back in the same order.

    `place` is which rank of how many it is; `sealed` are the blocks that it knew to be final when it was attached.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        call: grpc.aio.StreamStreamCall,
        epoch: int,
        attached: worker_pb2.Attached,
        address: str,
    ) -> None:
        self.info = replica_info(attached.info)
        self.place = RankPlace(attached.info.rank, attached.info.world_size)
        self.sealed = sealed_blocks(attached)
        self.address = address
        self.epoch = epoch
        self._channel = channel
        self._call = call
        self._num_received = 0
        self._is_silent = False
        self._watching = asyncio.create_task(self._watch(), name=f"watch worker {address}")

    @classmethod
    async def attach(cls, address: str, epoch: int, timeout_s: float, tls: TlsIdentity | None = None) -> "WorkerLink":
        """Takes the worker over under a new epoch. Raises WorkerLostError when it cannot be had within the time."""
        channel = _open(address, tls)
        # Requests are serialized here, once for all ranks, so the call takes bytes.
        call = channel.stream_stream(_RUN, response_deserializer=worker_pb2.RunResponse.FromString)()
        # In a task of its own: a gRPC call that is cancelled while it starts swallows the cancellation of its caller.
        handshake = asyncio.create_task(_handshake(call, epoch))
        try:
            await asyncio.wait([handshake], timeout=timeout_s)
            if not handshake.done():
                raise WorkerLostError(f"worker {address} did not answer Attach within {timeout_s:.0f} s")
            return cls(channel, call, epoch, handshake.result(), address)
        except BaseException as error:
            call.cancel()
            await channel.close()
            # The call's end does not wake a write that waits for the connection.
            handshake.cancel()
            await asyncio.wait([handshake])
            if isinstance(error, (*_CALL_ERRORS, FailedPrecondition, InvalidArgument)):
                kind = WorkerRefusedError if _is_other_release(error) else WorkerLostError
                raise kind(f"cannot attach to worker {address}: {_describe(error)}") from error
            raise

    async def send(self, plan: StepPlan) -> None:
        """Hands a step over. Raises WorkerLostError."""
        await self.write(step_message(plan, self.epoch, self.info.worker_generation))

    async def write(self, message: bytes) -> None:
        """Hands a step over that is serialized already. Raises WorkerLostError."""
        try:
            await self._call.write(message)
        except _CALL_ERRORS as error:
            raise WorkerLostError(f"worker {self.address} left: {_describe(error)}") from error

    async def receive(self) -> StepAnswer | None:
        """The next answer to a step, or None for a heartbeat. Raises WorkerLostError."""
        try:
            response = await self._call.read()
        except asyncio.CancelledError:
            if not self._is_silent:
                raise
            silent_s = _MOST_SILENT_LOOKS * _LOOK_INTERVAL_S
            raise WorkerLostError(f"worker {self.address} has been silent for {silent_s:.0f} s") from None
        except grpc.aio.AioRpcError as error:
            raise WorkerLostError(f"worker {self.address} left: {_describe(error)}") from error
        self._num_received += 1
        if not isinstance(response, worker_pb2.RunResponse):
            raise WorkerLostError(f"worker {self.address} ended the stream: {await self._call.details()}")
        if not response.HasField("result"):
            return None
        try:
            return step_answer(response.result, self.info.vocab_size)
        except InvalidArgument as error:
            raise InvalidAnswerError(f"worker {self.address} sent a malformed result: {error}") from error

    async def close(self) -> None:
        self._watching.cancel()
        self._call.cancel()
        await self._channel.close()

    async def _watch(self) -> None:
        """Ends the call to a worker that is silent. Silence is counted in looks and not in time, so that a pause of
        ourselves is not taken for one of the worker's."""
        silent = 0
        while silent < _MOST_SILENT_LOOKS:
            received = self._num_received
            await asyncio.sleep(_LOOK_INTERVAL_S)
            silent = silent + 1 if self._num_received == received else 0
        self._is_silent = True
        self._call.cancel()


def _is_other_release(error: Exception) -> bool:
    if isinstance(error, grpc.aio.AioRpcError):
        error = from_rpc_error(error)
    return isinstance(error, FailedPrecondition) and error.reason == "PROTOCOL_VERSION"


def _open(address: str, tls: TlsIdentity | None) -> grpc.aio.Channel:
    try:
        return open_channel(address, tls=tls, max_message_bytes=UNLIMITED_MESSAGE_BYTES)
    except ConfigurationError as error:  # in the middle of a renewal, files may not fit each other
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
