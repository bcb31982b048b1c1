"""Checks by gRPC health whether a server of this container serves. Exit status 0: it does; 1: it does not.

usage: healthcheck.py [--alive] HOST:PORT|unix:PATH

With --alive any answer is enough: a server that waits for another service must not be restarted.
Where QUIRE_TLS_DIR names a directory, it speaks TLS with a certificate from there, except to a unix socket. Health is
open to all roles.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

METHOD = "/grpc.health.v1.Health/Check"
TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Prints the status in one line, which the container's health log shows."""
    *flags, address = argv
    with open_channel(address, os.environ.get("QUIRE_TLS_DIR")) as channel:
        check = channel.unary_unary(
            METHOD,
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        try:
            status = check(HealthCheckRequest(), timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            print(f"{address}: {error}")
            return 1
    print(f"{address}: {HealthCheckResponse.ServingStatus.Name(status)}")
    return 0 if flags == ["--alive"] or status == HealthCheckResponse.SERVING else 1


def open_channel(address: str, tls_dir: str | None) -> grpc.Channel:
    """Encrypted by the files in a directory, if given, except to a unix socket."""
    if not tls_dir or address.startswith("unix:"):
        return grpc.insecure_channel(address)
    keys = [path for path in sorted(Path(tls_dir).glob("*.key")) if path.name != "ca.key"]
    if not keys:
        sys.exit(f"{tls_dir} has no key of a service")
    key = keys[0]
    files = (Path(tls_dir) / "ca.pem", key, key.with_suffix(".pem"))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*(path.read_bytes() for path in files)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
