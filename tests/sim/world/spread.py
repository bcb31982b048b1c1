"""Channels to several addresses of the simulated transport: gRPC's policy round_robin, by which Quire's clients spread
their calls over gateways. Retries by the service config are not simulated."""

import grpc
import grpc.aio
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from tests.sim.world.client import CallCore, ChannelCore
from tests.sim.world.network import Network
from tests.sim.world.streams import Status
from tests.sim.world.world import Node

_Connectivity = grpc.ChannelConnectivity


class SpreadCore(ChannelCore):
    """Has a channel for each address, keeps all of them connected after the first call, and uses them in turn."""

    def __init__(self, network: Network, node: Node, addresses: list[str], options: dict[str, int | str]) -> None:
        super().__init__(network, node, addresses[0], options)
        self._cores = [ChannelCore(network, node, address, options) for address in addresses]
        self._failing = [False] * len(addresses)
        self._next = 0
        self._waiting_calls: list[CallCore] = []
        self._has_begun = False
        self._last_problem = ""
        for place, core in enumerate(self._cores):
            core.on_state = lambda state, place=place: self._changed(place, state)

    def all_calls(self) -> list[CallCore]:
        return [*self.calls, *(call for core in self._cores for call in core.calls)]

    def closing(self) -> None:
        super().closing()
        for core in self._cores:
            core.closing()

    def close(self) -> None:
        super().close()
        for core in self._cores:
            core.close()

    def check_connectivity_state(self, try_to_connect: bool) -> int:
        if try_to_connect:
            self._begin()
        return self._state.value[0]

    def call(self, method: bytes, deadline: float | None, credentials: object, wait_for_ready: bool | None) -> CallCore:
        if self._is_closed:
            raise cygrpc.UsageError("Channel is closed.")
        return CallCore(self, method.decode(), deadline, wait_for_ready=bool(wait_for_ready))

    def place(self, call: CallCore) -> None:
        self._begin()
        ready = [core for core in self._cores if core.is_connected]
        if ready:
            core = ready[self._next % len(ready)]
            self._next += 1
            self.calls.remove(call)
            call.move_to(core)
        elif all(self._failing) and not call.waits_for_ready:
            call.fail(Status(grpc.StatusCode.UNAVAILABLE, f"connections to all backends failing; {self._last_problem}"))
        else:
            self._waiting_calls.append(call)

    def leave(self, call: CallCore) -> None:
        for calls in (self.calls, self._waiting_calls):
            if call in calls:
                calls.remove(call)

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            for core in self._cores:
                core.connect()

    def _changed(self, place: int, state: grpc.ChannelConnectivity) -> None:
        core = self._cores[place]
        match state:
            case _Connectivity.READY:
                self._failing[place] = False
            case _Connectivity.TRANSIENT_FAILURE:
                self._failing[place] = True
                self._last_problem = core.problem
            case _Connectivity.IDLE if not self._is_closed:
                # The policy reconnects lost channels at once.
                self.loop.call_soon(core.connect)
            case _:
                return
        waiting, self._waiting_calls = self._waiting_calls, []
        for call in waiting:
            self.place(call)
