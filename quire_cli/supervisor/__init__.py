"""Starts and supervises the processes of one machine: for `quire serve`, and for tests.

async with LocalServer(ServeSettings(grpc_port=0, http_port=0)) as server:
    await server.wait_ready()
    ...  # server.grpc_address, server.http_address, server.process("worker").pid
"""

from quire_cli.supervisor.process import ServiceRefused, SupervisedProcess
from quire_cli.supervisor.server import LocalServer
from quire_cli.supervisor.settings import ServeSettings

__all__ = ["LocalServer", "ServeSettings", "ServiceRefused", "SupervisedProcess"]
