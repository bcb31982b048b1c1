"""Opens channels and servers: with gRPC, or with a simulation in its place.

A transport has the surface of grpc.aio. `tests/sim/test_transport_conformance.py` tests the common behaviour.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Protocol

import grpc
import grpc.aio

from quire.rpc.address import TcpAddress, UnixAddress, check_bindable

Options = Sequence[tuple[str, int | str]]


class Transport(Protocol):
    """Opens channels and servers."""

    def check_bindable(self, address: TcpAddress | UnixAddress, *, reuse_port: bool = False) -> None:
        """Raises AddressInUse if the address has a listener already, ConfigurationError if it can have none."""
        ...

    def channel(
        self, address: str, credentials: grpc.ChannelCredentials | None, options: Options
    ) -> grpc.aio.Channel: ...

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server: ...


class GrpcTransport:
    """grpc.aio over TCP and unix sockets."""

    check_bindable = staticmethod(check_bindable)

    def channel(self, address: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
        return grpc.aio.server(interceptors=interceptors, options=options)


TRANSPORT: ContextVar[Transport] = ContextVar("quire transport", default=GrpcTransport())  # noqa: B039
"""To be set only by a simulation, in the context of a simulated process."""
