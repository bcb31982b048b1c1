"""Containers of a compose file or of Kubernetes, run as processes of this machine on ports and folders of their own.

Ports inside are four or five digits at the end of a word, and hosts come before them.
"""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quire_cli.supervisor.commands import child_environ
from tests.support.compose import ROOT
from tests.support.ports import free_port
from tools.kubernetes_manifests import Manifests

_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True)
class Container:
    """What an orchestrator would start.

    Attributes:
        arguments: Of `quire`.
        health: The command that says whether it serves.
        mounts: Folders of this machine by the paths that they have inside.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    health: Sequence[str]
    mounts: Mapping[str, Path]


def containers_of_pods(file: Path, folder: Path, certificates: Path) -> Mapping[str, Container]:
    """All containers of all pods of rendered manifests, in the order in which they start.

    `folder` is mounted in the place of all volumes but `certificates`, which has a directory for each role.
    """
    return {
        container.name: Container(
            container.arguments,
            container.variables,
            container.spec["readinessProbe"]["exec"]["command"],
            dict.fromkeys(container.mounts, folder) | {"/certs": certificates / container.service},
        )
        for pod in reversed(Manifests.read(file).pods())
        for container in pod.containers
    }


class Machine:
    """One machine in the place of a network of containers."""

    def __init__(
        self, containers: Mapping[str, Container], ports: Sequence[str], own_ports: Sequence[str] = ()
    ) -> None:
        """`ports` and `own_ports` are those inside; containers may have the same of the latter, where none calls it."""
        self._containers = containers
        self._ports = {port: str(free_port()) for port in ports} | dict.fromkeys(own_ports, "0")

    def port(self, inside: str) -> str:
        return self._ports[inside]

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All of them, healthy."""
        async with contextlib.AsyncExitStack() as stack:
            for container in self._containers.values():
                await stack.enter_async_context(self._process(container))
            for container in self._containers.values():
                await self._until_healthy(container)
            yield

    @contextlib.asynccontextmanager
    async def _process(self, container: Container) -> AsyncIterator[None]:
        words = [self._here(word, container) for word in container.arguments]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire_cli.main", *words),
            env=self._environment(container),
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            async with asyncio.timeout(60):
                await process.wait()

    async def _until_healthy(self, container: Container) -> None:
        _, script, *words = container.health
        command = (sys.executable, str(ROOT / "deploy" / Path(script).name))
        words = [self._here(word, container) for word in words]
        while True:
            process = await asyncio.create_subprocess_exec(
                *command, *words, env=self._environment(container), stdout=asyncio.subprocess.DEVNULL
            )
            if await process.wait() == 0:
                return
            await asyncio.sleep(_POLL_INTERVAL_S)

    def _environment(self, container: Container) -> dict[str, str]:
        given = {name: self._here(value, container) for name, value in container.environment.items()}
        return child_environ(os.environ) | given | {"QUIRE_NUM_THREADS": "1"}

    def _here(self, word: str, container: Container) -> str:
        """A word of a command line as it is here: hosts are all this one, ports and folders are others."""
        word = re.sub(r"\b0\.0\.0\.0\b", "127.0.0.1", word)
        word = re.sub(r"(?<==)[a-z][\w.-]*(?=:\d+$)|^[a-z][\w.-]*(?=:\d+$)", "127.0.0.1", word)
        word = re.sub(r"(?<=dns:///)[a-z][\w.-]*(?=:\d+$)", "127.0.0.1", word)
        word = re.sub(r"(?<![\w.])\d{4,5}$", lambda match: self._ports.get(match[0], match[0]), word)
        insides = "|".join(container.mounts)
        return re.sub(rf"(?:^|(?<=[=:]))(?:{insides})(?=/|$)", lambda match: str(container.mounts[match[0]]), word)
