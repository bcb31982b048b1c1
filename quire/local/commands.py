"""Which processes `quire serve` starts, and with which command lines. The services listen on unix sockets of ours."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import quire
from gateway.settings import GatewaySettings
from quire.local.settings import ServeSettings
from quire.settings import to_argv
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings


def _module(name: str) -> tuple[str, ...]:
    # -P: a folder of that name in the working directory must not stand in for the service.
    return (sys.executable, "-P", "-m", name)


@dataclass(frozen=True, slots=True)
class Programs:
    """How each service is called, without its flags. Tests put stand-ins here."""

    worker: tuple[str, ...] = _module("worker_svc")
    scheduler: tuple[str, ...] = _module("scheduler_svc")
    gateway: tuple[str, ...] = _module("gateway")


@dataclass(frozen=True, slots=True)
class Commands:
    """The command lines of one `quire serve`, whose sockets lie in `directory`."""

    settings: ServeSettings
    programs: Programs
    directory: Path

    def worker(self) -> list[str]:
        values = self._values(listen=self.worker_address, metrics_port=self.settings.worker_metrics_port)
        return [*self.programs.worker, *to_argv(WorkerSettings, values)]

    def scheduler(self) -> list[str]:
        values = self._values(
            listen=self.scheduler_address,
            workers=(self.worker_address,),
            metrics_port=self.settings.scheduler_metrics_port,
        )
        return [*self.programs.scheduler, *to_argv(SchedulerSettings, values)]

    def gateway(self, grpc_port: int, http_port: int) -> list[str]:
        """Port 0 picks a free one."""
        values = self._values(schedulers=(self.scheduler_address,), grpc_port=grpc_port, http_port=http_port)
        return [*self.programs.gateway, *to_argv(GatewaySettings, values)]

    def _values(self, **own: object) -> dict[str, object]:
        shared = {field.name: getattr(self.settings, field.name) for field in dataclasses.fields(self.settings)}
        return {**shared, **own}

    @property
    def worker_address(self) -> str:
        """Where the worker listens."""
        return f"unix:{self.directory / 'worker.sock'}"

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler listens."""
        return f"unix:{self.directory / 'scheduler.sock'}"


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What the services inherit: all but `QUIRE_*`, since flags say everything, and the code that we ourselves run."""
    inherited = {name: value for name, value in environ.items() if not name.startswith("QUIRE_")}
    code = str(Path(quire.__file__).resolve().parent.parent)
    paths = [code, *filter(None, [inherited.get("PYTHONPATH")])]
    # gRPC's own log tells of every peer that goes away, which our services log in their own words.
    return {"GRPC_VERBOSITY": "ERROR", **inherited, "PYTHONPATH": os.pathsep.join(paths)}
