"""Requests of operators to a process of any service: the servicer of `--admin-port`, and calls to it."""

import asyncio

import grpc
import grpc.aio

from quire.common.v1 import admin_pb2, admin_pb2_grpc
from quire.rpc.errors import from_rpc_error, invalid_field
from quire.rpc.tls import TlsIdentity
from quire.runtime.logs import LOG_LEVELS, change_level, configured_level

ADMIN_SERVICE = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
MAX_DURATION_MS = 86_400_000
_PREFIX = "LOG_LEVEL_"
_OPTIONS = (("grpc.enable_http_proxy", 0),)
"""As channels between services have it."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Changes this process: its log level."""

    def __init__(self) -> None:
        self._end: asyncio.TimerHandle | None = None

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: grpc.aio.ServicerContext
    ) -> admin_pb2.SetLogLevelResponse:
        if request.level not in admin_pb2.LogLevel.values():
            raise invalid_field("level", f"is {request.level}; at most {admin_pb2.LOG_LEVEL_ERROR}, error")
        if request.duration_ms > MAX_DURATION_MS:
            raise invalid_field("duration_ms", f"is {request.duration_ms}; at most {MAX_DURATION_MS}, a day")
        self.cancel()
        level = change_level(_level_of(request.level))
        if request.duration_ms:
            self._end = asyncio.get_running_loop().call_later(request.duration_ms / 1000, change_level, None)
        return admin_pb2.SetLogLevelResponse(level=_name_of(level), configured_level=_name_of(configured_level()))

    def add_to(self, server: grpc.aio.Server) -> None:
        admin_pb2_grpc.add_AdminServiceServicer_to_server(self, server)

    def cancel(self) -> None:
        """The level stays as it is."""
        if self._end is not None:
            self._end.cancel()
            self._end = None


def set_log_level(
    address: str, level: str | None, *, duration_s: float, tls: TlsIdentity | None, timeout_s: float
) -> tuple[str, str]:
    """Changes the log level of the process whose admin port this is; None is the level that it was started with.

    Returns:
        The level in force, and the one that the process was started with.

    Raises:
        QuireError: the call failed.
        ConfigurationError: the files of `tls` cannot be used.
    """
    request = admin_pb2.SetLogLevelRequest(level=_name_of(level), duration_ms=round(duration_s * 1e3))
    credentials = None if tls is None else tls.read().channel_credentials()
    with (
        grpc.insecure_channel(address, _OPTIONS)
        if credentials is None
        else grpc.secure_channel(address, credentials, _OPTIONS)
    ) as channel:
        try:
            answer = admin_pb2_grpc.AdminServiceStub(channel).SetLogLevel(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return _level_of(answer.level) or "unknown", _level_of(answer.configured_level) or "unknown"


def _name_of(level: str | None) -> str:
    """The name of the enum's value; None is the configured level."""
    return _PREFIX + ("unspecified" if level is None else level).upper()


def _level_of(value: admin_pb2.LogLevel) -> str | None:
    """The level in a message; None for the configured level."""
    level = admin_pb2.LogLevel.Name(value).removeprefix(_PREFIX).lower()
    return level if level in LOG_LEVELS else None
