"""Two replicas of real processes with the embedded model, behind one gateway: workers, schedulers, each a process."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from quire.client import AsyncClient
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.testing import free_port
from quire_cli.supervisor.commands import Programs
from tests.support.metrics import read_metrics
from tests.support.scheduler_process import until_state
from tests.support.serving import forked_programs

_MODEL = Path(__file__).parents[2] / "assets/quire-tiny"


@dataclass
class TwoReplicas:
    """Processes by name: "worker-0", "scheduler-0", and so on; and "gateway"."""

    directory: Path
    worker_flags: tuple[str, ...]
    roles: tuple[str, str]
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    client: AsyncClient = field(init=False)
    metrics_ports: tuple[int, int] = (0, 0)

    def socket(self, name: str) -> str:
        return f"unix:{self.directory}/{name}.sock"

    def start_again(self, name: str) -> None:
        """Starts an ended process again, once its socket has no listener: a fork may end after its parent."""
        path = self.socket(name).removeprefix("unix:")
        while _is_listening(path):
            time.sleep(0.01)
        self.start(forked_programs(), name)

    def start(self, programs: Programs, name: str, environ: dict[str, str] | None = None) -> None:
        kind, _, number = name.partition("-")
        if kind == "worker":
            command = [*programs.worker, "--device=cpu", "--num-threads=1", f"--model={_MODEL}", *self.worker_flags]
        else:
            port, role = self.metrics_ports[int(number)], self.roles[int(number)]
            workers = f"--workers={self.socket(f'worker-{number}')}"
            command = [*programs.scheduler, workers, f"--metrics-port={port}", f"--role={role}"]
        command.append(f"--listen={self.socket(name)}")
        self.processes[name] = subprocess.Popen(command, process_group=0, env=os.environ | (environ or {}))

    def start_gateway(
        self,
        programs: Programs,
        port: int,
        name: str = "gateway",
        numbers: tuple[int, ...] = (0, 1),
        routing: str = "round-robin",
    ) -> None:
        """Starts one of the replicas with these numbers."""
        schedulers = ",".join(self.socket(f"scheduler-{number}") for number in numbers)
        flags = [f"--schedulers={schedulers}", f"--model={_MODEL}", f"--grpc-port={port}", f"--http-port={free_port()}"]
        self.processes[name] = subprocess.Popen(
            [*programs.gateway, *flags, f"--routing={routing}", "--long-prompt=64"], process_group=0
        )

    def signal(self, name: str, number: int) -> None:
        """Signals the process, or its group if the process cannot pass the signal on: a fork is two processes."""
        send = os.killpg if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT) else os.kill
        send(self.processes[name].pid, number)

    async def metrics(self, replica: int) -> dict[str, float]:
        """Metrics of a replica's scheduler."""
        return await read_metrics(self.metrics_ports[replica])


@contextlib.asynccontextmanager
async def two_replicas(
    directory: Path,
    *worker_flags: str,
    environs: dict[str, dict[str, str]] | None = None,
    roles: tuple[str, str] = ("both", "both"),
) -> AsyncIterator[TwoReplicas]:
    """Runs all until the block ends. `environs` has variables of single processes."""
    programs = forked_programs()
    flags = ("--dtype=float32", "--num-gpu-blocks=512", *worker_flags)
    replicas = TwoReplicas(directory, flags, roles, metrics_ports=(free_port(), free_port()))
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(lambda: [_end(process) for process in replicas.processes.values()])
        for number in range(2):
            for kind in ("worker", "scheduler"):
                name = f"{kind}-{number}"
                replicas.start(programs, name, (environs or {}).get(name))
        replicas.start_gateway(programs, port)
        for number in range(2):
            channel = await stack.enter_async_context(open_channel(replicas.socket(f"scheduler-{number}")))
            await until_state(SchedulerServiceStub(channel), _is_there, timeout_s=120)
        replicas.client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        yield replicas


def _is_there(state: scheduler_pb2.GetStateResponse) -> bool:
    return state.connected_gateways == 1 and all(worker.attached for worker in state.workers)


def _is_listening(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return not probe.connect_ex(path)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def ended(process: subprocess.Popen[bytes], timeout_s: float = 60) -> int:
    """The exit status of a process that ends."""
    return await asyncio.to_thread(process.wait, timeout_s)
