"""The supervisor of a host's service, by the rules of `quire serve`: its back-off, and its definition of a death."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from quire.runtime.settings import ConfigurationError
from quire_cli.supervisor.process import RestartBackoff
from tests.sim.world.network import Network
from tests.sim.world.transport import SimTransport
from tests.sim.world.world import Node, World

_MIN_START_S, _MAX_START_S = 0.05, 1.4
"""Range of the seconds from the start of a process until it listens, in addition to the supervisor's back-off."""
_GRACE_S = 20.0
"""Seconds after which a process that was asked to stop is killed."""


class Supervised:
    """A host and its one service, which restarts whenever it ends and the host has power.

    Attributes:
        node: The live process, or the last one that died.
        cannot_start_until: Until this time a process cannot be started, for lack of memory or processes.
        is_anew: Whether the process replaced itself by exec, which the supervisor has not seen.
    """

    def __init__(
        self,
        world: World,
        network: Network,
        host: str,
        main: Callable[[Node], Coroutine[Any, Any, Any]],
        on_start: Callable[[Node], object],
    ) -> None:
        """`main` is the coroutine that each process runs; `on_start` is called with each process before it runs."""
        self.host = host
        self.cannot_start_until = 0.0
        self.is_anew = False
        self._world, self._network = world, network
        self._main = main
        self._on_start = on_start
        self._backoff = RestartBackoff()
        self._chance = world.generator(f"supervisor of {host}")
        self._has_died = True
        self._becomes = False
        self._start()

    def stop_in_order(self) -> None:
        """SIGTERM: the service ends by itself, with its `finally` blocks, or is killed if that takes too long."""
        node = self.node
        if not node.is_dead:
            self._world.note("terminate", node.name)
            node.loop.put(asyncio.Handle(self._task.cancel, (), node.loop, node.context))
            self._world.after(_GRACE_S, node.kill)

    def leave(self) -> None:
        """The process ends, but not by its own fault: it has lost another process that it needs."""
        self._has_died = False
        self.node.kill()

    def begin_anew(self) -> None:
        """exec: the process ends and becomes another one."""
        self._world.note("begins anew", self.node.name)
        self._becomes = True

    def power_off(self, seconds: float) -> None:
        """Powers the machine off for a while, without notice to its peers."""
        self._network.power_off(self.host)
        self._world.after(seconds, self._power_on)

    def _power_on(self) -> None:
        if self.host in self._network.dark:
            self._network.power_on(self.host)
            if self.node.is_dead:
                # The supervisor is a new process, too.
                self._backoff, self._becomes = RestartBackoff(), False
                self._start_after(0.0)

    def _start(self) -> None:
        world, becomes = self._world, self._becomes
        self._becomes = False
        if self.host in self._network.dark or (world.nodes and not self._is_gone):
            return
        self.is_anew = becomes
        if world.now < self.cannot_start_until and not becomes:
            world.note("cannot start", self.host)
            self._start_after(self._backoff.delay_s(0.0))
            return
        node = self.node = world.node(self.host)
        self._has_died = True
        if not becomes:
            self._started_at = world.now
        SimTransport.install(self._network, node)
        self._on_start(node)
        task = self._task = node.start(lambda: self._main(node))
        node.on_end.append(lambda: self._ended(world.now - self._started_at))
        task.add_done_callback(lambda _: self._exit(node, task))

    @property
    def _is_gone(self) -> bool:
        return not hasattr(self, "node") or self.node.is_dead

    def _exit(self, node: Node, task: asyncio.Task[Any]) -> None:
        """Handles a service that has ended by itself."""
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            # A disk that fails is no reason to end.
            if not isinstance(error, ConfigurationError) or "--record" in str(error):
                node.fail(error)
            self._world.note("refused", node.name, str(error).partition(";")[0])
        else:
            self._has_died = False
        node.kill()

    def _ended(self, lived_s: float) -> None:
        if self.host in self._network.dark:
            self._becomes = False
        elif self._becomes:
            self._start_after(0.0)
        else:
            self._start_after(self._backoff.delay_s(lived_s, died=self._has_died))

    def _start_after(self, delay_s: float) -> None:
        world = self._world
        world.after(delay_s + self._chance.uniform(_MIN_START_S, _MAX_START_S), self._start)
