"""kill -9 of every process at once, the supervisor included: durable streams go on once the server runs again."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from os import kill
from pathlib import Path

import pytest

from quire.client import AsyncClient, ChatMessage, GenerationOptions, RetryPolicy, SequenceFinished, TokenChunk
from tests.support.killing import TooLateError, until_hit
from tests.support.ports import free_port
from tests.support.processes import is_alive, until_true

pytestmark = pytest.mark.extended

NUM_STREAMS = 12
PROGRAM = "import sys; from quire_cli.main import main; sys.exit(main(['serve', *sys.argv[1:]]))"
FLAGS = ["--dtype=float32", "--num-threads=1", "--num-gpu-blocks=512", "--log-level=warning", "--drain-timeout=1"]


class Server:
    """`quire serve` on a port that stays the same."""

    def __init__(self, port: int) -> None:
        self._flags = [*FLAGS, f"--grpc-port={port}", "--http-port=0"]

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *self._flags, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(120):
            assert (await self._process.stdout.readline()).startswith(b"quire: ready")

    async def kill(self) -> None:
        pids = [self._process.pid, *_descendants(self._process.pid)]
        assert len(pids) >= 4, "supervisor, worker, scheduler and gateway"
        for pid in pids:
            kill(pid, signal.SIGKILL)
        await self._process.wait()
        await until_true(lambda: not any(map(is_alive, pids)), timeout_s=60)

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_descendants(child)]
    return found


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Server, AsyncClient]]:
    port = free_port()
    server = Server(port)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retry=RetryPolicy(resume_for_s=120)) as client:
            yield server, client
    finally:
        await server.stop()


def stream_of(client: AsyncClient, index: int):
    """Greedy and sampled, several sequences, stop strings, log probabilities, chats."""
    kind = index % 6
    options = GenerationOptions(
        temperature=0.0 if kind == 0 else 1.0,
        # Those without a seed draw their own; only greedy ones are then equal each time.
        seed=None if kind == 0 else index,
        n=2 if kind == 2 else 1,
        stop=("the", "dragon said") if kind == 3 else (),
        min_tokens=60 if kind == 3 else 0,
        logprobs=1 if kind == 4 else None,
        max_tokens=160,
        ignore_eos=True,
    )
    if kind == 5:
        return client.chat_stream([ChatMessage("user", f"Tell me story {index}.")], options, durable=True)
    return client.generate_stream(f"Once upon a time, story {index}", options, durable=True)


async def read(client: AsyncClient, index: int, progress: dict[int, int]) -> list:
    """Tokens, text and end of each sequence; checks that offsets are consecutive and that each ends once."""
    token_ids: dict[int, list[int]] = {}
    texts: dict[int, str] = {}
    ends: dict[int, tuple] = {}
    async with stream_of(client, index) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                tokens = token_ids.setdefault(event.sequence_index, [])
                assert event.offset == len(tokens)
                tokens += event.token_ids
                texts[event.sequence_index] = texts.get(event.sequence_index, "") + event.text
                progress[index] = max(progress.get(index, 0), len(tokens))
            elif isinstance(event, SequenceFinished):
                assert event.sequence_index not in ends
                ends[event.sequence_index] = (event.num_tokens, event.finish_reason, event.stop_string)
    assert stream.completed is not None
    assert stream.completed.usage.generated_tokens == sum(map(len, token_ids.values()))
    return [token_ids, texts, ends]


async def test_durable_streams_outlive_every_process_twice() -> None:
    async with served() as (server, client):
        undisturbed = await asyncio.gather(*(read(client, index, {}) for index in range(NUM_STREAMS)))

        async def disturbed() -> list[list]:
            progress: dict[int, int] = {}
            streams = asyncio.gather(*(read(client, index, progress) for index in range(NUM_STREAMS)))
            for number in (1, 2):
                await until_true(
                    lambda least=25 * number: len(progress) == NUM_STREAMS and min(progress.values()) > least,
                    timeout_s=200,
                )
                if streams.done():
                    await streams
                    raise TooLateError
                await server.kill()
                await server.start()
            return await asyncio.wait_for(streams, timeout=180)

        assert await until_hit(disturbed) == undisturbed
