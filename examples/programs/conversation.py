"""Several turns of a conversation, in which the program decides how to go on by what the model chose.

usage: python examples/programs/conversation.py [HOST:PORT]
"""

import asyncio
import sys

from quire.client import AsyncClient, ChatMessage, Constraint, GenerationOptions
from quire.programs import Program

SYSTEM = [ChatMessage("system", "You answer in short words.")]
NUMBER = Constraint(regex="[0-9]{1,3}")


async def main(address: str) -> None:
    options = GenerationOptions(temperature=0, max_tokens=24)
    async with AsyncClient(address) as client, Program(client, SYSTEM, options) as program:
        talk = program.branch().append("What is 3 + 4?")
        # The answer is a number and nothing else.
        number = await talk.gen("sum", constraint=NUMBER)
        print(f"the sum: {number}")
        city = await talk.append("Which city is the capital of France?").select(["Paris", "Rome", "Berlin"], "city")
        print(f"the city: {city}")
        story = await talk.append(f"Tell me a story about {city}.").gen("story")
        print(f"the story: {story}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
