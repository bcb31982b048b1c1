"""The blocking client and the one for asyncio, with the same interface."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, TypeVar

from quire.client import AsyncClient, AsyncStream, Client, Stream, StreamEvent

T = TypeVar("T")


class EitherClient:
    """The blocking client, called from threads, or the one for asyncio: the same calls and answers."""

    def __init__(self, client: Client | AsyncClient) -> None:
        self.client = client

    async def call(self, method: str, *args: object, **options: object):
        """The answer of a method."""
        if isinstance(self.client, AsyncClient):
            return await getattr(self.client, method)(*args, **options)
        return await asyncio.to_thread(getattr(self.client, method), *args, **options)

    async def events(self, prompt: str, *args: Any, **options: Any) -> list[StreamEvent]:
        """All events of a generation."""
        stream = self.client.generate_stream(prompt, *args, **options)
        try:
            return await self.read(stream)
        finally:
            await self.close_stream(stream)

    async def next(self, stream: Iterator[T] | AsyncIterator[T]) -> T:
        """The next event of a stream, or the next piece of its text."""
        return await anext(stream) if isinstance(stream, AsyncIterator) else await asyncio.to_thread(next, stream)

    async def read(self, stream: Iterator[T] | AsyncIterator[T]) -> list[T]:
        """The remaining events of a stream, or pieces of its text."""
        if isinstance(stream, AsyncIterator):
            return [event async for event in stream]
        return await asyncio.to_thread(list, stream)

    async def close_stream(self, stream: Stream | AsyncStream) -> None:
        await stream.close() if isinstance(stream, AsyncStream) else stream.close()

    async def close(self) -> None:
        await self.client.close() if isinstance(self.client, AsyncClient) else self.client.close()
