"""A live request from its arrival to its end: the tokens from schedulers, and the output not yet sent to the client."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from gateway.replicas.events import (
    Chunk,
    Completed,
    Event,
    Finished,
    GeneratedSequence,
    PromptRun,
    RequestEnded,
    SequenceEnded,
    TokenLogprobs,
    TokenRun,
    Usage,
)
from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.sequence import SequenceStream, TokenGapError, with_gateway_counts
from gateway.turns import Turns
from quire.common.v1.common_pb2 import KvSource
from quire.gateway.v1.generation_pb2 import ToolCall
from quire.rpc.errors import Internal, QuireError
from quire.runtime.failpoint import failpoint
from quire.runtime.logs import REQUEST_ID
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint, differing_parts

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Arrivals:
    """The tokens in a batch of events that are new to this gateway.

    Attributes:
        at: Their arrival time, in seconds of the ledger's clock.
        num_tokens: Their number.
        gaps: For consecutive tokens of one sequence that came together, the seconds since the previous token of the
            sequence; the first tokens of a sequence have no entry.
        gap_tokens: The number of tokens after each of these gaps.
        direct: The requests with new tokens that `write_directly` is to be called for.
    """

    at: float
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list[float])
    gap_tokens: list[int] = field(default_factory=list[int])
    direct: list["LiveRequest"] = field(default_factory=list["LiveRequest"])


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The memory of one token, in bytes.

    Attributes:
        kept: Held until its request ends.
        pending: Held until its client gets it.
        prompt: Held for a prompt token with log probabilities.
    """

    kept: int
    pending: int
    prompt: int


class DirectWriter(Protocol):
    """Writes chunks to a client at once, in place of the reader of `LiveRequest.events`, which sleeps meanwhile."""

    @property
    def is_ready(self) -> bool:
        """Whether a chunk can be written without a wait."""
        ...

    def write(self, chunk: Chunk) -> None:
        """Writes the next chunk. Called only while it is ready."""
        ...


class News:
    """An event that at most one task waits for. Streams wait for each token, and asyncio's takes longer."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    @property
    def is_awaited(self) -> bool:
        """Whether a task waits for it, and was not woken."""
        return self._waiter is not None and not self._waiter.done()

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Waits until it is set."""
        while not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter


class CallModel:
    """The model of a call with several prompts. One model answers all of them: the caller compares their vectors or
    scores, and vectors of different models cannot be compared.

    Before the first output the requests prefer the model of the last submission. The first output decides.

    Attributes:
        preferred: The model of the scheduler that got the last submission; unknown before.
        decided: The model of the first output; None before.
    """

    def __init__(self, requests: Sequence["LiveRequest"], move: Callable[["LiveRequest"], object]) -> None:
        """`move` takes a request away from its scheduler, which has another model than the decided one."""
        self.preferred = UNKNOWN_MODEL
        self.decided: ModelFingerprint | None = None
        self._requests = list(requests)
        self._move = move

    def decide(self, model: ModelFingerprint) -> None:
        """A request has output of this model. No effect after the first output, or if the model is unknown."""
        if self.decided is not None or model == UNKNOWN_MODEL:
            return
        self.decided = model
        for each in self._requests:
            if each.replica is not None and not each.is_over and not each.fits(each.model):
                self._move(each)

    def close(self) -> None:
        """The call has ended. Without its requests this object is in no cycle of references."""
        self._requests.clear()


class LiveRequest:
    """The ledger's entry of one request. Writers (the scheduler's events) never wait for the reader (the client).

    Attributes:
        request: The validated request; together with `sequences` it is all that another scheduler needs to continue.
        handle: The request's number on scheduler streams.
        sequences: One stream per sequence.
        replica: Address of the scheduler that has the request; None while it waits for a scheduler.
        last_replica: Address of the scheduler that has it or had it last; None before the first one.
        num_repeated: The number of tokens yet to come that another stream has already counted.
        num_brought_tokens: The number of tokens that its client sent with the request.
        submissions: The number of submissions to schedulers, without schedulers that rejected it because they drain.
        is_prepared: Whether it may be submitted; not before all requests of its call are valid.
        moves: How often it left a scheduler that had no worker, since its last token.
        is_heir: Whether it continues an earlier entry of this gateway, still has its client, and has no new event yet:
            meanwhile another gateway may have taken the request over from that entry.
        kv_source: The source of KV blocks for the next scheduler; None if there is none.
        model: The model of the scheduler that generated its tokens, or that has it; unknown before.
        call: The model of its call; None if the call has no other prompt.
        prompt_logprobs: The requested log probabilities of prompt tokens that have arrived.
        usage: Its usage; None until it is completed.
        awaits_usage: Whether all its sequences ended here, and the scheduler has yet to report the usage.
        direct: Writes tokens from schedulers while the reader of `events` waits for them; None if only the reader does.
    """

    def __init__(
        self,
        request: GenerationRequest,
        handle: int,
        sequences: Sequence[SequenceStream],
        *,
        max_chunk_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.handle = handle
        self.sequences = tuple(sequences)
        self.replica: str | None = None
        self.last_replica: str | None = None
        self.num_repeated = 0
        self.num_brought_tokens = 0
        self.submissions = 0
        self.is_prepared = True
        self.moves = 0
        self.is_heir = False
        self.kv_source: KvSource | None = None
        self.model = UNKNOWN_MODEL
        self.call: CallModel | None = None
        self.awaits_usage = False
        self.direct: DirectWriter | None = None
        self.prompt_logprobs = TokenLogprobs()
        self.usage: Usage | None = None
        self._count_bytes: Callable[[int], object] = lambda num_bytes: None
        # Memory of new tokens that is not counted yet.
        self._num_uncounted = 0
        self._token_bytes = TokenBytes(0, 0, 0)
        self._max_chunk_tokens = max_chunk_tokens
        self._clock = clock
        self._arrived_at = clock()
        self._first_token_at: float | None = None
        self._last_token_at = self._arrived_at
        self._error: QuireError | None = None
        self._news = News()
        self._ended = asyncio.Event()
        self._on_over: Callable[[], object] = lambda: None

    def count_memory(self, count: Callable[[int], object], token_bytes: TokenBytes) -> None:
        """Reports memory from now on: calls `count` with the bytes that tokens add, or (negative) free."""
        self._count_bytes, self._token_bytes = count, token_bytes

    @property
    def is_over(self) -> bool:
        """Whether the scheduler has nothing more to report."""
        return self.usage is not None or self._error is not None

    @property
    def is_completed(self) -> bool:
        """Whether it ended without an error, and all of its output arrived."""
        return self.usage is not None

    @property
    def has_failed(self) -> bool:
        """Whether it ended by an error of its scheduler or of this gateway."""
        return self._error is not None

    @property
    def may_have_run(self) -> bool:
        """Whether its prompt may have been computed. It was not if no scheduler got the request, or if the request
        failed without output; but workers detect invalid sampling only after they have computed the prompt."""
        has_output = self.num_generated_tokens or len(self.prompt_logprobs)
        was_refused = self._error is not None and self._error.reason != "INVALID_SAMPLING"
        return bool(has_output or (self.submissions and not was_refused))

    @property
    def is_resumable(self) -> bool:
        """Whether another entry can continue from this one. It cannot if log probabilities are requested and the client
        sent the first tokens with the request, since theirs are unknown."""
        if not self.request.durable or self._error is not None:
            return False
        return self.request.logprobs is None or all(
            len(each.logprobs) == len(each.token_ids) for each in self.sequences
        )

    def fits(self, model: ModelFingerprint) -> bool:
        """Whether it can continue with this model."""
        required = required_model(self)
        return required is None or not differing_parts(required, model)

    def set_model(self, model: ModelFingerprint) -> None:
        """Sets the model of the scheduler that gets it. Before its first token it drops prompt log probabilities of
        another model; after that it keeps the model that generated its tokens."""
        if not self.num_generated_tokens or self.model == UNKNOWN_MODEL:
            if differing_parts(self.model, model):
                self.prompt_logprobs = TokenLogprobs()
            self.model = model
        if self.call is not None:
            self.call.preferred = model

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.sequences)

    @property
    def num_dropped_tokens(self) -> int:
        """The number of tokens of candidates that were not returned; 0 before the request is completed."""
        if self.usage is None or not self.request.chooses:
            return 0
        return max(self.usage.generated_tokens - self.num_generated_tokens, 0)

    @property
    def num_computed_tokens(self) -> float:
        """The number of tokens generated so far, including candidates that are not returned."""
        return self.num_generated_tokens * self.request.sampling.best_of / self.request.sampling.n

    @property
    def max_generated_tokens(self) -> int:
        """Upper bound of the final `num_generated_tokens`."""
        max_tokens = self.request.stopping.max_tokens
        return sum(max_tokens if stream.finished is None else len(stream.token_ids) for stream in self.sequences)

    @property
    def num_expected_tokens(self) -> int | None:
        """The number of tokens yet to come by its caller's estimate, from 1 up to the possible maximum; None if the
        caller gave no estimate."""
        each = self.request.expected_tokens
        if each is None:
            return None
        expected = min(each * len(self.sequences), self.max_generated_tokens)
        return max(expected - self.num_generated_tokens, 1)

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self._first_token_at is None else self._first_token_at - self._arrived_at

    @property
    def seconds_since_news(self) -> float:
        """Seconds since its last token, or since its arrival before the first token."""
        return self._clock() - self._last_token_at

    # Events from the scheduler.

    def accept(self, run: TokenRun, arrivals: Arrivals | None = None) -> bool:
        """Adds new tokens; returns whether a stop string among them ended the sequence.

        Tokens that come from a scheduler are counted in `arrivals`.

        Raises:
            TokenGapError: tokens are missing.
        """
        stream = _stream_of(self, run.sequence_index)
        was_running = stream.finished is None
        if num_new := stream.accept(run.offset, run.token_ids, run.logprobs):
            if arrivals is None:
                self._last_token_at = self._clock()
            else:
                # This runs for each sequence in each step: it is inlined and reads the clock once per batch.
                self._last_token_at = now = arrivals.at
                if self.num_repeated:
                    num_repeated = min(self.num_repeated, num_new)
                    self.num_repeated -= num_repeated
                    arrivals.num_tokens -= num_repeated
                elif (before := stream.last_token_at) is not None:
                    arrivals.gaps.append(now - before)
                    arrivals.gap_tokens.append(num_new)
                arrivals.num_tokens += num_new
                stream.last_token_at = now
            self.moves, self.is_heir = 0, False
            if self._first_token_at is None:
                self._first_token_at = self._last_token_at
                if self.call is not None:
                    self.call.decide(self.model)
            self._num_uncounted += num_new * (self._token_bytes.kept + self._token_bytes.pending)
            if self.direct is None or arrivals is None:
                self.wake_reader()
            else:
                arrivals.direct.append(self)
        return was_running and stream.finished is not None

    def accept_prompt(self, run: PromptRun) -> None:
        """Adds log probabilities of prompt tokens, without positions that came before.

        Raises:
            TokenGapError: positions before these are missing.
        """
        next_position = self.request.prompt_logprobs_start + len(self.prompt_logprobs)
        seen = next_position - run.first_position
        if seen < 0:
            raise TokenGapError(
                f"request {self.request.request_id} has log probabilities of its prompt up to position "
                f"{next_position}, an event starts at {run.first_position}"
            )
        if seen < len(run.columns):
            columns = run.columns.part(seen, len(run.columns))
            self.prompt_logprobs.add(run.token_ids[seen:], columns)
            self._count_bytes(len(columns) * self._token_bytes.prompt)

    def end_sequence(self, end: SequenceEnded) -> None:
        """Raises TokenGapError when tokens of the sequence are missing."""
        stream = _stream_of(self, end.sequence_index)
        stream.finish(end.num_tokens, end.reason, end.stop_token_id, end.cumulative_logprob, end.vector)
        self._news.set()

    def complete(self, end: RequestEnded) -> None:
        """Raises TokenGapError when a sequence has not ended."""
        for stream in self.sequences:
            if stream.finished is None:
                raise TokenGapError(f"request {self.request.request_id} completed before sequence {stream.index} ended")
        if self.call is not None:
            # Vectors and scores come without tokens.
            self.call.decide(self.model)
        self.usage = with_gateway_counts(end.usage or self._own_usage(), self.request, self.sequences)
        self._notify_over()

    def await_usage(self) -> bool:
        """Waits for the usage from now on if a stop string ended its last running sequence, so that the scheduler must
        be notified. Returns whether that is so; true once."""
        if self.is_over or self.awaits_usage or not _all_finished(self.sequences):
            return False
        self.awaits_usage = True
        return True

    def end_if_complete(self) -> None:
        """Ends sequences that have all their tokens, and the request if all its sequences have ended.

        Used after the scheduler that would report the ends is gone, since no other scheduler must continue them.
        """
        for stream in self.sequences:
            stream.finish_if_complete(self.request.stopping.max_tokens)
        if not self.is_over and _all_finished(self.sequences):
            self.usage = self._own_usage()
            self._notify_over()

    def fail(self, error: QuireError) -> None:
        """Ends the request with an error, which its reader gets. No effect if it is over."""
        if not self.is_over:
            self._error = error
            self._notify_over()

    def fail_unexpectedly(self, error: Exception) -> QuireError:
        """Ends the request with an unexpected error, which is logged. Returns the error that its reader gets, without
        details."""
        request_id = self.request.request_id
        _logger.error("request %s failed unexpectedly", request_id, exc_info=error, extra={REQUEST_ID: request_id})
        shown = Internal("an unexpected error; the server's log has more", reason="UNEXPECTED")
        self.fail(shown)
        return shown

    def catch_up(self, earlier: "LiveRequest", max_tokens: int) -> bool:
        """Copies up to `max_tokens` tokens of an earlier entry of the same request. Returns whether this entry now has
        all tokens of the earlier one; then it also has the same state."""
        for stream, source in zip(self.sequences, earlier.sequences, strict=True):
            begin = len(stream.token_ids)
            if stream.finished is None and begin < len(source.token_ids):
                token_ids = source.token_ids[begin : begin + max_tokens]
                logprobs = source.logprobs.part(begin, begin + len(token_ids)) if len(source.logprobs) else None
                self.accept(TokenRun(self.handle, stream.index, begin, token_ids, logprobs))
                return False
        for stream, source in zip(self.sequences, earlier.sequences, strict=True):
            if (end := source.finished) is not None:
                stream.finish(end.num_tokens, end.reason, end.stop_token_id, end.cumulative_logprob, end.vector)
        self.prompt_logprobs = earlier.prompt_logprobs
        self.submissions, self.moves, self.model = earlier.submissions, earlier.moves, earlier.model
        self._error = earlier._error
        self.usage = earlier.usage or (self._own_usage() if earlier.awaits_usage else None)
        self._news.set()
        if self.is_over:
            self._notify_over()
        return True

    # Output to the client.

    def write_directly(self) -> None:
        """Gives new tokens to the direct writer. Wakes the reader instead if it has other news, or if the client must
        be waited for."""
        direct, is_left = self.direct, False
        if direct is None or not self._news.is_awaited:
            self.wake_reader()
            return
        for stream in self.sequences:
            if not (num_pending := stream.num_pending):
                continue
            if direct.is_ready:
                failpoint("gateway.stream.before_write")
                chunk = stream.take_chunk(self._max_chunk_tokens)
                self._num_uncounted -= (num_pending - stream.num_pending) * self._token_bytes.pending
                if chunk is not None:
                    direct.write(chunk)
            is_left = is_left or stream.num_pending > 0
        if is_left:
            self.wake_reader()
        else:
            num_bytes, self._num_uncounted = self._num_uncounted, 0
            self._count_bytes(num_bytes)

    def wake_reader(self) -> None:
        """Wakes the reader, which takes all output."""
        num_bytes, self._num_uncounted = self._num_uncounted, 0
        self._count_bytes(num_bytes)
        self._news.set()

    async def events(self) -> AsyncIterator[Event]:
        """All events in order, Completed last. While the reader is busy, new tokens join the next chunk.

        Sequences take turns, so that no sequence waits for the end of another, however slow the reader is.

        Chunks of a steady request have one token each, in an order that depends only on the tokens.

        Raises:
            QuireError: the request failed.
        """
        if self.request.is_steady:
            async for event in self._steady_events():
                yield event
            return
        while True:
            await self._wait_for_news()
            for stream in self.sequences:
                if (event := self._next_event(stream)) is None:
                    continue
                failpoint("gateway.stream.before_write")
                yield event
                if self._error is not None:
                    raise self._error
                if stream.has_output or stream.has_end:
                    # After the other sequences have had their turns.
                    self._news.set()
            if self.usage is not None and not self._news.is_set():
                yield Completed(self.usage, self.prompt_logprobs)
                return

    async def _steady_events(self) -> AsyncIterator[Event]:
        """Events with one token each, from the running sequences in turn."""
        running = list(self.sequences)
        while running:
            for stream in list(running):
                while (event := self._next_event(stream)) is None:
                    await self._wait_for_news()
                if isinstance(event, Finished):
                    running.remove(stream)
                failpoint("gateway.stream.before_write")
                yield event
                if self._error is not None:
                    raise self._error
        while self.usage is None:
            await self._wait_for_news()
        yield Completed(self.usage, self.prompt_logprobs)

    def _next_event(self, stream: SequenceStream) -> Chunk | Finished | None:
        if not stream.has_output:
            return stream.take_finished()
        num_pending = stream.num_pending
        is_steady = self.request.is_steady
        chunk = _taken(self, stream.take_token if is_steady else partial(stream.take_chunk, self._max_chunk_tokens))
        self._count_bytes((stream.num_pending - num_pending) * self._token_bytes.pending)
        return chunk or stream.take_finished()

    async def _wait_for_news(self) -> None:
        """Waits for news of the scheduler. Raises QuireError if the request failed."""
        if not self._news.is_set():
            await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error

    def when_over(self, callback: Callable[[], object]) -> None:
        """Calls `callback` as soon as the scheduler has nothing more to report, now if that is already true."""
        if self.is_over:
            callback()
        else:
            self._on_over = callback

    async def result(self) -> tuple[list[GeneratedSequence], Usage]:
        """Waits for the end and returns all sequences and the usage. For a reader that does not use `events`.

        Raises:
            QuireError: the request failed.
        """
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self.usage is not None
        turns = Turns()
        sequences: list[GeneratedSequence] = []
        for stream in self.sequences:
            chunk = _taken(self, partial(stream.take_chunk, len(stream.token_ids))) or Chunk(stream.index, 0, [], "")
            assert stream.finished is not None
            calls = tuple(ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in chunk.tool_calls)
            sequences.append(
                GeneratedSequence(chunk.token_ids, chunk.text, chunk.logprobs, stream.finished, chunk.reasoning, calls)
            )
            await turns.pause()
        return sequences, self.usage

    def _notify_over(self) -> None:
        self._news.set()
        self._ended.set()
        self._on_over()

    def _own_usage(self) -> Usage:
        """The usage as computed here, for a request whose scheduler can no longer report it. Values that only the
        scheduler knows are 0, and the queue time counts as prefill."""
        first = self._first_token_at if self._first_token_at is not None else self._last_token_at
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            generated_tokens=self.num_generated_tokens,
            prefill_ms=(first - self._arrived_at) * 1000,
            decode_ms=(self._last_token_at - first) * 1000,
            reasoning_tokens=sum(stream.num_reasoning_tokens for stream in self.sequences),
        )


def required_model(live: LiveRequest) -> ModelFingerprint | None:
    """The model that a request must continue with; None if it may have any."""
    if live.num_generated_tokens:
        return live.model
    return None if live.call is None else live.call.decided


def _stream_of(live: LiveRequest, index: int) -> SequenceStream:
    if index >= len(live.sequences):
        raise TokenGapError(f"request {live.request.request_id} has no sequence {index}")
    return live.sequences[index]


def _all_finished(sequences: Sequence[SequenceStream]) -> bool:
    return all(stream.finished is not None for stream in sequences)


def _taken(live: LiveRequest, take: Callable[[], Chunk | None]) -> Chunk | None:
    """The next output of a sequence of the request. If its tokens cannot become text, the request fails: raises
    QuireError."""
    try:
        return take()
    except Exception as error:
        raise live.fail_unexpectedly(error) from error
