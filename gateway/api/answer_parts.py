"""Parts of answers that several APIs write: log probabilities of tokens, counts of output tokens, and the blocks of an
answer (reasoning, text and tool calls), for the APIs that have such blocks.

Log probabilities belong to single tokens. A token may be a part of a character, so its bytes are exact, but its text is
an approximation.
"""

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from typing_extensions import TypedDict

from gateway.api.answers import LazyList
from gateway.replicas.events import Chunk, GeneratedSequence, Logprob, PositionLogprobs, Usage
from gateway.text.formats.parser import Output, ToolCallDelta
from gateway.text.tokenizer import TokenTexts

LOWEST = -9999.0
"""Represents -infinity, the log probability of excluded tokens, which JSON lacks. Clients know this value."""


class OutputTokensDetails(TypedDict):
    """Counts of output tokens. `reasoning_tokens` includes the marks around the reasoning; the other counts concern the
    request's prediction."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class TokenLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


LogprobsByTokenId = dict[str, TokenLogprob]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: Iterable[ChatTokenLogprob]
    refusal: None


def output_tokens_details(usages: Sequence[Usage]) -> OutputTokensDetails:
    return {
        "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
        "accepted_prediction_tokens": sum(usage.accepted_prediction_tokens for usage in usages),
        "rejected_prediction_tokens": sum(usage.rejected_prediction_tokens for usage in usages),
    }


class NamedByIds:
    """Token ids in place of token texts, for a call that requests them."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def text_of(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    key_of = text_of

    def bytes_of(self, token_id: int) -> bytes:
        return self._texts.bytes_of(token_id)


def chat_logprobs(
    texts: TokenTexts | NamedByIds, logprobs: Iterable[PositionLogprobs], *, shows_chosen: bool = False
) -> ChatLogprobs:
    """Log probabilities of a chat. With `shows_chosen`, `top_logprobs` includes the chosen token in any case."""

    def entries() -> Iterator[ChatTokenLogprob]:
        for entry in logprobs:
            chosen, top = entry.chosen, entry.top
            if shows_chosen and all(each.token_id != chosen.token_id for each in top):
                top = (chosen, *top)
            yield {**_chat_entry(texts, chosen), "top_logprobs": [_chat_entry(texts, each) for each in top]}

    return {"content": LazyList(entries), "refusal": None}


def logprobs_by_token_id(
    texts: TokenTexts, logprobs: Iterable[PositionLogprobs], num_top: int
) -> LazyList[LogprobsByTokenId]:
    """One entry per token: the chosen and the most likely tokens by their ids, as in vLLM."""
    return LazyList(lambda: (_entry_by_token_id(texts, entry, num_top) for entry in logprobs))


def _entry_by_token_id(texts: TokenTexts, entry: PositionLogprobs, num_top: int) -> LogprobsByTokenId:
    return {
        str(each.token_id): {
            "logprob": finite(each.logprob),
            "rank": each.rank,
            "decoded_token": texts.text_of(each.token_id),
        }
        for each in (entry.chosen, *entry.top[:num_top])
    }


def _chat_entry(texts: TokenTexts | NamedByIds, entry: Logprob) -> TopLogprob:
    data = texts.bytes_of(entry.token_id)
    token = texts.text_of(entry.token_id) if isinstance(texts, NamedByIds) else data.decode(errors="replace")
    return {"token": token, "logprob": finite(entry.logprob), "bytes": list(data)}


def finite(logprob: float) -> float:
    """The log probability as a number of JSON."""
    return max(logprob, LOWEST)


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
