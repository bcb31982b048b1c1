"""A tree of thoughts (Yao et al., 2023): each kept branch forks, and the continuations that the model finds most likely
to be good are kept.

usage: python examples/programs/tree_of_thought.py [HOST:PORT]
"""

import asyncio
import sys

from quire.client import AsyncClient, GenerationOptions
from quire.programs import Branch, Program, join

BEGINNING = "Once upon a time, there was a fox that could not sleep."
DEPTH, WIDTH, KEPT = 2, 4, 2


async def judge(branch: Branch) -> bool:
    """Whether the model says that the story so far is good. The branch itself stays as it is."""
    (copy,) = branch.fork(1)
    return await copy.append("\nIs this a good story?").select([" yes", " no"]) == " yes"


async def think(program: Program) -> Branch:
    """The branch that is kept at the end."""
    kept = [program.branch()]
    for depth in range(DEPTH):
        thoughts = [branch for parent in kept for branch in parent.fork(WIDTH)]
        await join(branch.gen(f"thought {depth}", seed=seed) for seed, branch in enumerate(thoughts))
        votes = await join(judge(branch) for branch in thoughts)
        ranked = sorted(zip(votes, thoughts, strict=True), key=lambda pair: not pair[0])
        kept = [branch for _, branch in ranked[:KEPT]]
    return kept[0]


async def main(address: str) -> None:
    options = GenerationOptions(temperature=0.8, max_tokens=24, stop=["\n"])
    async with AsyncClient(address) as client, Program(client, BEGINNING, options) as program:
        best = await think(program)
        print(BEGINNING + "".join(best.values.values()))
        print(f"{program.costs.calls} calls, {program.costs.cached_tokens} cached tokens")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:] or ["127.0.0.1:50051"]))
