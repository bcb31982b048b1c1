"""Self-consistency (Wang et al., 2022): several answers are sampled, and the most frequent one wins.

usage: python examples/programs/self_consistency.py [HOST:PORT]
"""

import asyncio
import sys
from collections import Counter

from quire.client import AsyncClient, ChatMessage, GenerationOptions
from quire.programs import Program

QUESTION = [ChatMessage("user", "What is 12 + 30?")]
VOTES = 8


async def vote(program: Program) -> Counter[str]:
    # One request with n samples: the question is computed once.
    branches = await program.branch().samples(VOTES, "answer")
    return Counter(branch["answer"].strip() for branch in branches)


async def main(address: str) -> None:
    options = GenerationOptions(temperature=0.7, max_tokens=16, seed=1)
    async with AsyncClient(address) as client, Program(client, QUESTION, options) as program:
        answer, count = (await vote(program)).most_common(1)[0]
        print(f"{count} of {VOTES} say: {answer}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
