"""A request from its arrival to its end: what was asked, what came, what its client still has to get."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from gateway.requests.answer_memory import CallMemory
from gateway.requests.events import Chunk, Completed, Event, GeneratedSequence, Usage
from gateway.requests.logprobs import TokenLogprobs
from gateway.requests.request import GenerationRequest
from gateway.requests.sequence_stream import SequenceStream, TokenGapError
from gateway.schedulers.scheduler_events import PromptRun, RequestEnded, SequenceEnded, TokenRun
from gateway.turns import Turns
from quire.compatibility import UNKNOWN_MODEL, ModelFingerprint, differing_parts
from quire.logprob_columns import LogprobLog
from quire.rpc.errors import Internal, QuireError

_logger = logging.getLogger(__name__)


class LiveRequest:
    """The ledger's entry of one request. Writers (the scheduler's events) never wait for the reader (the client).

    Attributes:
        request: What was asked; with `sequences` it is all that another scheduler needs to go on.
        handle: What stands for the request on scheduler streams.
        sequences: One stream per sequence.
        replica: Address of the scheduler that has the request, None while it waits for one.
        submissions: How often it was sent to a scheduler, those not counted that drained.
        is_prepared: Whether it may be submitted; not while it is given tokens that its caller holds.
        moves: How often it left a scheduler that had no worker, since its last token.
        model: The model of the scheduler that its tokens come from, or that has it; unknown before.
        prompt_logprobs: Log probabilities of the prompt tokens from the second on, as far as they came.
        is_over: Whether nothing more is expected from the scheduler.
        awaits_usage: Whether all its sequences ended here, and the scheduler has yet to say what it cost.
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
        self.submissions = 0
        self.is_prepared = True
        self.moves = 0
        self.model = UNKNOWN_MODEL
        self.awaits_usage = False
        self.prompt_logprobs = TokenLogprobs()
        # Of all tokens of a durable request, whose client may come back for them.
        self._logprobs = [LogprobLog() for _ in self.sequences]
        self._memory: CallMemory | None = None
        self._kept_bytes = self._pending_bytes = 0
        self._max_chunk_tokens = max_chunk_tokens
        self._clock = clock
        self._arrived_at = clock()
        self._first_token_at: float | None = None
        self._last_token_at = self._arrived_at
        self._usage: Usage | None = None
        self._error: QuireError | None = None
        self._news = asyncio.Event()
        self._ended = asyncio.Event()

    def count_in(self, memory: CallMemory) -> None:
        """What comes from now on is counted as held by the answer to this call."""
        self._memory = memory
        self._kept_bytes, self._pending_bytes = memory.kept_bytes, memory.pending_bytes(self.request)
        if self.request.durable:
            self._kept_bytes += memory.logprob_bytes(self.request.logprobs)
        memory.when_ended(self.fail)

    @property
    def is_over(self) -> bool:
        return self._usage is not None or self._error is not None

    @property
    def is_completed(self) -> bool:
        """Whether all of it came, and it did not fail."""
        return self._usage is not None

    @property
    def is_resumable(self) -> bool:
        """Whether another entry can go on from what is here. Where the client gave the first tokens itself, nobody has
        their log probabilities."""
        if not self.request.durable or self._error is not None:
            return False
        return self.request.logprobs is None or all(
            len(log) == len(stream.token_ids) for log, stream in zip(self._logprobs, self.sequences, strict=True)
        )

    def fits(self, model: ModelFingerprint) -> bool:
        """Whether it can go on with this model."""
        return not (self.num_generated_tokens and differing_parts(self.model, model))

    @property
    def usage(self) -> Usage | None:
        """What it cost; None until all of it came."""
        return self._usage

    @property
    def num_generated_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.sequences)

    @property
    def num_computed_tokens(self) -> float:
        """The tokens that were generated so far, with those of candidates that are not returned."""
        return self.num_generated_tokens * self.request.best_of / self.request.num_sequences

    @property
    def max_generated_tokens(self) -> int:
        """What `num_generated_tokens` is at the end at most."""
        max_tokens = self.request.stopping.max_tokens
        return sum(max_tokens if stream.finished is None else len(stream.token_ids) for stream in self.sequences)

    @property
    def seconds_to_first_token(self) -> float | None:
        return None if self._first_token_at is None else self._first_token_at - self._arrived_at

    @property
    def seconds_since_news(self) -> float:
        """Since its last token came, or since its arrival."""
        return self._clock() - self._last_token_at

    def accept(self, run: TokenRun) -> bool:
        """Takes new tokens; returns whether a stop string ended the sequence with them.

        Raises:
            TokenGapError: tokens are missing.
        """
        stream = self._stream(run.sequence_index)
        was_running, num_before = stream.finished is None, len(stream.token_ids)
        if num_new := stream.accept(run.offset, run.token_ids, run.logprobs):
            self._hold(num_new * (self._kept_bytes + self._pending_bytes))
            if self.request.durable and run.logprobs is not None:
                first = num_before - run.offset
                self._logprobs[stream.index].append(run.logprobs.part(first, first + num_new))
            self._last_token_at = self._clock()
            self.moves = 0
            if self._first_token_at is None:
                self._first_token_at = self._last_token_at
            self._news.set()
        return was_running and stream.finished is not None

    def accept_prompt(self, run: PromptRun) -> None:
        """Takes log probabilities of prompt tokens; those that came before are dropped.

        Raises:
            TokenGapError: some are missing before them.
        """
        seen = len(self.prompt_logprobs) + 1 - run.first_position
        if seen < 0:
            raise TokenGapError(
                f"request {self.request.request_id} has {len(self.prompt_logprobs)} prompt logprobs, "
                f"an event starts at {run.first_position}"
            )
        if seen < len(run.columns):
            columns = run.columns.part(seen, len(run.columns))
            self.prompt_logprobs.add(run.token_ids[seen:], columns)
            if self._memory is not None:
                self._hold(len(columns) * self._memory.logprob_bytes(self.request.prompt_logprobs))

    def end_sequence(self, end: SequenceEnded) -> None:
        """Raises TokenGapError when tokens of the sequence are missing."""
        stream = self._stream(end.sequence_index)
        stream.end(end.num_tokens, end.reason, end.stop_token_id, end.cumulative_logprob)
        self._news.set()

    def complete(self, end: RequestEnded) -> None:
        """Raises TokenGapError when a sequence has not ended."""
        for stream in self.sequences:
            if stream.finished is None:
                raise TokenGapError(f"request {self.request.request_id} completed before sequence {stream.index} ended")
        if end.usage is None:
            self._usage = self._own_usage()
        elif self.request.stopping.stop:
            # Until the scheduler hears that a stop string ended a sequence here, it goes on with it.
            self._usage = dataclasses.replace(end.usage, generated_tokens=self.num_generated_tokens)
        else:
            self._usage = end.usage
        self._end()

    def ends_here(self) -> bool:
        """Whether all its sequences have ended and the scheduler is to be told so, which is said once.

        So it is when a stop string ended the last of them here, while the end of the others was on its way.
        """
        if self.is_over or self.awaits_usage or not self._all_ended():
            return False
        self.awaits_usage = True
        return True

    def catch_up(self, earlier: "LiveRequest", max_tokens: int) -> bool:
        """Takes in what an earlier entry of the same request has, up to so many tokens of it. Returns whether it has
        all of that now; then it is as far as the earlier one."""
        for stream, source in zip(self.sequences, earlier.sequences, strict=True):
            begin = len(stream.token_ids)
            if stream.finished is None and begin < len(source.token_ids):
                token_ids = source.token_ids[begin : begin + max_tokens]
                log = earlier._logprobs[stream.index]
                logprobs = log.part(begin, begin + len(token_ids)) if len(log) else None
                self.accept(TokenRun(self.handle, stream.index, begin, token_ids, logprobs))
                return False
        for stream, source in zip(self.sequences, earlier.sequences, strict=True):
            end = source.finished
            if end is not None:
                stream.end(end.num_tokens, end.reason, end.stop_token_id, end.cumulative_logprob)
        self.prompt_logprobs = earlier.prompt_logprobs
        self.submissions, self.moves, self.model = earlier.submissions, earlier.moves, earlier.model
        self._error = earlier._error
        self._usage = earlier._usage or (self._own_usage() if earlier.awaits_usage else None)
        self._news.set()
        if self.is_over:
            self._end()
        return True

    def settle(self) -> None:
        """Ends sequences that have all their tokens, and the request if it has all its sequences.

        For when the scheduler that would have said so is gone: another one must not be asked to go on with them.
        """
        for stream in self.sequences:
            stream.end_if_complete(self.request.stopping.max_tokens)
        if not self.is_over and self._all_ended():
            self._usage = self._own_usage()
            self._end()

    def skip(self, index: int, num_tokens: int, num_characters: int | None = None) -> None:
        """The client has so much of a sequence already. To be called before anything is delivered."""
        self.sequences[index].skip(num_tokens, num_characters)

    def fail(self, error: QuireError) -> None:
        """Ends the request by an error, which its reader gets. No effect when it is over."""
        if not self.is_over:
            self._error = error
            self._end()

    def fail_unexpectedly(self, error: Exception) -> None:
        """Ends the request by an error that nobody thought of: its reader learns that it happened, the log has it."""
        _logger.error("request %s failed unexpectedly", self.request.request_id, exc_info=error)
        self.fail(Internal("an unexpected error; the server's log has more", reason="UNEXPECTED"))

    async def events(self) -> AsyncIterator[Event]:
        """All events in order, Completed last. While the reader is busy, new tokens join the next chunk.

        Sequences take turns, so that none waits for another one to end, however slow the reader is.

        Raises:
            QuireError: the request failed.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self._error is not None:
                raise self._error
            for stream in self.sequences:
                num_pending = stream.num_pending
                event = stream.take_chunk(self._max_chunk_tokens) or stream.take_finished()
                self._hold((stream.num_pending - num_pending) * self._pending_bytes)
                if event is None:
                    continue
                # It may have more, when the others have had their turn.
                self._news.set()
                yield event
                if self._error is not None:
                    raise self._error
            if self._usage is not None and not self._news.is_set():
                yield Completed(self._usage, self.prompt_logprobs)
                return

    async def wait_over(self) -> None:
        """Waits until nothing more is expected from the scheduler."""
        await self._ended.wait()

    async def result(self) -> tuple[list[GeneratedSequence], Usage]:
        """Waits for the end; all sequences, whole, and the usage. For a reader that did not use `events`.

        Raises:
            QuireError: the request failed.
        """
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._usage is not None
        turns = Turns()
        sequences: list[GeneratedSequence] = []
        for stream in self.sequences:
            sequences.append(_generated(stream))
            await turns.pause()
        return sequences, self._usage

    def _hold(self, num_bytes: int) -> None:
        if self._memory is not None and num_bytes:
            self._memory.add(num_bytes)

    def _all_ended(self) -> bool:
        return all(stream.finished is not None for stream in self.sequences)

    def _end(self) -> None:
        self._news.set()
        self._ended.set()

    def _stream(self, index: int) -> SequenceStream:
        if index >= len(self.sequences):
            raise TokenGapError(f"request {self.request.request_id} has no sequence {index}")
        return self.sequences[index]

    def _own_usage(self) -> Usage:
        """The usage of a request whose scheduler cannot say it any more; what only that one knows stays 0.

        The time in the queue is counted as prefill.
        """
        first = self._first_token_at if self._first_token_at is not None else self._last_token_at
        return Usage(
            prompt_tokens=len(self.request.prompt_token_ids),
            generated_tokens=self.num_generated_tokens,
            prefill_ms=(first - self._arrived_at) * 1000,
            decode_ms=(self._last_token_at - first) * 1000,
        )


def _generated(stream: SequenceStream) -> GeneratedSequence:
    chunk = stream.take_chunk(len(stream.token_ids)) or Chunk(stream.index, 0, [], "")
    assert stream.finished is not None
    return GeneratedSequence(chunk.token_ids, chunk.text, chunk.logprobs, stream.finished)
