"""kill -9 of processes of a server that restarts them, while clients read streams from it."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from tests.support.processes import until_true
from tests.support.scheduler_process import until
from tests.support.serving import Served

MAX_TOKENS = 250
_numbers = itertools.count()


def story_options(index: int) -> GenerationOptions:
    """Greedy and seeded sampling, mixed."""
    return GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, ignore_eos=True)


async def kill(served: Served, name: str) -> None:
    """Kills "worker", "scheduler" or "gateway" and waits until its successor was started."""
    process = served.server.process(name)
    starts = process.starts
    os.kill(process.pid, signal.SIGKILL)

    async def started_again() -> bool:
        return process.starts > starts

    await until(started_again, timeout_s=30)


class Stream:
    """One stream, and what its client has of it so far."""

    def __init__(self, index: int, options: GenerationOptions, *, durable: bool) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.text = ""
        self.has_ended = False
        self._options = options
        self._durable = durable

    async def read(self, client: AsyncClient) -> None:
        """Checks that offsets are consecutive and that exactly one end comes."""
        prompt, request_id = f"Once upon a time, story {self.index}", f"story-{next(_numbers)}"
        async with client.generate_stream(
            prompt, self._options, request_id=request_id, durable=self._durable
        ) as stream:
            self.request_id = request_id
            async for event in stream:
                if isinstance(event, TokenChunk):
                    assert event.offset == len(self.token_ids)
                    self.token_ids += event.token_ids
                    self.text += event.text
        assert stream.completed is not None
        self.has_ended = True


class Streams:
    """Streams that are read at the same time, for tests that kill processes under them."""

    def __init__(
        self,
        num_streams: int = 12,
        *,
        durable: bool = False,
        options_of: Callable[[int], GenerationOptions] = story_options,
    ) -> None:
        self._streams = [Stream(index, options_of(index), durable=durable) for index in range(num_streams)]

    def __iter__(self):
        return iter(self._streams)

    async def read(self, client: AsyncClient) -> list[tuple[list[int], str]]:
        """Token ids and text of each, once all have ended."""
        await asyncio.gather(*(stream.read(client) for stream in self))
        return [(stream.token_ids, stream.text) for stream in self]

    async def advance(self, num_tokens: int = 20) -> None:
        """Waits until each stream has that many tokens more: whoever serves now serves all of them."""
        wanted = [len(stream.token_ids) + num_tokens for stream in self]
        await until_true(
            lambda: all(len(each.token_ids) >= least for each, least in zip(self, wanted, strict=True)), timeout_s=60
        )

    async def kill(self, served: Served, *names: str) -> None:
        """Kills the processes, and checks that every stream was in the middle then."""
        assert not any(stream.has_ended for stream in self), "a stream ended before the kill; make them longer"
        for name in names:
            await kill(served, name)
