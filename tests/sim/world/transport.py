"""The transport that processes of a world use in place of gRPC."""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from quire.rpc.address import AddressInUse, TcpAddress, UnixAddress
from quire.rpc.transport import TRANSPORT, Options
from tests.sim.world.client import ChannelCore, SimChannel
from tests.sim.world.network import Network
from tests.sim.world.server import SimServer
from tests.sim.world.spread import SpreadCore
from tests.sim.world.world import Node


class SimTransport:
    """The transport of one process."""

    def __init__(self, network: Network, node: Node) -> None:
        self.network, self.node = network, node

    @classmethod
    def install(cls, network: Network, node: Node) -> None:
        """Makes it the transport of everything that runs in the process from now on."""
        node.context.run(TRANSPORT.set, cls(network, node))

    def check_bindable(self, address: TcpAddress | UnixAddress, *, reuse_port: bool = False) -> None:
        if self.network.resolve(self.node.host, str(address)) in self.network.listeners:
            raise AddressInUse(f"cannot listen on {address}: the port is in use")

    def channel(self, address: str, credentials: grpc.ChannelCredentials | None, options: Options) -> grpc.aio.Channel:
        if credentials is not None:
            raise NotImplementedError("TLS is not simulated")
        values: dict[str, Any] = dict(options)
        addresses = address.removeprefix("ipv4:").split(",")
        if len(addresses) > 1:
            return SimChannel(SpreadCore(self.network, self.node, addresses, values))  # pyrefly: ignore[bad-return]
        return SimChannel(ChannelCore(self.network, self.node, addresses[0], values))  # pyrefly: ignore[bad-return]

    def server(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Options) -> grpc.aio.Server:
        values: dict[str, Any] = dict(options)
        return SimServer(self.network, self.node, interceptors, values)  # pyrefly: ignore[bad-return]
