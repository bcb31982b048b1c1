"""A port for people who look into a running service: gRPC's own channelz, on loopback alone."""

from typing import Self

import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2

from quire.rpc.address import TcpAddress, check_bindable
from quire.rpc.listening import start_all
from quire.rpc.reflection import add_reflection
from quire.rpc.roles import role_interceptors
from quire.rpc.tls import ServerTls

HOST = "127.0.0.1"
SERVICE_NAME = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name


class AdminServer:
    """Servers, channels and sockets of this process and what they have done, to any channelz client.

    Without TLS there is no authentication: who may log in on the machine may look.
    """

    def __init__(self, server: grpc.aio.Server, address: str) -> None:
        self.address = address
        self._server = server

    @classmethod
    async def start(cls, port: int, tls: ServerTls | None = None) -> Self:
        """Listens on a port of 127.0.0.1, 0 for a free one; with `tls`, for callers of its roles alone.

        Raises:
            AddressInUse: another process listens there.
            ConfigurationError: the files of `tls` are no good.
        """
        wanted = TcpAddress(HOST, port)
        check_bindable(wanted)
        server = grpc.aio.server(interceptors=role_interceptors(wanted, tls), options=[("grpc.so_reuseport", 0)])
        channelz.add_channelz_servicer(server)
        add_reflection((SERVICE_NAME,), server)
        if tls is None:
            bound = server.add_insecure_port(str(wanted))
        else:
            bound = server.add_secure_port(str(wanted), tls.credentials())
        await start_all(server)
        return cls(server, str(TcpAddress(HOST, bound)))

    async def stop(self) -> None:
        await self._server.stop(0)
