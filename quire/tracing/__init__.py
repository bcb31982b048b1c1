"""Distributed traces: contexts as they travel in headers and messages, spans, and where spans and metrics are sent.

Spans are OpenTelemetry's, through its API. A service has a Tracer where an endpoint is configured and None otherwise:
without an endpoint it makes no spans and passes no contexts on. Only `open_tracer` with an endpoint imports the SDK and
the exporter of OpenTelemetry, which the extra `quire-llm[tracing]` installs; only spans and meters import its API.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from quire.runtime.settings import ConfigurationError
from quire.tracing.spans import AttributeValue, Span, TraceContext, Tracer

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

__all__ = [
    "AttributeValue",
    "Span",
    "TraceContext",
    "Tracer",
    "check_installed",
    "open_meter",
    "open_tracer",
    "parse_endpoint",
]

_FLAG, _METRICS_FLAG = "--otlp-traces-endpoint", "--otlp-metrics-endpoint"


def parse_endpoint(text: str) -> str:
    """A collector's address, http://HOST:PORT or https://HOST:PORT. Raises ValueError for anything else."""
    expected = "expected http://HOST:PORT, or https://HOST:PORT for TLS"
    url = urlsplit(text)
    if url.scheme not in ("http", "https") or not url.hostname or url.username is not None:
        raise ValueError(expected)
    if url.path not in ("", "/") or url.query or url.fragment:
        raise ValueError(f"{expected}; OTLP over gRPC has no path")
    if url.port is None:  # raises ValueError where it is no port
        raise ValueError(f"{expected}; the port is missing, collectors usually have 4317")
    return text.rstrip("/")


def check_installed(endpoint: str | None, flag: str = _FLAG) -> None:
    """Raises ConfigurationError if there is an endpoint and no exporter is installed."""
    if endpoint is None:
        return
    try:
        import quire.tracing.otlp  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"{flag} needs {error.name}, which is not installed; install quire-llm[tracing]"
        ) from error


def open_meter(endpoint: str | None, service: str) -> tuple["Meter", Callable[[], None]] | None:
    """Sends the metrics of a service to a collector; returns its meter, and a function that ends the sending. None
    without an endpoint. Raises ConfigurationError as `open_tracer` does."""
    if endpoint is None:
        return None
    check_installed(endpoint, _METRICS_FLAG)
    from quire.tracing.otlp import make_meter

    try:
        return make_meter(service, endpoint)
    except Exception as error:  # the SDK's errors have no common class
        raise ConfigurationError(f"{_METRICS_FLAG} {endpoint}: {error}") from error


def open_tracer(endpoint: str | None, service: str) -> Tracer | None:
    """Sends the spans of a service, for example "gateway", to a collector; None without an endpoint.

    Returns at once: the log says later whether the collector can be reached.

    Raises:
        ConfigurationError: OpenTelemetry's SDK is not installed, or one of its own variables makes no sense.
    """
    if endpoint is None:
        return None
    check_installed(endpoint)
    from quire.tracing.otlp import make_tracer, open_exporter

    try:
        return make_tracer(service, open_exporter(endpoint))
    except Exception as error:  # the SDK's errors have no common class
        raise ConfigurationError(f"{_FLAG} {endpoint}: {error}") from error
