"""Several requests that are one to the caller: started together, read together, ended together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from gateway.openai.errors import HttpError, error_answer
from gateway.requests.events import Completed, Event, GeneratedSequence, Usage
from gateway.requests.generator import Generator
from gateway.requests.live_request import LiveRequest
from gateway.requests.request import RequestOptions
from quire.rpc.errors import QuireError

Result = tuple[list[GeneratedSequence], Usage]
# Events of requests by position, and the error that ends one of them.
_Queue = asyncio.Queue[tuple[int, Event | Exception]]


@asynccontextmanager
async def running(
    generator: Generator, requests: Sequence[RequestOptions], param_name: Callable[[int, str], str]
) -> AsyncIterator[list[LiveRequest]]:
    """The running requests, in order. Leaving the context aborts what runs.

    `param_name` gives what a field of the request at a position is called in the caller's body.

    Raises:
        HttpError: one of them is refused; none runs then.
    """
    async with AsyncExitStack() as stack:
        live: list[LiveRequest] = []
        for position, request in enumerate(requests):
            try:
                live.append(await stack.enter_async_context(generator.run(request)))
            except QuireError as error:
                # Those before it end for the reason that this one is refused, and not for an error of HTTP.
                await stack.__aexit__(type(error), error, error.__traceback__)
                raise HttpError(error_answer(error, partial(param_name, position))) from error
        yield live


async def results(live: Sequence[LiveRequest]) -> list[Result]:
    """Waits for the end of all. Raises QuireError as soon as one of them fails."""
    tasks = [asyncio.create_task(each.result()) for each in live]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def events(live: Sequence[LiveRequest]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all requests, each with the position of its request, until all are completed.

    While the reader is busy, no more than one event waits here; what comes meanwhile joins the requests' next chunks.

    Raises:
        QuireError: one of them failed.
    """
    if len(live) == 1:
        async for event in live[0].events():
            yield 0, event
        return
    queue: _Queue = asyncio.Queue(1)
    pumps = [asyncio.create_task(_pump(position, each, queue)) for position, each in enumerate(live)]
    num_running = len(live)
    try:
        while num_running:
            position, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            num_running -= isinstance(event, Completed)
            yield position, event
    finally:
        for pump in pumps:
            pump.cancel()


async def _pump(position: int, live: LiveRequest, queue: _Queue) -> None:
    try:
        async for event in live.events():
            await queue.put((position, event))
    except Exception as error:
        await queue.put((position, error))
