"""What a stream over gRPC brings of each of its sequences."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Parts:
    """What a stream brought of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    logprobs: list[Any] = field(default_factory=list)
    # Id, name and arguments of each call of a tool.
    calls: dict[int, list[str]] = field(default_factory=dict)
    finished: Any = None

    @property
    def num_characters(self) -> int:
        calls = sum(len(name) + len(arguments) for _, name, arguments in self.calls.values())
        return len(self.reasoning) + len(self.text) + calls


def add(parts: dict[int, Parts], response: Any) -> None:
    """Adds one event of a stream to the parts of its sequence."""
    match response.WhichOneof("event"):
        case "chunk":
            chunk, part = response.chunk, parts[response.chunk.sequence_index]
            assert part.finished is None
            part.token_ids += chunk.token_ids
            part.text += chunk.text
            part.reasoning += chunk.reasoning
            part.logprobs += chunk.logprobs
            for call in chunk.tool_calls:
                had = part.calls.get(call.index, ["", "", ""])
                part.calls[call.index] = [a + b for a, b in zip(had, (call.id, call.name, call.arguments), strict=True)]
        case "finished":
            parts[response.finished.sequence_index].finished = response.finished


async def parts_of(call: AsyncIterator[Any]) -> dict[int, Parts]:
    """All of a stream, which must end within 30 seconds."""
    parts: dict[int, Parts] = defaultdict(Parts)
    async with asyncio.timeout(30):
        async for response in call:
            add(parts, response)
    return parts
