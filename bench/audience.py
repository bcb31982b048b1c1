"""Many streaming clients in one compiled process (`audience.c`), so that what the client takes of the processors is
small and known. The server's tokens tell the time at which they were made, so that their ages are known, too.
"""

import asyncio
import json
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from bench.serving import post_request
from quire.client import GenerationOptions
from quire.client.client_messages import to_generate_request
from quire.gateway.v1 import generation_pb2
from quire.model_files.model_source import resolve_model

Front = Literal["grpc", "http"]

# As in audience.c.
_WIDTH, _TICK_MS, _MAX_TICKS = 4, 5, 512
_STOP_TIMEOUT_S = 10


class StepClock:
    """Tokens of the embedded model whose texts say at which time a step ended."""

    def __init__(self) -> None:
        tokenizer = Tokenizer.from_file(str(resolve_model(None) / "tokenizer.json"))
        texts = {tokenizer.decode([token_id]): token_id for token_id in range(tokenizer.get_vocab_size())}
        plain = [text for text in sorted(texts) if len(text) == _WIDTH and text.isascii() and text.isalpha()]
        self.texts = plain[:_MAX_TICKS]
        self._token_ids = [texts[text] for text in self.texts]

    def token_at(self, seconds: float) -> int:
        """The token of this time of the monotonic clock."""
        return self._token_ids[int(seconds * 1e3) // _TICK_MS % len(self._token_ids)]


@dataclass(frozen=True, slots=True)
class Heard:
    """Tokens and messages that the clients got in a window of time.

    Attributes:
        messages: Messages or events with text.
        cpu_s: Processor time of the client.
        ages_ms: The time from the end of a token's step until a client had it: median, 99th percentile, maximum.
    """

    seconds: float
    messages: int
    tokens: int
    cpu_s: float
    ages_ms: tuple[int, int, int]


class Audience:
    """Clients that listen. Made by `audience`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def heard(self) -> Heard:
        """Tokens and messages since the last call. RuntimeError if a stream ended or had an error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the clients ended with status {await self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        found["ages_ms"] = tuple(found["ages_ms"])
        return Heard(**found)


@asynccontextmanager
async def audience(
    front: Front, address: str, num_streams: int, num_tokens: int, clock: StepClock
) -> AsyncGenerator[Audience]:
    """Clients that each stream a chat of `num_tokens` tokens from a server whose tokens are the clock's."""
    with tempfile.TemporaryDirectory() as made:
        program, request, texts = (Path(made) / name for name in ("audience", "request", "texts"))
        compile_it = ["cc", "-O2", "-o", program, Path(__file__).with_name("audience.c")]
        await asyncio.to_thread(subprocess.run, compile_it, check=True)
        request.write_bytes(_http_request(address, num_tokens) if front == "http" else _grpc_request(num_tokens))
        texts.write_text("".join(f"{text}\n" for text in clock.texts))
        port = address.rpartition(":")[2]
        process = await asyncio.create_subprocess_exec(
            *(program, front, port, str(num_streams), request, texts),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            yield Audience(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)


def _grpc_request(num_tokens: int) -> bytes:
    options = GenerationOptions(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return to_generate_request(generation_pb2.GenerateStreamRequest(), "Once", options).SerializeToString()


def _http_request(address: str, num_tokens: int) -> bytes:
    fields = {
        "model": "quire-tiny",
        "messages": [{"role": "user", "content": "Once"}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return post_request(address, "/v1/chat/completions", fields)
