"""Events of requests as values: the events for clients, and the events that schedulers report in their messages."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.text.formats.parser import ToolCallDelta
from gateway.types import TokenIds, optional
from quire.common.v1 import common_pb2
from quire.common.v1.common_pb2 import KvSource
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.messages.arrays import decode_int32, decode_logprobs
from quire.messages.logprob_columns import LogprobColumns
from quire.messages.replica_role import ReplicaRole
from quire.rpc.errors import InvalidArgument, QuireError, error_for_code
from quire.scheduler.v1 import scheduler_pb2
from quire.service.compatibility import ModelFingerprint, ProtocolVersions

_Column = NDArray[np.int32]
# Columns become objects in pieces of this many positions.
_PIECE = 64


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """The cost of a request; times in milliseconds, as the contract defines them."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    preemptions: int = 0
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability; `rank` is 1 for the most likely token."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(NamedTuple):
    """The log probabilities at one position: of the chosen token, and of the most likely ones, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


class TokenLogprobs(Collection[PositionLogprobs]):
    """Log probabilities of tokens, kept as columns. There may be a million positions, so their objects are made while
    they are read, and are not kept."""

    def __init__(self, token_ids: TokenIds = (), columns: LogprobColumns | None = None) -> None:
        """The tokens at the first positions, [m], and their log probabilities."""
        self._pieces: list[tuple[TokenIds, LogprobColumns]] = []
        self._length = 0
        if columns is not None:
            self.add(token_ids, columns)

    def add(self, token_ids: TokenIds, columns: LogprobColumns) -> None:
        """The tokens at the next positions, [m], and their log probabilities."""
        self._pieces.append((token_ids, columns))
        self._length += len(columns)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PositionLogprobs]:
        for token_ids, columns in self._pieces:
            begins = range(0, len(columns), _PIECE)
            parts = columns.split(min(_PIECE, len(columns) - begin) for begin in begins)
            for begin, part in zip(begins, parts, strict=True):
                yield from _positions(token_ids[begin : begin + _PIECE], part)

    def __contains__(self, position: object) -> bool:
        return any(each == position for each in self)


def _positions(token_ids: TokenIds, columns: LogprobColumns) -> Iterator[PositionLogprobs]:
    top_ids, top = columns.top_token_ids.tolist(), columns.top_logprobs.tolist()
    begin = 0
    arrays = (columns.chosen_logprobs, columns.chosen_ranks, columns.top_counts)
    for token_id, logprob, rank, count in zip(token_ids, *(array.tolist() for array in arrays), strict=True):
        end = begin + count
        best = map(Logprob, top_ids[begin:end], top[begin:end], range(1, count + 1))
        yield PositionLogprobs(Logprob(int(token_id), logprob, rank), tuple(best))
        begin = end


# Events for clients: chunks, one Finished per sequence, one Completed at the end.


class Chunk(NamedTuple):
    """New tokens of one sequence. `offset` counts the tokens before them; `logprobs` has one entry per token, or none.

    In a chat, `reasoning` and `tool_calls` are the new reasoning and new tool calls; `text` contains neither.
    """

    sequence_index: int
    offset: int
    token_ids: list[int]
    text: str
    logprobs: Collection[PositionLogprobs] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence of `num_tokens` tokens, with the `stop_string` or `stop_token_id` that ended it, if any."""

    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    vector: bytes = b""
    """float32 values: the vector of the prompt, from a model that gives vectors instead of texts."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a request. `prompt_logprobs`, if requested, has one entry per prompt token from the second one on."""

    usage: Usage
    prompt_logprobs: Collection[PositionLogprobs] = ()


Event = Chunk | Finished | Completed


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """A finished sequence as a whole."""

    token_ids: list[int]
    text: str
    logprobs: Collection[PositionLogprobs]
    finished: Finished
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


# Events from schedulers.


@dataclass(frozen=True, slots=True)
class Welcome:
    """The properties of a replica. See quire.scheduler.v1.Welcome."""

    scheduler_epoch: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    durable_grace_s: float = field(default=0.0, kw_only=True)
    architecture: str
    dtype: str
    max_logprobs: int
    protocol: ProtocolVersions
    model: ModelFingerprint
    device_name: str = ""
    max_adapters: int = 0
    max_drafts: int = 0
    takes_cache_salts: bool = False
    role: ReplicaRole = field(default=ReplicaRole.BOTH, kw_only=True)
    kv_namespace: str = ""
    takes_offers: bool = False
    block_bytes: int = 0
    full_groups: int = 0
    windowed_groups: int = 0
    window: int = 0
    state_blocks: int = 0
    takes_batches: bool = False


@dataclass(slots=True)
class TokenRun:
    """Consecutive tokens of one sequence; `logprobs`, if requested, has one position per token."""

    handle: int
    sequence_index: int
    offset: int
    token_ids: list[int]
    logprobs: LogprobColumns | None = None

    def piece(self, start: int, end: int) -> "TokenRun":
        """The tokens from index `start` up to, but without, `end`; fewer if the run is shorter."""
        token_ids = self.token_ids[start:end]
        logprobs = None if self.logprobs is None else self.logprobs.part(start, start + len(token_ids))
        return TokenRun(self.handle, self.sequence_index, self.offset + start, token_ids, logprobs)


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Log probabilities of consecutive prompt tokens; `first_position` is the index of the first token."""

    handle: int
    first_position: int
    token_ids: NDArray[np.int32]
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence ended after `num_tokens` tokens, which were reported before."""

    handle: int
    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float | None
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """All sequences of a request ended. `usage` is None if the gateway aborted a request that the scheduler does not
    have, or no longer has."""

    handle: int
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request was rejected, or failed while it ran."""

    handle: int
    error: QuireError


@dataclass(frozen=True, slots=True)
class RequestMoved:
    """A scheduler no longer runs a request, which was released to continue on another scheduler. `source` is where the
    other scheduler can fetch its KV blocks; None if it cannot."""

    handle: int
    source: KvSource | None


ALREADY_TAKEN_OVER = "already_taken_over"
"""A key in the metadata of errors; see the field of `RequestFailure`."""

RequestEvent = TokenRun | PromptRun | SequenceEnded | RequestEnded | RequestFailed | RequestMoved


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one or more steps. They are applied in the order `prompt_runs`, `runs`, `ended`, `completed`,
    `failed`, `moved`, so the log probabilities of a prompt are reported before the tokens that follow it."""

    runs: list[TokenRun] = field(default_factory=list[TokenRun])
    ended: list[SequenceEnded] = field(default_factory=list[SequenceEnded])
    completed: list[RequestEnded] = field(default_factory=list[RequestEnded])
    failed: list[RequestFailed] = field(default_factory=list[RequestFailed])
    prompt_runs: list[PromptRun] = field(default_factory=list[PromptRun])
    moved: list[RequestMoved] = field(default_factory=list[RequestMoved])
    has_room: list[int] = field(default_factory=list[int])
    """Handles of offered requests, which run on another replica and for which this one now has room."""

    def parts(self, max_tokens: int) -> "Iterator[EventBatch]":
        """Splits this batch lazily into batches of at most `max_tokens` tokens, or about that number of sequence ends.
        Applied in order they equal this batch. A request's completion is in the same part as its sequence ends."""
        if sum(len(run.token_ids) for run in self.runs) + len(self.ended) <= max_tokens:
            yield self
            return
        yield EventBatch(prompt_runs=self.prompt_runs)
        part, room = EventBatch(), max_tokens
        for run in self.runs:
            start = 0
            while start < len(run.token_ids):
                if not room:
                    yield part
                    part, room = EventBatch(), max_tokens
                piece = run if not start and len(run.token_ids) <= room else run.piece(start, start + room)
                part.runs.append(piece)
                start += len(piece.token_ids)
                room -= len(piece.token_ids)
        ends: dict[int, list[SequenceEnded]] = {completion.handle: [] for completion in self.completed}
        for end in self.ended:
            ends.setdefault(end.handle, []).append(end)
        completed = {completion.handle: completion for completion in self.completed}
        for handle, of_request in ends.items():
            if len(part.ended) >= max_tokens or part.runs:
                yield part
                part = EventBatch()
            part.ended.extend(of_request)
            if handle in completed:
                part.completed.append(completed[handle])
        yield part
        yield EventBatch(failed=self.failed, moved=self.moved, has_room=self.has_room)


# Conversions from the messages of quire.scheduler.v1.

_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_USAGE = fields(Usage)
# Fields of `Welcome` that have the same name and type in the message.
_WELCOME_FIELDS = tuple(
    field.name for field in fields(Welcome) if field.name not in ("durable_grace_s", "protocol", "model", "role")
)


def welcome_from(message: scheduler_pb2.Welcome) -> Welcome:
    return Welcome(
        **{name: getattr(message, name) for name in _WELCOME_FIELDS},
        durable_grace_s=message.durable_grace_ms / 1e3,
        protocol=ProtocolVersions.of(message.protocol),
        model=ModelFingerprint.of(message.model),
        role=ReplicaRole.of(message.role),
    )


def event_batch_from(message: scheduler_pb2.TokenEvents) -> EventBatch:
    """Raises InvalidArgument if the message is malformed."""
    return EventBatch(
        runs=_token_runs(message),
        ended=[_sequence_ended(end) for end in message.finished],
        completed=[_request_ended(end) for end in message.completed],
        failed=[_request_failed(failure) for failure in message.failed],
        prompt_runs=[_prompt_run(entry) for entry in message.prompt_logprobs],
        moved=[RequestMoved(each.handle, optional(each, "source")) for each in message.moved],
        has_room=list(message.has_room),
    )


def _token_runs(message: scheduler_pb2.TokenEvents) -> list[TokenRun]:
    names = ("handles", "sequence_indices", "offsets", "token_ids")
    columns = [decode_int32(getattr(message, name), name, minimum=0) for name in names]
    if len({len(column) for column in columns}) > 1:
        counts = ", ".join(f"{name} {len(column)}" for name, column in zip(names, columns, strict=True))
        raise InvalidArgument(f"columns differ in length: {counts}")
    if not message.HasField("token_logprobs"):
        columns = _by_sequence(*columns)
    handles, indices, offsets, token_ids = columns
    follows = (handles[1:] == handles[:-1]) & (indices[1:] == indices[:-1]) & (offsets[1:] == offsets[:-1] + 1)
    ids = token_ids.tolist()
    begins = [0, *(np.flatnonzero(~follows) + 1).tolist()] if ids else []
    parts = [ids[begin:end] for begin, end in pairwise([*begins, len(ids)])]
    runs = list(map(TokenRun, *(column[begins].tolist() for column in (handles, indices, offsets)), parts))
    if message.HasField("token_logprobs"):
        _add_logprobs(runs, message.token_logprobs, len(ids))
    return runs


def _by_sequence(handles: _Column, indices: _Column, offsets: _Column, token_ids: _Column) -> list[_Column]:
    """The columns with the tokens of a sequence one after the other: the events of several steps have them apart."""
    keys = handles.astype(np.int64) << 32 | indices
    if not np.count_nonzero(keys[1:] < keys[:-1]):
        return [handles, indices, offsets, token_ids]
    order = np.argsort(keys, kind="stable")
    return [column[order] for column in (handles, indices, offsets, token_ids)]


def _add_logprobs(runs: Sequence[TokenRun], message: scheduler_pb2.TokenLogprobs, num_events: int) -> None:
    """Gives each run its part of the columns. Either all tokens of a run have log probabilities, or none."""
    events = decode_int32(message.events, "token_logprobs.events", minimum=0, below=num_events)
    columns = decode_logprobs(message)
    if len(events) != len(columns) or not (events[1:] > events[:-1]).all():
        raise InvalidArgument(
            f"token_logprobs has {len(columns)} positions for {len(events)} events; "
            "they must be equally many, in rising order"
        )
    ends = np.cumsum([len(run.token_ids) for run in runs])
    counts = np.diff(np.searchsorted(events, ends), prepend=0).tolist()
    for run, count, part in zip(runs, counts, columns.split(counts), strict=True):
        if count not in (0, len(run.token_ids)):
            raise InvalidArgument(f"handle {run.handle}: {len(run.token_ids)} tokens, {count} logprobs")
        run.logprobs = part if count else None


def _prompt_run(message: scheduler_pb2.PromptLogprobs) -> PromptRun:
    if not message.first_position:
        raise InvalidArgument(f"prompt_logprobs.first_position is 0 for handle {message.handle}; it must be at least 1")
    token_ids = decode_int32(message.token_ids, "prompt_logprobs.token_ids", minimum=0)
    columns = decode_logprobs(message)
    if len(token_ids) != len(columns):
        raise InvalidArgument(
            f"handle {message.handle}: log probabilities of {len(columns)} of {len(token_ids)} tokens"
        )
    return PromptRun(message.handle, message.first_position, token_ids, columns)


def _sequence_ended(message: scheduler_pb2.SequenceEnd) -> SequenceEnded:
    if message.reason not in _REASONS:
        raise InvalidArgument(f"finished.reason is {message.reason} for handle {message.handle}")
    return SequenceEnded(
        handle=message.handle,
        sequence_index=message.sequence_index,
        num_tokens=message.num_tokens,
        reason=_REASONS[message.reason],
        stop_token_id=optional(message, "stop_token_id"),
        cumulative_logprob=optional(message, "cumulative_logprob"),
        vector=message.vector,
    )


def _request_ended(message: scheduler_pb2.RequestEnd) -> RequestEnded:
    if not message.HasField("usage"):
        return RequestEnded(message.handle, None)
    return RequestEnded(message.handle, Usage(**{each.name: getattr(message.usage, each.name) for each in _USAGE}))


def _request_failed(message: scheduler_pb2.RequestFailure) -> RequestFailed:
    retry_after_ms = optional(message, "retry_after_ms")
    error = error_for_code(message.code, message.message, reason=message.reason or None, retry_after_ms=retry_after_ms)
    if message.HasField("scheduler_epoch"):
        error.metadata["scheduler_epoch"] = str(message.scheduler_epoch)
    if message.already_taken_over:
        error.metadata[ALREADY_TAKEN_OVER] = "true"
    return RequestFailed(message.handle, error)
