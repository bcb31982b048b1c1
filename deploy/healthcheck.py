"""Asks a server of this container by gRPC health whether it serves. Exit status 0: it does; 1: it does not.

usage: healthcheck.py HOST:PORT
"""

import sys

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

METHOD = "/grpc.health.v1.Health/Check"
TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Prints the status in one line, where people see it: in the container's health log."""
    (address,) = argv
    with grpc.insecure_channel(address) as channel:
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
    return 0 if status == HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
