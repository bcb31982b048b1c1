"""Measures all services as clients see them, with requests that are sent at once by the driver of `quire bench`."""

from collections.abc import Sequence
from dataclasses import replace

from quire.load import LoadRequest, Report, make_report
from quire_cli.bench.driver import Driver, Pacing
from quire_cli.bench.grpc_client import GrpcServer

_TIMEOUT_S = 900


async def send_at_once(
    address: str, requests: Sequence[LoadRequest], *, temperature: float = 0.0, top_p: float = 1.0
) -> Report:
    """Streams all requests over gRPC. RuntimeError if a request fails or a token is missing."""
    sampling = {"temperature": temperature, "top_p": top_p}
    server = GrpcServer(address, model=None, api_key=None, tls=None, sampling=sampling, ignore_eos=True)
    pacing = Pacing(max_concurrency=None, is_closed=False, duration_s=None, timeout_s=_TIMEOUT_S)
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
