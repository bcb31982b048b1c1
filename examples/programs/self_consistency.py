"""Self-consistency (Wang et al., 2022): several answers are sampled, and the most frequent one wins.

usage: python examples/programs/self_consistency.py [HOST:PORT]
"""

import asyncio
import sys
from collections import Counter

from quire.client import AsyncClient, ChatMessage, GenerationOptions
from quire.programs import Program

QUESTION = [ChatMessage("user", "What is 12 + 30?")]


async def main(address: str) -> None:
    options = GenerationOptions(temperature=0.7, max_tokens=16, seed=1)
    async with AsyncClient(address) as client, Program(client, QUESTION, options) as program:
        # One request with n samples: the question is computed once.
        branches = await program.branch().samples(8, "answer")
        votes = Counter(branch["answer"].strip() for branch in branches)
        answer, count = votes.most_common(1)[0]
        print(f"{count} of {len(branches)} say: {answer}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
