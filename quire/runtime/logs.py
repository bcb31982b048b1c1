"""The logs of a process: their form, the request that a record is about, and their level, which may change at run time.

    configure_logging("worker", "info", "json")

A record in JSON has the fields time, level, service, logger, message; request_id if it is about a request; and
exception, a traceback, if there is one.
"""

import datetime as dt
import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from quire.runtime import clock
from quire.runtime.settings import misspelt_variables

LOG_LEVELS = ("debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")
REQUEST_ID = "request_id"
"""Where a record is about another request than the current one: `logger.error(..., extra={REQUEST_ID: ...})`."""

# Characters that end a line or that a terminal obeys, such as the beginning of a colour.
_ESCAPES = {code: repr(chr(code))[1:-1] for code in (*range(9), *range(10, 32), *range(0x7F, 0xA0), 0x2028, 0x2029)}
_NOISY = ("asyncio", "httpx", "httpx2", "httpcore", "httpcore2", "uvicorn.access")
_request_id: ContextVar[str | None] = ContextVar("request id of log records", default=None)
_logger = logging.getLogger(__name__)


def configure_logging(service: str, level: str = "info", log_format: str = "text") -> None:
    """Sends the process's logs to stderr, one line a record: time, level, service, logger, message.

    Libraries that log every request stay at warnings, unless `level` is "debug".
    """
    logging.basicConfig(handlers=[ServiceHandler(service, level, log_format)], force=True)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_no_fault_of_a_caller)
    _set_level(level)


def begin_logging(
    service: str, level: str, log_format: str, settings: type, environ: Mapping[str, str], *, program: str
) -> None:
    """`configure_logging`, and a warning for each variable of the environment that is almost one of the settings."""
    configure_logging(service, level, log_format)
    for line in misspelt_variables(settings, environ, program=program):
        _logger.warning("%s", line)


def _is_no_fault_of_a_caller(record: logging.LogRecord) -> bool:
    """gRPC logs, whole and with tracebacks, names and metadata of calls that are not UTF-8, and answers to clients that
    have left: any caller could fill disks."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ not in ("UnicodeDecodeError", "ExecuteBatchError")


def set_request_id(request_id: str) -> None:
    """From now on records of this task, and of tasks that it starts, are about this request."""
    _request_id.set(request_id)


def change_level(level: str | None) -> str:
    """Sets the level, or with None the level of `configure_logging`; returns it. Logs the change, except at error."""
    changed = configured_level() if level is None else level
    _set_level(changed)
    _logger.warning("the log level is %s from now on", changed)
    return changed


def configured_level() -> str:
    """The level of `configure_logging`; without it the level of Python's own configuration."""
    ours = [each.configured_level for each in logging.getLogger().handlers if isinstance(each, ServiceHandler)]
    return ours[0] if ours else "warning"


def _set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())
    is_debug = level == "debug"
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.NOTSET if is_debug else logging.WARNING)
    # Its warnings are about clients' uploads.
    logging.getLogger("python_multipart").setLevel(logging.NOTSET if is_debug else logging.ERROR)
    # It logs every failed attempt to reach a collector; quire.tracing logs the first one.
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET if is_debug else logging.CRITICAL)


def json_line(service: str, level: str, logger: str, message: str, others: Mapping[str, str] | None = None) -> str:
    """One record in JSON, without the end of the line."""
    now = dt.datetime.fromtimestamp(clock.unix_s(), dt.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    fields = {"time": now, "level": level, "service": service, "logger": logger, "message": message, **(others or {})}
    return json.dumps(fields, ensure_ascii=False)


class ServiceHandler(logging.StreamHandler[Any]):
    """Writes the records of a service.

    Attributes:
        configured_level: The level at the start.
    """

    def __init__(self, service: str, level: str, log_format: str) -> None:
        super().__init__(sys.stderr)
        self.configured_level = level
        if log_format == "json":
            self.setFormatter(_JsonFormatter(service))
        else:
            line = f"%(asctime)s.%(msecs)03d %(levelname)s {service} %(name)s %(message)s"
            self.setFormatter(_TextFormatter(line, "%Y-%m-%dT%H:%M:%S"))


class _TextFormatter(logging.Formatter):
    """One line per record, with any texts of callers in it; a traceback follows."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).translate(_ESCAPES)


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        others: dict[str, str] = {}
        request_id = getattr(record, REQUEST_ID, None) or _request_id.get()
        if request_id is not None:
            others[REQUEST_ID] = str(request_id)
        if record.exc_info:
            others["exception"] = self.formatException(record.exc_info)
        level = record.levelname.lower()
        return json_line(self._service, level, record.name, record.getMessage(), others)
