"""kill -9 of processes of a server that restarts them, while clients read its streams."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from tests.support.processes import until_true
from tests.support.serving import Served

MAX_TOKENS = 90
_MAX_ATTEMPTS = 10
_numbers = itertools.count()

T = TypeVar("T")

Outputs = list[tuple[dict[int, list[int]], dict[int, str]]]
"""Token ids and text of each stream, by the index of the sequence."""


class TooLateError(Exception):
    """A stream ended before the kill, so that the test shows nothing."""


async def until_hit(scenario: Callable[[], Awaitable[T]]) -> T:
    """The result of a scenario, which starts again if it raises TooLateError: streams may run to their ends while this
    process, or a process of the server, stands still. Other work on the processors may last, for example a
    compiler's: each attempt waits one second longer than the one before."""
    for pause_s in range(1, _MAX_ATTEMPTS):
        with contextlib.suppress(TooLateError):
            return await scenario()
        await asyncio.sleep(pause_s)
    return await scenario()


def story_options(index: int) -> GenerationOptions:
    """Greedy and seeded sampling, mixed."""
    return GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=MAX_TOKENS, ignore_eos=True)


class Stream:
    """One stream, and the tokens that its client has so far."""

    def __init__(
        self, index: int, options: GenerationOptions, *, durable: bool, prompt: str = "Once upon a time"
    ) -> None:
        self.index = index
        self.outputs: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.has_ended = False
        self._options = options
        self._durable = durable
        self._prompt = prompt

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first sequence."""
        return self.outputs.get(0, [])

    async def read(self, client: AsyncClient) -> None:
        """Checks that offsets are consecutive and that exactly one end comes."""
        prompt, request_id = f"{self._prompt}, story {self.index}", f"story-{next(_numbers)}"
        async with client.generate_stream(
            prompt, self._options, request_id=request_id, durable=self._durable
        ) as stream:
            async for event in stream:
                if isinstance(event, TokenChunk):
                    output = self.outputs.setdefault(event.sequence_index, [])
                    assert event.offset == len(output)
                    output += event.token_ids
                    self.texts[event.sequence_index] = self.texts.get(event.sequence_index, "") + event.text
        assert stream.completed is not None
        self.has_ended = True


class Streams:
    """Streams that are read at the same time, for tests that kill processes under them."""

    def __init__(
        self,
        num_streams: int = 8,
        *,
        durable: bool = False,
        options_of: Callable[[int], GenerationOptions] = story_options,
    ) -> None:
        self._streams = [Stream(index, options_of(index), durable=durable) for index in range(num_streams)]

    def __iter__(self):
        return iter(self._streams)

    async def read(self, client: AsyncClient) -> Outputs:
        """Token ids and text of each, once all have ended."""
        await asyncio.gather(*(stream.read(client) for stream in self))
        return [(stream.outputs, stream.texts) for stream in self]

    @contextlib.asynccontextmanager
    async def reading(self, served: Served) -> AsyncIterator[asyncio.Task[Outputs]]:
        """The task of `read`, for a server that serves again after any kill; cancelled if the block fails."""
        await served.wait_ready()
        reading = asyncio.create_task(self.read(served.client))
        try:
            yield reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def advance(self, num_tokens: int = 20) -> None:
        """Waits until each stream has `num_tokens` more tokens: the present processes then serve all of them.
        TooLateError if one ends before."""
        wanted = [len(stream.token_ids) + num_tokens for stream in self]
        await until_true(
            lambda: self.has_one_ended or all(len(e.token_ids) >= least for e, least in zip(self, wanted, strict=True)),
            timeout_s=100,
        )
        self._check_all_live()

    async def kill(self, served: Served, *names: str) -> None:
        """Kills the processes. TooLateError if a stream had ended by then."""
        self._check_all_live()
        for name in names:
            await served.kill(name)

    @property
    def has_one_ended(self) -> bool:
        return any(stream.has_ended for stream in self)

    def _check_all_live(self) -> None:
        if self.has_one_ended:
            raise TooLateError
