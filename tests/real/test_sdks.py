"""Client libraries of other makers, in an environment of their own, read streams that were silent."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real.packages import installed
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import comments_after_each_piece, running_gateway

pytestmark = pytest.mark.real
_SDKS = Path(__file__).parent / "sdks"


@pytest.mark.parametrize("extra", [{}, {"durable": True}], ids=["without ids", "with ids"])
@pytest.mark.parametrize("library", ["openai", "langchain", "litellm", "pydantic_ai"])
async def test_client_libraries_read_streams_with_a_keepalive_after_each_piece(
    library: str, extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    comments = comments_after_each_piece(monkeypatch)
    environ = os.environ | {"PYTHONPATH": str(installed(_SDKS / "requirements.txt"))}
    async with FakeScheduler() as scheduler, running_gateway(scheduler) as gateway:
        command = (sys.executable, _SDKS / "reader.py", library, f"{gateway.http_url}/v1", json.dumps(extra))
        reader = await asyncio.create_subprocess_exec(*command, env=environ, stdout=subprocess.PIPE)
        printed, _ = await asyncio.wait_for(reader.communicate(), 120)
    assert reader.returncode == 0
    assert len(json.loads(printed)) > 3
    assert {each.count(b"\n") for each in comments} == {1 if extra else 2}
