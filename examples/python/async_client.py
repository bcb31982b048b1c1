"""Quire's own client for asyncio: many requests at once, a stream that is left early, and a deadline.

usage: python examples/python/async_client.py [HOST:PORT]
"""

import asyncio
import sys

from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import DeadlineExceeded

GREEDY = GenerationOptions(max_tokens=16, temperature=0)
PROMPTS = ["Once upon a time", "The fox", "In the morning", "The old man and the"]


async def main(address: str) -> None:
    async with AsyncClient(address) as client:
        answers = await asyncio.gather(*(client.generate(prompt, GREEDY) for prompt in PROMPTS))
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            print(f"{prompt}{answer.text}")

        # Leaving the block ends the request on the server, too.
        endless = GenerationOptions(max_tokens=400, ignore_eos=True)
        num_pieces = 0
        async with client.generate_stream("Once upon a time", endless) as stream:
            async for _ in stream.text:
                num_pieces += 1
                if num_pieces == 5:
                    break
        print(f"left after {num_pieces} pieces")

        try:
            await client.generate("Once upon a time", endless, timeout_s=0.01)
        except DeadlineExceeded as error:
            print(f"too late: {error.reason}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
