"""Several turns of a conversation, in which the program decides how to go on by what the model chose.

usage: python examples/programs/conversation.py [HOST:PORT]
"""

import asyncio
import sys

from quire.client import AsyncClient, ChatMessage, Constraint, GenerationOptions
from quire.programs import Branch, Program

SYSTEM = [ChatMessage("system", "You answer in short words.")]
NUMBER = Constraint(regex="[0-9]{1,3}")


async def talk(program: Program) -> Branch:
    branch = program.branch().append("What is 3 + 4?")
    # The answer is a number and nothing else.
    await branch.gen("sum", constraint=NUMBER)
    city = await branch.append("Which city is the capital of France?").select(["Paris", "Rome", "Berlin"], "city")
    await branch.append(f"Tell me a story about {city}.").gen("story")
    return branch


async def main(address: str) -> None:
    options = GenerationOptions(temperature=0, max_tokens=24)
    async with AsyncClient(address) as client, Program(client, SYSTEM, options) as program:
        branch = await talk(program)
        print(f"the sum: {branch['sum']}", f"the city: {branch['city']}", f"the story: {branch['story']}", sep="\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
