"""Parts of gRPC that its type stubs lack, or type for the blocking API only."""

from typing import Any

import grpc.aio
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

EOF: Any = vars(grpc.aio)["EOF"]
"""The result of a read at the end of a stream."""


def health_stub(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def channelz_stub(channel: Any) -> Any:
    return channelz_pb2_grpc.ChannelzStub(channel)


def reflection_stub(channel: Any) -> Any:
    return reflection_pb2_grpc.ServerReflectionStub(channel)
