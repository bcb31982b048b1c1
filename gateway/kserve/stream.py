"""Many requests over one stream: answered at once, their responses interleaved."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Generic, TypeVar

Request = TypeVar("Request")
Response = TypeVar("Response")

# Further requests are read when one of these is answered.
MAX_RUNNING = 64


async def answer_all(
    requests: AsyncIterator[Request], answer: Callable[[Request], AsyncGenerator[Response, None]]
) -> AsyncGenerator[Response, None]:
    """The responses to all requests, in order for each request.

    A slow reader holds back all answers: each waits until its response is taken. Closing this generator ends them all.

    Raises:
        Exception: what reading the requests or an answer raised; the answers that run are given up.
    """
    answers = _Answers(answer)
    reading = asyncio.create_task(answers.read_to_the_end(requests))
    try:
        while (response := await answers.responses.get()) is not None:
            yield response
        await reading
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        reading.cancel()
        await asyncio.wait([reading])


class _Answers(Generic[Request, Response]):
    """The answers that run. `responses` has what they give, one at a time, and None after the last."""

    def __init__(self, answer: Callable[[Request], AsyncGenerator[Response, None]]) -> None:
        self.responses: asyncio.Queue[Response | None] = asyncio.Queue(maxsize=1)
        self._answer = answer
        self._places = asyncio.Semaphore(MAX_RUNNING)

    async def read_to_the_end(self, requests: AsyncIterator[Request]) -> None:
        # Nobody takes the end any more where this is cancelled, so nothing may wait for that.
        try:
            await self._read(requests)
        except Exception:
            await self.responses.put(None)
            raise
        await self.responses.put(None)

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        async with asyncio.TaskGroup() as running:
            await self._places.acquire()
            async for request in requests:
                running.create_task(self._run(request))
                await self._places.acquire()

    async def _run(self, request: Request) -> None:
        try:
            async with aclosing(self._answer(request)) as responses:
                async for response in responses:
                    await self.responses.put(response)
        finally:
            self._places.release()
