"""Docker, and Compose deployments of the images, for tests that run containers for real."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.compose import COMPOSE, ROOT

HEALTHY_WITHIN_S = 30.0
"""Time from `docker compose up` until all services are healthy, on a machine that does nothing else."""
KILL_SERVICE = """
import os, pathlib, signal
for status in pathlib.Path("/proc").glob("[0-9]*/status"):
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    if fields["PPid"].strip() == "1":
        os.kill(int(fields["Pid"]), signal.SIGKILL)
"""
"""The service is the child of the container's init. A signal from the engine would count as a stop by hand."""


def docker(*arguments: str, check: bool = True, **variables: str) -> str:
    """The output of docker. Raises AssertionError with its errors if it fails."""
    command = ["docker", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, errors="replace"
    )
    assert done.returncode == 0 or not check, f"{' '.join(command[:6])}: {done.stderr[-2000:]}"
    return done.stdout


def engine_problem() -> str | None:
    """Why no container can run here; None if one can."""
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"there is no docker: {error}"
    return None if done.returncode == 0 else f"no Docker engine answers: {done.stderr.strip()[-200:]}"


@dataclass(frozen=True, slots=True)
class Deployment:
    """A Compose project.

    Attributes:
        name: The project, with which the names of its containers begin.
        ports: HTTP and gRPC ports of the first gateway, then of the second one.
    """

    name: str
    files: Sequence[Path] = (COMPOSE,)
    profiles: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    ports: tuple[int, int, int, int] = (18000, 18051, 18100, 18151)

    def compose(self, *arguments: str, check: bool = True) -> str:
        names = ("QUIRE_HTTP_PORT", "QUIRE_GRPC_PORT", "QUIRE_HTTP_PORT_2", "QUIRE_GRPC_PORT_2")
        ports = {name: str(port) for name, port in zip(names, self.ports, strict=True)}
        flags = [word for each in self.files for word in ("--file", str(each.relative_to(ROOT)))]
        flags += [word for each in self.profiles for word in ("--profile", each)]
        variables = {**ports, **self.variables}
        return docker("compose", "--project-name", self.name, *flags, *arguments, check=check, **variables)

    @contextlib.contextmanager
    def up(self, *flags: str) -> Iterator[float]:
        """Starts all services; the seconds until all are healthy. Removes them at the end."""
        try:
            begin = time.monotonic()
            self.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "240", *flags)
            yield time.monotonic() - begin
        except BaseException:
            print(self.compose("logs", "--tail", "20", check=False))
            raise
        finally:
            self.compose("down", "--timeout", "1", "--volumes", check=False)

    def container(self, service: str, index: int = 1) -> str:
        """The name of a service's container."""
        return f"{self.name}-{service}-{index}"

    def run_inside(self, service: str, program: str) -> str:
        """The output of a Python program in the container of a service, as its user."""
        return docker("exec", self.container(service), "python", "-c", program)

    def inspect(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.container(service)))[0]

    def kill(self, service: str) -> None:
        """`kill -9` of the service's process."""
        docker("exec", self.container(service), "python", "-c", KILL_SERVICE, check=False)

    def wait_healthy(self, timeout_s: float = 120.0) -> None:
        """Waits until every container of the project is healthy."""
        deadline = time.monotonic() + timeout_s
        while True:
            states = self.compose("ps", "--format", "{{.Name}} {{.Health}}").split("\n")
            if all(state.endswith(" healthy") for state in states if state):
                return
            assert time.monotonic() < deadline, states
            time.sleep(0.5)
