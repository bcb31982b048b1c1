"""Flags that several services have, and the place to declare a new one.

Each flag is declared once: here if several services have it, else in one of the two classes of its service.
`WorkerFlags` has the worker's flags that `quire serve` takes, too, and passes on; `WorkerSettings` adds the flags that
`quire serve` decides for each process that it starts. The docstrings of these classes are the headings of `--help`.
"""

from dataclasses import dataclass
from pathlib import Path

from quire.runtime.logs import LOG_FORMATS, LOG_LEVELS
from quire.runtime.settings import setting
from quire.service.model_flag import ModelFlag
from quire.tracing import parse_endpoint


# Here and in all that inherits from it no slots: CPython lets a class have one base with slots, and these have several.
@dataclass(frozen=True)
class ServiceFlags:
    """Configuration file, certificates, logs, metrics and traces of every service."""

    config: Path | None = setting(
        None,
        "configuration file in TOML; its keys are these flags without the dashes; flags and variables win over it",
        metavar="FILE",
        common=True,
    )
    tls_dir: Path | None = setting(
        None,
        "directory of certificates, as `quire certs` makes it; none encrypts nothing",
        metavar="DIR",
        common=True,
    )
    log_format: str = setting("text", "form of log lines on stderr", choices=LOG_FORMATS)
    metrics_host: str = setting("127.0.0.1", "host of the ports for Prometheus metrics")
    otlp_traces_endpoint: str | None = setting(
        None,
        "where to send OpenTelemetry traces by OTLP over gRPC; https is TLS; none traces nothing",
        parse=parse_endpoint,
        metavar="URL",
    )

    def __post_init__(self) -> None:
        """Raises ValueError if values contradict each other. Subclasses call it before their own checks."""


@dataclass(frozen=True)
class PoolingFlags(ServiceFlags):
    """Vectors of a model that generates text."""

    pooling: str = setting(
        "auto",
        "serve a model that generates text as a model of embeddings: the vector of a text is the hidden state of its "
        "last token, or the mean of all; auto is what the model's files say",
        choices=("auto", "last", "mean"),
    )
    score_tokens: tuple[str, ...] = setting(
        (),
        "serve a model that generates text as one that ranks: the score of a document is the logit of the first token "
        "less the logit of the second, such as yes,no; see --score-template",
        metavar="YES,NO",
    )


@dataclass(frozen=True)
class ModelFlags(PoolingFlags):
    """The model."""

    model: str | None = setting(
        None,
        "model directory, or ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub if no such path exists; none is the "
        "embedded model",
        metavar="DIR|ORG/NAME",
        common=True,
    )


@dataclass(frozen=True)
class ServedModelsFlags(PoolingFlags):
    """The models."""

    models: tuple[ModelFlag, ...] = setting(
        (),
        "model directory, or ORG/NAME or ORG/NAME@REVISION of the Hugging Face Hub if no such path exists; none is the "
        "embedded model. Repeated, each is a model of its own: NAME=DIR, and flags of this model after commas, as in "
        "NAME=DIR,kv-cache-memory=1GiB; see docs/models-together.md",
        flag="--model",
        parse=lambda text: (ModelFlag.parse(text),),
        metavar="DIR|ORG/NAME",
        common=True,
    )

    @property
    def served_models(self) -> tuple[ModelFlag, ...]:
        """The models to serve, at least one; the first is the default of calls that name none."""
        return self.models or (ModelFlag(),)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [each.name for each in self.served_models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"--model has the name {twice} twice; give each model its own: --model NAME=DIR")

    def check_only_by_model(self, *names: str) -> None:
        """Raises ValueError if one of these settings, which can be of one model only, is given for several."""
        for name in names if len(self.served_models) > 1 else ():
            if getattr(self, name):
                flag = name.replace("_", "-")
                raise ValueError(
                    f"--{flag} is of one model, and there are several; give it with its model: --model "
                    f"NAME=DIR,{flag}=VALUE"
                )


@dataclass(frozen=True)
class StepFlags(ServiceFlags):
    """When a worker hangs."""

    step_timeout: float = setting(
        60.0,
        "seconds after which an unanswered step means a lost worker; a worker that is in one for twice as long ends; "
        "requests whose constraint takes longer to compile fail",
        minimum=0.1,
        metavar="SECONDS",
    )


@dataclass(frozen=True)
class TenantFlags(ServiceFlags):
    """Metrics of tenants."""

    tenant_metrics: int = setting(
        0,
        "number of tenants with metrics of their own, first come, first served; the others are counted together; 0 "
        "counts no tenants",
        minimum=0,
        maximum=10_000,
        metavar="TENANTS",
    )


@dataclass(frozen=True)
class DrainFlags(ServiceFlags):
    """Shutdown."""

    drain_timeout: float = setting(
        30.0, "seconds for live requests to finish at shutdown", minimum=0, metavar="SECONDS"
    )


@dataclass(frozen=True)
class ReplicaFlags(ServiceFlags):
    """Metrics of a replica."""

    metrics_model: str | None = setting(
        None,
        "label `model` of all metrics, for replicas of several models; without it they have no such label",
        metavar="NAME",
    )


@dataclass(frozen=True)
class ProcessFlags(ServiceFlags):
    """How to watch this process."""

    admin_port: int | None = setting(
        None,
        "port on 127.0.0.1 that changes the log level (`quire log-level`) and shows connections and calls (channelz)",
        minimum=0,
        maximum=65535,
    )
    metrics_port: int | None = setting(
        None, "port of the Prometheus metrics; without it, metrics are off", minimum=0, maximum=65535
    )
    log_level: str = setting(
        "info", "lowest log level; `quire log-level` and SIGUSR1 change it while the service runs", choices=LOG_LEVELS
    )
