"""`quire mcp` with the client of the MCP package: over stdio, and over HTTP with the callers' keys."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from gateway.auth.caller import Access
from quire.testing import free_port
from tests.support.keys import KeysFile
from tests.support.scheduler_process import until
from tests.support.serving import serving

pytestmark = pytest.mark.extended
STORY = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "temperature": 0}


@contextlib.asynccontextmanager
async def http_server(url: str, *flags: str) -> AsyncIterator[str]:
    """The URL of `quire mcp --http`."""
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "quire_cli.main", "mcp", "--address", url, "--http", address, *flags]
    process = await asyncio.create_subprocess_exec(*command)

    async def answers() -> bool:
        assert process.returncode is None
        with contextlib.suppress(httpx.TransportError):
            async with httpx.AsyncClient() as client:
                return (await client.post(f"http://{address}/mcp")).status_code == 401
        return False

    try:
        await until(answers)
        yield f"http://{address}/mcp"
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def over_http(url: str, key: str) -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(headers={"authorization": f"Bearer {key}"}) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


async def called(client: Client, tool: str, **arguments: Any) -> Any:
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    return result.structured_content


async def test_agents_see_what_operators_see_and_change_nothing_unless_allowed(tmp_path):
    keys = KeysFile(tmp_path / "keys.json")
    operator, tenant = keys.add("ours", access=Access(is_operator=True)), keys.add("acme")
    async with serving(keys_files=(keys.path,), max_num_seqs=1, num_gpu_blocks=256) as served:
        url = f"http://{served.server.http_address}"
        environment = {**os.environ, "QUIRE_API_KEY": operator}
        command = ["-m", "quire_cli.main", "mcp", "--address", url]
        stdio = StdioServerParameters(command=sys.executable, args=command, env=environment)
        headers = {"authorization": f"Bearer {tenant}"}
        async with Client(stdio) as client, httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as http:
            assert {tool.name for tool in (await client.list_tools()).tools} == {
                "status",
                "why_requests_wait",
                "explain_request",
            }
            stories = [asyncio.create_task(http.post("/v1/completions", json=STORY)) for _ in range(12)]
            (replica,) = (await called(client, "status"))["replicas"]
            assert replica["health"] == "ready"
            waits = await called(client, "why_requests_wait")
            assert waits["waiting_requests"] > 0
            why = {each["reason"]: each["why"] for each in waits["requests"]}
            assert "--max-num-seqs" in why["rows"]
            last = waits["requests"][-1]["request_id"]
            assert (await called(client, "explain_request", request_id=last))["state"] == "waiting"

            async def is_explained() -> bool:
                """Whether the running request is one of the answers: it may end meanwhile."""
                for each in waits["requests"]:
                    told = await client.call_tool("explain_request", {"request_id": each["request_id"]})
                    if not told.is_error and told.structured_content["state"] == "running":
                        (sequence,) = told.structured_content["sequences"]
                        return sequence["tokens"] >= sequence["prompt_tokens"]
                return False

            await until(is_explained)
            for story in stories:
                story.cancel()
            unknown = await client.call_tool("explain_request", {"request_id": "never"})
            assert unknown.is_error
            assert "never" in str(unknown.content)
            denied = await client.call_tool("drain_replica", {"replica": replica["replica"]})
            assert denied.is_error
        async with http_server(url, "--allow-changes") as mcp_url:
            for key in ("wrong", tenant):
                async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}) as raw:
                    assert (await raw.post(mcp_url, json={})).status_code == 401
                with pytest.raises(BaseExceptionGroup):
                    async with over_http(mcp_url, key):
                        pass
            async with over_http(mcp_url, operator) as client:
                elsewhere = await client.call_tool("drain_replica", {"replica": "127.0.0.1:1"})
                assert elsewhere.is_error
                assert replica["replica"] in str(elsewhere.content)
                drained = await called(client, "drain_replica", replica=replica["replica"], timeout_s=20)
                assert drained["remaining_requests"] == 0
                assert (await called(client, "status"))["replicas"][0]["numbers"]["draining"]
