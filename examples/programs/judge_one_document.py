"""Eight questions about one document, which is computed once: a branch for each question.

usage: python examples/programs/judge_one_document.py [HOST:PORT]
"""

import asyncio
import sys

from quire.client import AsyncClient, GenerationOptions
from quire.programs import Branch, Program, join

DOCUMENT = "Once upon a time there was a fox that lived in a hollow tree. " + "Each day it walked to the river. " * 20
QUESTIONS = ["Is it about a fox?", "Is there a river?", "Is it sad?", "Is it long?"]
ASPECTS = ["style", "plot", "animals", "places"]


async def judge(branch: Branch, question: str) -> str:
    return await branch.append(f"\nQuestion: {question}\nAnswer:").select([" yes", " no"])


async def rate(branch: Branch, aspect: str) -> str:
    return await branch.append(f"\nA grade for its {aspect}:").select([" good", " bad"])


async def judge_all(program: Program) -> list[str]:
    answers = await join(judge(program.branch(), question) for question in QUESTIONS)
    grades = await join(rate(program.branch(), aspect) for aspect in ASPECTS)
    summary = await program.branch().append("\nAnd then").gen(max_tokens=12)
    said = [f"{about}{answer}" for about, answer in zip(QUESTIONS + ASPECTS, answers + grades, strict=True)]
    return [*said, f"And then{summary}"]


async def main(address: str) -> None:
    async with AsyncClient(address) as client, Program(client, DOCUMENT, GenerationOptions(temperature=0)) as program:
        for line in await judge_all(program):
            print(line)
        print(f"{program.costs.cached_tokens} of {program.costs.prompt_tokens} prompt tokens were cached")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
