"""Many requests over one stream: answered at once, their responses interleaved."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeVar

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
        Exception: what reading the requests raised; the answers that run are given up.
    """
    responses: asyncio.Queue[Response | None] = asyncio.Queue(maxsize=1)
    places = asyncio.Semaphore(MAX_RUNNING)

    async def run(request: Request) -> None:
        try:
            async with aclosing(answer(request)) as answers:
                async for response in answers:
                    await responses.put(response)
        finally:
            places.release()

    async def read() -> None:
        async with asyncio.TaskGroup() as running:
            await places.acquire()
            async for request in requests:
                running.create_task(run(request))
                await places.acquire()

    async def read_to_the_end() -> None:
        # Nobody takes the end any more where this is cancelled, so nothing may wait for that.
        try:
            await read()
        except Exception:
            await responses.put(None)
            raise
        await responses.put(None)

    reading = asyncio.create_task(read_to_the_end())
    try:
        while (response := await responses.get()) is not None:
            yield response
        await reading
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        reading.cancel()
        await asyncio.wait([reading])
