"""The processes that `quire serve` starts, and their command lines. The services listen on private unix sockets."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.settings import MEMORY, SQLITE, GatewaySettings
from quire.rpc.process import command_of, environ_of
from quire.runtime import failpoint
from quire.runtime.processors import cores, num_processors
from quire.runtime.settings import to_argv
from quire_cli.supervisor.settings import ServeSettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class Programs:
    """The command of each service, without its flags. Tests replace them."""

    worker: tuple[str, ...] = (*command_of("worker_svc"),)
    scheduler: tuple[str, ...] = (*command_of("scheduler_svc"),)
    gateway: tuple[str, ...] = (*command_of("gateway"),)


@dataclass(frozen=True, slots=True)
class Commands:
    """The command lines of one `quire serve`, whose sockets lie in `directory`.

    Attributes:
        rendezvous_port: Port of the rendezvous of a model's ranks, if there are several.
        probe_keys: The file with the supervisor's key and the keys of --api-key, if the gateway requires keys.
        pool_files: The file of each rank's KV pool; empty if pools end with their workers.
    """

    settings: ServeSettings
    programs: Programs
    directory: Path
    rendezvous_port: int = 0
    probe_keys: Path | None = None
    pool_files: Sequence[Path] = ()

    def worker(self, rank: int) -> list[str]:
        """The command line of a rank. Only the first rank serves the port of the metrics."""
        values = self._values(
            listen=self.worker_address(rank),
            metrics_port=self.settings.worker_metrics_port if rank == 0 else None,
            admin_port=None,
            num_threads=self._num_threads(),
            tensor_parallel_rank=rank,
            tensor_parallel_address=f"127.0.0.1:{self.rendezvous_port}",
            kv_cache_file=self.pool_files[rank] if self.pool_files else None,
        )
        return [*self.programs.worker, *to_argv(WorkerSettings, values)]

    def scheduler(self) -> list[str]:
        values = self._values(
            listen=self.scheduler_address,
            workers=tuple(self.worker_address(rank) for rank in self.ranks),
            metrics_port=self.settings.scheduler_metrics_port,
            admin_port=None,
        )
        return [*self.programs.scheduler, *to_argv(SchedulerSettings, values)]

    def gateway(self, number: int, grpc_port: int, http_port: int) -> list[str]:
        """The command line of a gateway. All share the two ports; each has the next ports of metrics and channelz."""
        own_keys = () if self.probe_keys is None else (self.probe_keys,)
        values = self._values(
            schedulers=(self.scheduler_address,),
            grpc_port=grpc_port,
            http_port=http_port,
            reuse_port=True,
            hand_over=len(self.gateways) > 1,
            local_socket=self.socket(gateway_name(number)),
            metrics_port=_own_port(self.settings.gateway_metrics_port, number),
            admin_port=_own_port(self.settings.admin_port, number),
            demo_socket=self.demo_socket if self.settings.demo else None,
            keys_files=(*self.settings.keys_files, *own_keys),
            response_store=self.response_store,
            api_keys=(),
        )
        return [*self.programs.gateway, *to_argv(GatewaySettings, values)]

    def _values(self, **own: object) -> dict[str, object]:
        shared = {field.name: getattr(self.settings, field.name) for field in dataclasses.fields(self.settings)}
        # The settings contain the values of the file already.
        return {**shared, **own, "config": None}

    def _num_threads(self) -> int | None:
        """The number of threads of one worker. By default each of several workers would use all cores."""
        size = self.settings.tensor_parallel_size
        if self.settings.num_threads is not None or size == 1:
            return self.settings.num_threads
        num_cores = len(cores(os.sched_getaffinity(0))) or num_processors()
        return max(min(num_cores, num_processors()) // size, 1)

    @property
    def ranks(self) -> range:
        """The workers that share the model."""
        return range(self.settings.tensor_parallel_size)

    @property
    def gateways(self) -> range:
        """The gateways, which share their ports."""
        return range(self.settings.gateways)

    def worker_address(self, rank: int) -> str:
        return f"unix:{self.socket(worker_name(rank))}"

    def gateway_address(self, number: int) -> str:
        """The unix socket of one gateway, in addition to the shared ports."""
        return f"unix:{self.socket(gateway_name(number))}"

    @property
    def demo_socket(self) -> Path:
        """The socket at which gateways request the supervisor to kill a service."""
        return self.socket("demo")

    @property
    def response_store(self) -> str:
        """Where gateways keep responses. Several gateways share their responses while this process runs."""
        place = self.settings.response_store
        are_shared = len(self.gateways) > 1 and "responses" in self.settings.fronts
        return f"{SQLITE}{self.directory / 'responses.db'}" if place == MEMORY and are_shared else place

    @property
    def scheduler_address(self) -> str:
        return f"unix:{self.socket('scheduler')}"

    def socket(self, name: str) -> Path:
        """The private address of the process with this name."""
        return self.directory / f"{name}.sock"


def worker_name(rank: int) -> str:
    return f"worker-{rank}" if rank else "worker"


def gateway_name(number: int) -> str:
    return f"gateway-{number}" if number else "gateway"


def _own_port(first: int | None, number: int) -> int | None:
    """The port of one gateway, if gateway 0 has `first`; 0 makes each pick a free one."""
    return first + number if first else first


def child_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the services: without `QUIRE_*`, which the flags replace, except for the variable by which
    tests watch processes, and with the path of this code."""
    inherited = {
        name: value for name, value in environ.items() if not name.startswith("QUIRE_") or name == failpoint.VARIABLE
    }
    # The libraries log every peer that goes away; our services log that themselves.
    return {"GRPC_VERBOSITY": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", **environ_of(inherited)}
