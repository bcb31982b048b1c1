"""`quire drain`: makes a replica refuse new requests and move its requests to the others."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from quire.client import QuireError
from quire.rpc.address import TcpAddress, parse_address
from quire.rpc.channel import channel_options
from quire.rpc.errors import from_rpc_error
from quire.rpc.tls import Role, TlsIdentity
from quire.runtime.settings import ConfigurationError, load_settings, setting
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

PROGRAM = "quire drain"


@dataclass(frozen=True, slots=True)
class DrainFlags:
    """Drains a replica: it takes no more requests, and gateways that have another replica move its requests there.
    Returns when none is left; then stop its scheduler and its workers. It takes requests again after a restart of its
    scheduler."""

    replica: str | None = setting(
        None, "address of the replica's scheduler, as --schedulers of gateways has it", positional=True
    )
    timeout: float = setting(
        60.0,
        "seconds to wait until no request is left",
        minimum=0,
        maximum=86_400,
        metavar="SECONDS",
        variable="QUIRE_DRAIN_WAIT",
    )
    tls_dir: Path | None = setting(
        None, "directory with ca.pem, operator.pem and operator.key, where services use TLS", metavar="DIR"
    )


def main(argv: Sequence[str]) -> int:
    """Returns 0 if no request is left, 1 if some are."""
    flags = load_settings(DrainFlags, argv, os.environ, program=PROGRAM)
    if flags.replica is None:
        raise ConfigurationError("give the address of a scheduler")
    try:
        remaining = drain(flags.replica, flags)
    except QuireError as error:
        print(f"{PROGRAM}: error: {flags.replica}: {' '.join(error.message.split())}", file=sys.stderr)
        return 1
    print(f"{flags.replica}: {remaining or 'no'} request{'' if remaining == 1 else 's'} left")
    return 1 if remaining else 0


def drain(address: str, flags: DrainFlags) -> int:
    """Drains the replica of a scheduler; returns the number of requests that are left. Raises QuireError."""
    options = channel_options()
    if flags.tls_dir is not None and isinstance(parse_address(address), TcpAddress):
        credentials = TlsIdentity.of(flags.tls_dir, Role.OPERATOR).read().channel_credentials()
        channel = grpc.secure_channel(address, credentials, options)
    else:
        channel = grpc.insecure_channel(address, options)
    request = scheduler_pb2.DrainRequest(timeout_ms=round(flags.timeout * 1e3))
    with channel:
        try:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return stub.Drain(request, timeout=flags.timeout + 5.0).remaining_requests
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
