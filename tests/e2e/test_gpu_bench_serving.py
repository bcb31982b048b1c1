"""What is measured on a GPU through all services runs on the CPU as well, where its figures say nothing."""

from pathlib import Path

import pytest

from bench.gpu_serving import make_requests, serve
from quire_cli.supervisor import ServeSettings

pytestmark = pytest.mark.extended


async def test_requests_are_served_and_the_trace_says_how_busy_the_device_was(tmp_path: Path) -> None:
    work = make_requests(1, count=3, lengths=(3, 9), output_tokens=24)
    served = await serve(ServeSettings(device="cpu", num_threads=1), work, tmp_path / "trace.json")
    assert served.report.output_tokens == 3 * 24
    assert served.tokens_per_s > 0
    assert 0 < served.busy <= 1
