"""Processes that hang as soon as the server is ready: the supervisor notices, whoever it is, and starts them again."""

import os
import signal

import pytest

from quire.client import GenerationOptions
from tests.support.processes import until_true
from tests.support.serving import serving

pytestmark = pytest.mark.extended

NAMES = ("worker", "scheduler", "gateway")


async def test_processes_that_stop_right_after_ready_are_started_again_and_serve() -> None:
    async with serving(num_gpu_blocks=64, hang_timeout=9.0) as served:
        processes = [served.server.process(name) for name in NAMES]
        for process in processes:
            os.killpg(process.pid, signal.SIGSTOP)
        await until_true(lambda: all(process.starts > 1 for process in processes), timeout_s=100)
        await served.server.wait_ready()
        generated = await served.client.generate("Once upon a time", GenerationOptions(max_tokens=8))
        assert generated.text
