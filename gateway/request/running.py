"""The requests of one call: started together, read together, ended together."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TypeVar

from gateway.auth.caller import current_caller
from gateway.replicas.events import Chunk, Completed, Event, Finished, GeneratedSequence, PositionLogprobs, Usage
from gateway.replicas.live import LiveRequest
from gateway.request.answer_memory import CallMemory, check_prompt_logprobs, num_prompt_logprobs
from gateway.request.generator import Generator
from gateway.request.prepare import CallParameters
from gateway.request.types import RequestOptions
from gateway.request.validation import check_call
from gateway.turns import Turns
from quire.rpc.errors import QuireError

REFUSAL_S = 0.5
"""A scheduler that refuses a request does so within this time."""

Result = tuple[list[GeneratedSequence], Usage]
Answer = TypeVar("Answer")
# Making an answer of this many log probabilities would delay other calls too much.
_LARGE = 10_000
# A sequence takes as long as this many log probabilities, and this many tokens as long as one.
_SIZE_OF_A_SEQUENCE = 10
_TOKENS_OF_A_LOGPROB = 16
# After the ends of this many requests other calls run.
_ENDED_AT_ONCE = 16
# Events of requests by position, or the error that ends one of them.
_Queue = asyncio.Queue[tuple[int, Event | Exception]]


@asynccontextmanager
async def running(
    generator: Generator,
    requests: Sequence[RequestOptions],
    refusal: Callable[[int, QuireError], Exception],
    memory: CallMemory,
    *,
    shows_prompt_by_sequence: bool = False,
) -> AsyncIterator[list[LiveRequest]]:
    """The running requests, in order. Leaving the context aborts those that run. `memory` is the call's.

    If one of them is refused, none runs, and the context raises what `refusal` makes of its position and its error.
    Log probabilities of prompts count as often as the answer has them: once, or with each sequence.
    """
    try:
        check_call(requests[0], len(requests), await generator.limits())
        current_caller().account.check_call(len(requests))
    except QuireError as error:
        raise refusal(0, error) from error
    async with AsyncExitStack() as stack:
        live: list[LiveRequest] = []
        num_logprobs = 0
        parameters, turns = CallParameters(), Turns()
        for position, options in enumerate(requests):
            try:
                if position % _ENDED_AT_ONCE == 0:
                    stack.push_async_callback(asyncio.sleep, 0)
                live.append(await stack.enter_async_context(generator.run(options, parameters, memory=memory)))
                await turns.pause()
                request = live[-1].request
                copies = request.num_sequences if shows_prompt_by_sequence else 1
                num_logprobs += num_prompt_logprobs(request) * copies
                check_prompt_logprobs(num_logprobs)
            except QuireError as error:
                # The requests before it end by the original error, not by the one that a front end makes of it.
                await stack.__aexit__(type(error), error, error.__traceback__)
                raise refusal(position, error) from error
        yield live


async def answer(live: Sequence[LiveRequest], make: Callable[[Sequence[Result]], Answer]) -> Answer:
    """The value of `make` for the results of all; a large answer is made in a thread, so that other calls go on.

    Raises:
        QuireError: one of them failed; the others are not waited for.
    """
    results = await results_of(live)
    num_logprobs = sum(
        _num_prompt_logprobs(each) + sum(_size(each, sequence) for sequence in sequences)
        for each, (sequences, _) in zip(live, results, strict=True)
    )
    return await _made(num_logprobs, partial(make, results))


async def answer_event(live: LiveRequest, event: Event, make: Callable[[], Answer]) -> Answer:
    """The value of `make`, which makes an answer of an event of a stream; in a thread if it is large.

    Log probabilities of the prompt are part of the first chunk of a sequence, or of the end.
    """
    num_logprobs = 0 if isinstance(event, Finished) else _num_prompt_logprobs(live)
    if isinstance(event, Chunk):
        num_logprobs = _num_logprobs(live, event.logprobs) + (0 if event.offset else num_logprobs)
    return await _made(num_logprobs, make)


async def _made(num_logprobs: int, make: Callable[[], Answer]) -> Answer:
    return await asyncio.to_thread(make) if num_logprobs > _LARGE else make()


def _num_prompt_logprobs(live: LiveRequest) -> int:
    return (1 + (live.request.prompt_logprobs or 0)) * len(live.prompt_logprobs)


def _num_logprobs(live: LiveRequest, logprobs: Collection[PositionLogprobs]) -> int:
    return (1 + (live.request.logprobs or 0)) * len(logprobs)


def _size(live: LiveRequest, sequence: GeneratedSequence) -> int:
    """The time that a sequence takes in an answer, in log probabilities that take as long."""
    return (
        _num_logprobs(live, sequence.logprobs) + _SIZE_OF_A_SEQUENCE + len(sequence.token_ids) // _TOKENS_OF_A_LOGPROB
    )


async def results_of(live: Sequence[LiveRequest]) -> list[Result]:
    """Waits for the results of all.

    Raises:
        QuireError: one of them failed; the others are not waited for.
    """
    tasks = [asyncio.create_task(each.result()) for each in live]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def events(live: Sequence[LiveRequest]) -> AsyncGenerator[tuple[int, Event], None]:
    """The events of all requests, each with the position of its request, until all are completed.

    While the reader is busy, at most one event waits here; later tokens join the requests' next chunks.

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
