"""quire.worker.v1.WorkerService."""

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc.aio

from quire.rpc.errors import FailedPrecondition, Unavailable
from quire.rpc.server import UNLIMITED_MESSAGE_BYTES, RpcServer
from quire.worker.v1 import worker_pb2, worker_pb2_grpc
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.answer_convert import info_message
from worker_svc.protocol.convert import epoch_of
from worker_svc.protocol.step_stream import StepStream
from worker_svc.protocol.worker import Worker

HEARTBEAT_INTERVAL_S = 0.5
SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
_RETRY_WHILE_LOADING_MS = 200
_logger = logging.getLogger(__name__)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves one worker; until that is loaded, every call is UNAVAILABLE."""

    def __init__(self, metrics: WorkerMetrics, *, heartbeat_interval_s: float = HEARTBEAT_INTERVAL_S) -> None:
        self._metrics = metrics
        self._heartbeat_interval_s = heartbeat_interval_s
        self._loaded: Worker | None = None
        # Why a scheduler was refused last.
        self._refused: str | None = None

    def open(self, worker: Worker) -> None:
        """The worker is loaded; calls are served from now on."""
        self._loaded = worker

    async def Run(
        self, request_iterator: AsyncIterator[worker_pb2.RunRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.RunResponse]:
        epoch = self._epoch_of(await anext(request_iterator, worker_pb2.RunRequest()))
        stream = StepStream(self._worker(), self._metrics, epoch, heartbeat_interval_s=self._heartbeat_interval_s)
        async with aclosing(stream.responses(request_iterator)) as responses:
            async for response in responses:
                yield response

    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.GetInfoResponse:
        return worker_pb2.GetInfoResponse(info=info_message(self._worker().info))

    def _epoch_of(self, request: worker_pb2.RunRequest) -> int:
        try:
            return epoch_of(request)
        except FailedPrecondition as error:
            # A scheduler that is refused comes again, several times a second.
            if str(error) != self._refused:
                self._refused = str(error)
                _logger.warning("refused: %s", error)
            raise

    def _worker(self) -> Worker:
        if self._loaded is None:
            raise Unavailable(
                "the worker is loading its model", reason="LOADING", retry_after_ms=_RETRY_WHILE_LOADING_MS
            )
        return self._loaded


async def start_server(servicer: WorkerServicer, address: str, **options: Any) -> RpcServer:
    """Listens and serves; `options` are those of `RpcServer.start`.

    Steps of any size are taken: all rows may be assigned in one, each with a copy of a long prompt or of a list of
    allowed tokens, and what a scheduler has accepted must run.
    """
    return await RpcServer.start(
        address,
        lambda server: worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server),
        [SERVICE_NAME],
        max_message_bytes=UNLIMITED_MESSAGE_BYTES,
        **options,
    )
