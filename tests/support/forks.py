"""Commands that are forks of a process that has imported what they need (tests.support.forked_services).

The forking process ends with the process that started it. All child processes find the processes of `share_forks`.
"""

import atexit
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

WORKER = ("worker_svc.startup", "worker_svc.app")
_FRONTS = ("openai", "responses", "anthropic", "kserve", "batches", "ui")
_SERVERS = ("quire_cli.serve", "quire_cli.batch")
SERVICES = (*_SERVERS, "scheduler_svc.service.app", "gateway.app", *(f"gateway.api.{name}.front" for name in _FRONTS))
TRIALS = ("quire.constraints.check_process", "quire.constraints.matcher", "gateway.text.request_template")
_SHARED = "TEST_FORKS_"
_ROOT = Path(__file__).parents[2]
_SERVICE = Path(__file__).with_name("forked_service.py")


@cache
def _address_of_forks(*modules: str) -> str:
    """The address of a process that has imported these modules and forks from then on while this process runs."""
    if (shared := os.environ.get(_SHARED + "_".join(modules))) is not None:
        return shared
    return _start("tests.support.forked_services", modules)


def _start(program: str, arguments: Sequence[str]) -> str:
    """Starts a program that forks; returns its address."""
    directory = tempfile.mkdtemp(prefix="quire-forks-")
    address = f"{directory}/socket"
    # The libraries log every peer that goes away; our services log that themselves.
    quiet = {"GRPC_VERBOSITY": "ERROR", "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONPATH": str(_ROOT)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        command = [sys.executable, "-P", "-m", program, str(listener.fileno()), *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=os.environ | quiet, process_group=0
        )

    starter = os.getpid()

    def end() -> None:
        # Not in a fork of the process that started it.
        if os.getpid() == starter:
            process.communicate()
            shutil.rmtree(directory)

    atexit.register(end)
    return address


def forked(module: str, *imported: str) -> tuple[str, ...]:
    """The command `python -m MODULE`, without flags, as a fork of a process that has imported these modules."""
    return _fork_of(_address_of_forks(*imported), module)


def _fork_of(address: str, module: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", str(_SERVICE), address, module)


def share_forks() -> None:
    """Starts the processes that fork services, for this process and all that it starts from now on."""
    for modules in (WORKER, SERVICES, TRIALS):
        os.environ[_SHARED + "_".join(modules)] = _address_of_forks(*modules)


def forked_pytest(*arguments: str) -> str:
    """The command that pytest-xdist starts instead of `python`, for its processes: forks of a process that has imported
    the files of tests that these arguments of pytest select."""
    return shlex.join(_fork_of(_start("tests.support.collected_pytest", arguments), "tests.support.forked_pytest"))
