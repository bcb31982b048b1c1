"""Triton's own Python client, in a process and an environment of its own (`make test` sets that up)."""

import asyncio
import contextlib
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_PROGRAM = Path(__file__).parents[1] / "triton_client" / "program.py"
TRITON_PYTHON = Path(sys.prefix) / "triton-client" / "bin" / "python"


class TritonError(Exception):
    """An error that the client raised."""

    def __init__(self, message: str, status: str | None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class TritonClient:
    """Calls as tests/triton_client/program.py describes them, one after the other."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def simple(self, method: str, **arguments: Any) -> Any:
        """Calls a method of the client with plain values. Raises TritonError."""
        return await self._call(call="simple", method=method, **arguments)

    async def infer(self, inputs: dict[str, list[Any]], **options: Any) -> dict[str, Any]:
        """Raises TritonError."""
        return await self._call(call="infer", inputs=inputs, **options)

    async def stream(self, *requests: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
        """All responses of one stream with these requests; an error is {"error": ...}."""
        return await self._call(call="stream", requests=requests, **options)

    async def _call(self, **arguments: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), 40)
        answer = json.loads(line)
        if "error" in answer:
            raise TritonError(**answer["error"])
        return answer["result"]


@contextlib.asynccontextmanager
async def triton_client(address: str) -> AsyncIterator[TritonClient]:
    """A client of the server at `address`; its process ends with the block."""
    assert TRITON_PYTHON.exists(), f"{TRITON_PYTHON} is missing; `make triton-client` installs it"
    process = await asyncio.create_subprocess_exec(TRITON_PYTHON, _PROGRAM, address, stdin=PIPE, stdout=PIPE)
    try:
        yield TritonClient(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await asyncio.wait_for(process.wait(), 30)
