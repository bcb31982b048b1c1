"""The servers in bench/peers, with stand-ins for their engines, as `quire bench` measures them."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from quire.load import LoadResult
from tests.e2e.test_bench import bench

pytestmark = pytest.mark.extended

ROOT = Path(__file__).resolve().parents[2]
# As much of openvino_genai as the server uses: every step makes one token of each request.
OPENVINO_GENAI = """
import enum

class GenerationStatus(enum.Enum):
    RUNNING = 0
    FINISHED = 1

class SchedulerConfig: pass
class GenerationConfig: pass

class Output:
    generated_ids = [7]

class Handle:
    def __init__(self, left):
        self.left, self.unread = left, 0
    def can_read(self):
        return self.unread > 0
    def read(self):
        self.unread -= 1
        return {0: Output()}
    def get_status(self):
        return GenerationStatus.RUNNING if self.left else GenerationStatus.FINISHED

class ContinuousBatchingPipeline:
    def __init__(self, model, scheduler, device, hints):
        self.handles = []
    def add_request(self, number, prompt, config):
        assert prompt.data.shape[0] == 1
        self.handles.append(Handle(config.max_new_tokens))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            if handle.left:
                handle.left -= 1
                handle.unread += 1
"""
OPENVINO = """
class Tensor:
    def __init__(self, data):
        self.data = data
"""


async def test_openvino_is_measured_through_its_server(tmp_path: Path) -> None:
    (tmp_path / "openvino_genai.py").write_text(OPENVINO_GENAI)
    (tmp_path / "openvino.py").write_text(OPENVINO)
    program = ROOT / "bench" / "peers" / "openvino_genai_server.py"
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = await asyncio.create_subprocess_exec(
        sys.executable, str(program), "model", "0", env=environ, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout is not None
        url = (await server.stdout.readline()).decode().removeprefix("ready ").strip()
        out = tmp_path / "a.json"
        flags = ("--dataset=fixed", "--prompt-len=5", "--output-len=9", "--num-requests=12", "--max-concurrency=4")
        status, _, stderr = await bench("--backend=openai", f"--url={url}", *flags, f"--out={out}")
        assert status == 0, stderr
    finally:
        server.kill()
        await server.wait()
    report = LoadResult.read(out).runs[0].report
    assert (report.completed, report.output_tokens, report.errors) == (12, 108, {})
    assert report.itl is not None
    assert report.itl.count == 12 * 8
