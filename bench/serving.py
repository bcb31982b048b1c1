"""Servers of measurements: programs that run until the end of a `with`, models that are written when first used, and
requests that are sent at once by the driver of `quire bench`."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from quire.load import LoadRequest, Report, make_report
from quire_cli.bench.driver import Driver, Pacing
from quire_cli.bench.grpc_client import GrpcServer

_START_TIMEOUT_S, _STOP_TIMEOUT_S, _REQUEST_TIMEOUT_S = 300, 30, 900


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


def post_request(address: str, path: str, fields: Mapping[str, object]) -> bytes:
    """An HTTP request with a JSON body, as bytes on the wire."""
    body = json.dumps(fields)
    head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def model_of(shape: str, files: Path, *, whole_vocabulary: bool = False) -> Path:
    """A model of a shape of bench/models.py in this directory, which is written if it is not there."""
    if not (model := files / shape).exists():
        # Another process imports torch, whose memory the measurement must not have.
        make = f"from bench.models import *; write_model({shape!r}, Path({str(model)!r}), {whole_vocabulary=})"
        subprocess.run([sys.executable, "-c", make], check=True)
    return model


async def send_at_once(
    address: str, requests: Sequence[LoadRequest], *, temperature: float = 0.0, top_p: float = 1.0
) -> Report:
    """Streams all requests over gRPC. RuntimeError if a request fails or a token is missing."""
    sampling = {"temperature": temperature, "top_p": top_p}
    server = GrpcServer(address, model=None, api_key=None, tls=None, sampling=sampling, ignore_eos=True)
    pacing = Pacing(max_concurrency=None, is_closed=False, duration_s=None, timeout_s=_REQUEST_TIMEOUT_S)
    driver = Driver(server, pacing, lambda *_: None)
    try:
        await server.connect()
        await driver.run(replace(request, arrival_s=0.0) for request in requests)
    finally:
        await server.close()
    report = make_report(driver.outcome.records, request_rate=float("inf"), client_cpu_s=driver.outcome.cpu_s)
    wanted = sum(request.output_len or 0 for request in requests)
    if report.errors or report.output_tokens != wanted:
        raise RuntimeError(f"{report.output_tokens} of {wanted} tokens came; failed: {driver.outcome.messages}")
    return report
