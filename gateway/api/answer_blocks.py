"""The answer as a sequence of blocks (reasoning, text, tool calls), for the APIs that have such blocks."""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.replicas.events import Chunk, GeneratedSequence
from gateway.text.formats.parser import Output, ToolCallDelta


class BlockKind(Enum):
    REASONING = auto()
    TEXT = auto()
    TOOL_CALL = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Consecutive output of one kind. `content` is the text, or the arguments of a call, so far.

    Attributes:
        position: The index among the blocks of the answer.
        call_id: The id of a tool call; empty for other kinds, like `name`.
    """

    position: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    # A list of pieces with a few characters each would take more memory.
    _written: io.StringIO = field(default_factory=io.StringIO)

    @property
    def content(self) -> str:
        return self._written.getvalue()

    def add(self, text: str) -> None:
        self._written.write(text)


class Step(Enum):
    """Events of a block: it begins, grows, or ends."""

    BEGIN = auto()
    ADD = auto()
    END = auto()


BlockEvent = tuple[Step, Block, str]
"""The string is the added content."""


class Blocks:
    """The blocks of one sequence. At most one block is open at a time."""

    def __init__(self, *, keeps_content: bool = True) -> None:
        """Without `keeps_content`, blocks stay empty, and only the events contain the output."""
        self.all: list[Block] = []
        self._keeps_content = keeps_content
        self._is_open = False

    def push(self, output: Output) -> Iterator[BlockEvent]:
        """The events of the next piece of the answer. The iterator must be consumed before the next call."""
        calls = output.tool_calls
        if calls and not calls[0].id:
            # The rest of the open call. All other output in the piece came after it.
            yield from self._add(BlockKind.TOOL_CALL, calls[0].arguments)
            calls = calls[1:]
        if output.reasoning:
            yield from self._add(BlockKind.REASONING, output.reasoning)
        if output.text:
            yield from self._add(BlockKind.TEXT, output.text)
        for call in calls:
            if call.id:
                yield from self.begin(BlockKind.TOOL_CALL, call.id, call.name)
            if call.arguments:
                yield from self._add(BlockKind.TOOL_CALL, call.arguments)

    def begin(self, kind: BlockKind, call_id: str = "", name: str = "") -> Iterator[BlockEvent]:
        """Begins a new block, after it ends the open one."""
        yield from self.end()
        self._is_open = True
        self.all.append(Block(len(self.all), kind, call_id, name))
        yield Step.BEGIN, self.all[-1], ""

    def end(self) -> Iterator[BlockEvent]:
        """Ends the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield Step.END, self.all[-1], ""

    def _add(self, kind: BlockKind, text: str) -> Iterator[BlockEvent]:
        if not self._is_open or self.all[-1].kind is not kind:
            yield from self.begin(kind)
        if self._keeps_content:
            self.all[-1].add(text)
        yield Step.ADD, self.all[-1], text


def output_of(part: Chunk | GeneratedSequence) -> Output:
    """The output in a piece of the answer, by kind."""
    if isinstance(part, Chunk):
        return Output(part.text, part.reasoning, part.tool_calls)
    calls = [ToolCallDelta(place, call.id, call.name, call.arguments) for place, call in enumerate(part.tool_calls)]
    return Output(part.text, part.reasoning, tuple(calls))


def blocks_of(sequence: GeneratedSequence) -> list[Block]:
    """The blocks of a whole sequence."""
    blocks = Blocks()
    for _ in blocks.push(output_of(sequence)):
        pass
    return blocks.all
