"""Two replicas of the embedded model behind one gateway: conversations stay where they are cached, through kill -9."""

import asyncio
import contextlib

import pytest

from quire.client import AsyncClient, ChatMessage, GenerationOptions
from quire_cli.supervisor import LocalServer
from tests.support.gateway_process import running_gateway
from tests.support.killing import kill
from tests.support.serving import serving

pytestmark = pytest.mark.extended

OPTIONS = GenerationOptions(temperature=0.0, max_tokens=24, ignore_eos=True)
NUM_TURNS = 5


class Replica:
    """A replica as a gateway is told of it."""

    def __init__(self, server: LocalServer) -> None:
        self.address = server.scheduler_address

    async def until_known(self) -> None:
        """The first request waits for it."""


async def converse(client: AsyncClient, name: str) -> tuple[int, int]:
    """Tokens of all prompts but the first, and how many of them were cached."""
    messages, num_prompt, num_cached = [ChatMessage("user", f"Tell me of {name} and the sea.")], 0, 0
    for turn in range(NUM_TURNS):
        answer = await client.chat(messages, OPTIONS)
        if turn:
            num_prompt += answer.usage.prompt_tokens
            num_cached += answer.usage.cached_tokens
        messages += [ChatMessage("assistant", answer.sequences[0].text), ChatMessage("user", f"And then, {turn}?")]
    return num_prompt, num_cached


async def hit_rate(client: AsyncClient, names: str) -> float:
    counts = await asyncio.gather(*(converse(client, name) for name in names))
    return sum(cached for _, cached in counts) / sum(prompt for prompt, _ in counts)


async def test_conversations_find_their_replica_again_while_replicas_are_killed_and_come_back():
    async with contextlib.AsyncExitStack() as stack:
        settings = {"num_gpu_blocks": 512, "num_threads": 1, "dtype": "float32"}
        one = await stack.enter_async_context(serving(**settings))
        two = await stack.enter_async_context(serving(**settings))
        replicas = [Replica(each.server) for each in (one, two)]
        gateway = await stack.enter_async_context(running_gateway(*replicas, failover_delay=0.2))
        client = await stack.enter_async_context(AsyncClient(gateway.gateway.grpc_address))
        # Whole blocks of what came before are found; the rest of a block, and the new message, are not.
        assert await hit_rate(client, "ABCDEFGH") > 0.6
        talking = asyncio.create_task(hit_rate(client, "IJKLMNOP"))
        await kill(two, "scheduler")
        await kill(two, "worker")
        # No request fails, and what was lost is computed again.
        assert await asyncio.wait_for(talking, timeout=120) > 0.2
        await two.server.wait_ready()
        assert await hit_rate(client, "QRSTUVWX") > 0.6
