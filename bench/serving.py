"""Servers of measurements: programs that run until the end of a `with`, and models that are written when first used."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_START_TIMEOUT_S, _STOP_TIMEOUT_S = 300, 30


def quire_serve(model: Path, http_port: int, *flags: str) -> list[str]:
    """The command of `quire serve` for measurements over HTTP."""
    command = [sys.executable, "-m", "quire_cli.main", "serve", f"--model={model}", f"--http-port={http_port}"]
    return [*command, "--grpc-port=0", *flags]


@contextmanager
def served(command: Sequence[str], port: int, log: Path) -> Iterator[int]:
    """A server that is ready, until the end; yields its process id. SystemExit if it does not become ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not become ready, see {log}")
            time.sleep(0.5)
        yield process.pid
    finally:
        process.terminate()
        process.wait(_STOP_TIMEOUT_S)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in opened]


def model_of(shape: str, files: Path, *, whole_vocabulary: bool = False) -> Path:
    """A model of a shape of bench/models.py in this directory, which is written if it is not there."""
    if not (model := files / shape).exists():
        # Another process imports torch, whose memory the measurement must not have.
        make = f"from bench.models import *; write_model({shape!r}, Path({str(model)!r}), {whole_vocabulary=})"
        subprocess.run([sys.executable, "-c", make], check=True)
    return model
