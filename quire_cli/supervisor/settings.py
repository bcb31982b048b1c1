"""The flags of `quire serve`: the flags of the three services, and how many of them to start."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from gateway.settings import FLAGS_OF_MODELS, GatewayFlags
from quire.runtime.logs import LOG_LEVELS
from quire.runtime.settings import overridden, setting
from quire.service.model_flag import ModelFlag
from quire.service.service_flags import DrainFlags, ServedModelsFlags, ServiceFlags
from scheduler_svc.settings import SchedulerFlags
from worker_svc.settings import WorkerFlags

_LAST_PORT = 65535
# Files, and addresses that a scheduler listens at.
_OF_ONE_SCHEDULER = ("record", "trace_steps", "kv_events", "kv_events_replay")


@dataclass(frozen=True)
class ServeSettings(ServedModelsFlags, GatewayFlags, WorkerFlags, SchedulerFlags, DrainFlags):
    """Serves a model on this machine: starts worker, scheduler and gateway, and restarts processes that die."""

    gateways: int = setting(1, "gateway processes, which share the ports", minimum=1, maximum=64)
    demo: bool = setting(
        False,
        "let operators kill the worker or the scheduler from the page /ui, to see that streams go on",
    )
    hang_timeout: float = setting(
        15.0,
        "time after which a service that answers no health check is killed and started again; 0 never",
        minimum=0,
        metavar="SECONDS",
    )
    start_timeout: float = setting(
        120.0,
        "time after which a service that does not listen since its start is killed and started again; loading the "
        "model comes after that and may take any time",
        minimum=1,
        metavar="SECONDS",
    )
    admin_port: int | None = setting(
        None,
        "port of the gateway's channelz on 127.0.0.1, which shows connections and calls, further gateways have the "
        "ports after it; none shows nothing",
        minimum=0,
        maximum=_LAST_PORT,
    )
    gateway_metrics_port: int | None = setting(
        None,
        "port of the first gateway's own metrics, further ones have the ports after it; none serves them on the HTTP "
        "port only, which shows the metrics of any one gateway",
        minimum=0,
        maximum=_LAST_PORT,
    )
    scheduler_metrics_port: int | None = setting(None, "port of the scheduler's metrics", minimum=0, maximum=_LAST_PORT)
    worker_metrics_port: int | None = setting(None, "port of the worker's metrics", minimum=0, maximum=_LAST_PORT)
    standby: bool = setting(
        True,
        "keep a second process of each service, which has imported its packages and waits: a service that dies is "
        "back some seconds sooner; takes 160 MiB for a worker, 90 MiB for gateway and scheduler, while at least 2 GiB "
        "of memory are available",
    )
    worker_niceness: int | None = setting(
        None,
        "niceness of workers in addition to this process's; not given, 10 for models of embeddings or scores that are "
        "served together with models of text, else 0",
        minimum=0,
        maximum=19,
    )
    log_level: str = setting(
        "warning",
        "lowest log level of the services; SIGUSR1 lowers it to debug, SIGUSR2 sets it back",
        choices=LOG_LEVELS,
    )

    def of_model(self, model: ModelFlag) -> Self:
        """The settings of one of the served models, with the values of its flags. Raises ConfigurationError."""
        flags = {each.name for cls in (WorkerFlags, SchedulerFlags) for each in dataclasses.fields(cls)}
        flags -= {each.name for each in dataclasses.fields(ServiceFlags)} | {"tenant_metrics"}
        of_one = dataclasses.replace(self, models=(dataclasses.replace(model, overrides=()),))
        allowed = flags | {*FLAGS_OF_MODELS, "scheduler_metrics_port", "worker_metrics_port", "worker_niceness"}
        return overridden(of_one, model.overrides, allowed, source=f"--model {model.name}")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_only_by_model("served_model_name", "served_model_aliases", "adapters", *_OF_ONE_SCHEDULER)
        for model in self.models:
            if model.overrides:
                self.of_model(model)
        highest = _LAST_PORT + 1 - self.gateways
        for flag, first in (("--gateway-metrics-port", self.gateway_metrics_port), ("--admin-port", self.admin_port)):
            if first and first > highest:
                raise ValueError(
                    f"{flag} is {first}; {self.gateways} gateways have a port each from there on, so at most {highest}"
                )
