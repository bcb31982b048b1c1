"""The port that a worker is commanded by."""

from typing import Any

from quire.rpc.server import UNLIMITED_MESSAGE_BYTES, RpcServer
from quire.worker.v1 import worker_pb2
from quire.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from worker_svc.protocol.servicer import WorkerServicer

_SERVICE_NAME = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


async def start_server(servicer: WorkerServicer, address: str, **options: Any) -> RpcServer:
    """Listens and serves; `options` are those of `RpcServer.start`.

    Steps of any size are taken: all rows may be assigned in one, each with a copy of a long prompt or of a list of
    allowed tokens, and what a scheduler has accepted must run.
    """
    return await RpcServer.start(
        address,
        lambda server: add_WorkerServiceServicer_to_server(servicer, server),
        [_SERVICE_NAME],
        max_message_bytes=UNLIMITED_MESSAGE_BYTES,
        **options,
    )
