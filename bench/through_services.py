"""What users get: clients over gRPC, gateway, scheduler, worker."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.workload import WorkItem
from quire.client import AsyncClient, GenerationOptions, TokenChunk


@dataclass(frozen=True, slots=True)
class ClientView:
    """What the clients of one run saw. Times in seconds."""

    seconds: float
    num_tokens: int
    median_first_token_s: float
    num_messages: int


async def stream_all(client: AsyncClient, work: Sequence[WorkItem]) -> ClientView:
    """Streams all requests at once, greedily; raises RuntimeError when a token is missing."""
    started = time.perf_counter()
    streams = await asyncio.gather(*(_stream(client, item, started) for item in work))
    seconds = time.perf_counter() - started
    return ClientView(
        seconds=seconds,
        num_tokens=sum(item.num_output_tokens for item in work),
        median_first_token_s=statistics.median(first for first, _ in streams),
        num_messages=sum(messages for _, messages in streams),
    )


async def _stream(client: AsyncClient, item: WorkItem, started: float) -> tuple[float, int]:
    options = GenerationOptions(temperature=0.0, max_tokens=item.num_output_tokens, ignore_eos=True)
    first, num_tokens, num_messages = 0.0, 0, 0
    async with client.generate_stream(item.prompt, options) as stream:
        async for event in stream:
            num_messages += 1
            if isinstance(event, TokenChunk):
                first = first or time.perf_counter() - started
                num_tokens += len(event.token_ids)
    if num_tokens != item.num_output_tokens:
        raise RuntimeError(f"{num_tokens} of {item.num_output_tokens} tokens came")
    return first, num_messages
