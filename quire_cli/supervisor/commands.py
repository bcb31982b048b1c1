"""The processes that `quire serve` starts, and their command lines. The services listen on private unix sockets."""

import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.settings import FLAGS_OF_MODELS, MEMORY, SQLITE, GatewaySettings
from quire.rpc.process import command_of, environ_of
from quire.runtime import failpoint
from quire.runtime.processors import cores, num_processors
from quire.runtime.settings import to_argv
from quire_cli.supervisor.settings import ServeSettings
from scheduler_svc.settings import SchedulerSettings
from worker_svc.settings import WorkerSettings

_MAX_PLAIN = 24


@dataclass(frozen=True, slots=True)
class Programs:
    """The command of each service, without its flags. Tests replace them."""

    worker: tuple[str, ...] = (*command_of("worker_svc"),)
    scheduler: tuple[str, ...] = (*command_of("scheduler_svc"),)
    gateway: tuple[str, ...] = (*command_of("gateway"),)


@dataclass(frozen=True, slots=True)
class Commands:
    """The command lines of one `quire serve`, whose sockets lie in `directory`.

    Models have numbers, in the order of --model; the first one is 0.

    Attributes:
        rendezvous_ports: For each model, the port of the rendezvous of its ranks, if it has several.
        probe_keys: The file with the supervisor's key and the keys of --api-key, if the gateway requires keys.
        pool_files: For each model, the file of each rank's KV pool; empty if pools end with their workers.
        memory_shares: For each model, its share of the available memory; by default all.
    """

    settings: ServeSettings
    programs: Programs
    directory: Path
    rendezvous_ports: Sequence[int] = ()
    probe_keys: Path | None = None
    pool_files: Sequence[Sequence[Path]] = ()
    memory_shares: Sequence[float] = ()

    def worker(self, rank: int, model: int = 0) -> list[str]:
        """The command line of a rank of a model. Only the first rank serves the port of the metrics."""
        settings, files = self.of_model(model), self.pool_files[model : model + 1]
        values = _values(
            settings,
            model=self.settings.served_models[model].source,
            listen=self.worker_address(rank, model),
            metrics_port=self._port_of(model, "worker_metrics_port") if rank == 0 else None,
            metrics_model=self._label_of(model),
            admin_port=None,
            num_threads=_num_threads(settings),
            tensor_parallel_rank=rank,
            tensor_parallel_address=f"127.0.0.1:{(*self.rendezvous_ports[model : model + 1], 0)[0]}",
            kv_cache_file=files[0][rank] if files and files[0] else None,
            memory_share=(*self.memory_shares[model : model + 1], None)[0],
        )
        return [*self.programs.worker, *to_argv(WorkerSettings, values)]

    def scheduler(self, model: int = 0) -> list[str]:
        """The command line of a model's scheduler."""
        values = _values(
            self.of_model(model),
            listen=self.scheduler_address_of(model),
            workers=tuple(self.worker_address(rank, model) for rank in self.ranks(model)),
            metrics_port=self._port_of(model, "scheduler_metrics_port"),
            metrics_model=self._label_of(model),
            admin_port=None,
        )
        return [*self.programs.scheduler, *to_argv(SchedulerSettings, values)]

    def gateway(self, number: int, grpc_port: int, http_port: int) -> list[str]:
        """The command line of a gateway. All share the two ports; each has the next ports of metrics and channelz."""
        own_keys = () if self.probe_keys is None else (self.probe_keys,)
        models = self.settings.served_models
        addresses = [self.scheduler_address_of(model) for model in self.models]
        named = [f"{model.name}={address}" for model, address in zip(models, addresses, strict=True)]
        values = _values(
            self.settings,
            models=tuple(each.with_only(FLAGS_OF_MODELS) for each in self.settings.models) or None,
            schedulers=tuple(named if len(models) > 1 else addresses),
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

    def of_model(self, model: int) -> ServeSettings:
        """The settings of a model."""
        return self.settings.of_model(self.settings.served_models[model])

    def _label_of(self, model: int) -> str | None:
        """The label `model` of a model's metrics, if there are several."""
        return self.settings.served_models[model].name if len(self.models) > 1 else None

    def _port_of(self, model: int, name: str) -> int | None:
        """The port of a model's metrics: its own, or the number of the model after the port that is given for all."""
        port = getattr(self.of_model(model), name)
        return port if port != getattr(self.settings, name) else _own_port(port, model)

    @property
    def models(self) -> range:
        """The numbers of the models."""
        return range(len(self.settings.served_models))

    def ranks(self, model: int = 0) -> range:
        """The workers that share a model."""
        return range(self.of_model(model).tensor_parallel_size)

    @property
    def gateways(self) -> range:
        """The gateways, which share their ports."""
        return range(self.settings.gateways)

    def worker_name(self, rank: int, model: int = 0) -> str:
        return f"worker{self._suffix(model)}" + (f"-{rank}" if rank else "")

    def scheduler_name(self, model: int = 0) -> str:
        return f"scheduler{self._suffix(model)}"

    def _suffix(self, model: int) -> str:
        """The end of the names of a model's processes; the first model has none."""
        return f"-{self.settings.served_models[model].name}" if model else ""

    def worker_address(self, rank: int, model: int = 0) -> str:
        return f"unix:{self.socket(self.worker_name(rank, model))}"

    def gateway_address(self, number: int) -> str:
        """The unix socket of one gateway, in addition to the shared ports."""
        return f"unix:{self.socket(gateway_name(number))}"

    @property
    def demo_socket(self) -> Path:
        """The socket at which gateways request the supervisor to kill a service."""
        return self.socket("demo")

    @property
    def response_store(self) -> str:
        """Where gateways keep responses. By default in a file that lasts as long as this process: a gateway that is
        started again has the responses of the one before, and continues background responses."""
        place = self.settings.response_store
        has_file = place == MEMORY and "responses" in self.settings.fronts
        return f"{SQLITE}{self.directory / 'responses.db'}" if has_file else place

    @property
    def scheduler_address(self) -> str:
        """The address of the first model's scheduler."""
        return self.scheduler_address_of(0)

    def scheduler_address_of(self, model: int) -> str:
        return f"unix:{self.socket(self.scheduler_name(model))}"

    def socket(self, name: str) -> Path:
        """The private address of the process with this name. A name that is long or no file's is hashed: paths of
        sockets are short."""
        is_plain = len(name) <= _MAX_PLAIN and "/" not in name
        return self.directory / f"{name if is_plain else hashlib.sha256(name.encode()).hexdigest()[:_MAX_PLAIN]}.sock"


def worker_name(rank: int) -> str:
    """The name of a worker of the first model."""
    return f"worker-{rank}" if rank else "worker"


def _values(settings: ServeSettings, **own: object) -> dict[str, object]:
    shared = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    # The settings contain the values of the file already.
    return {**shared, **own, "config": None}


def _num_threads(settings: ServeSettings) -> int | None:
    """The number of threads of one worker. By default each of several ranks would use all cores."""
    size = settings.tensor_parallel_size
    if settings.num_threads is not None or size == 1:
        return settings.num_threads
    num_cores = len(cores(os.sched_getaffinity(0))) or num_processors()
    return max(min(num_cores, num_processors()) // size, 1)


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
