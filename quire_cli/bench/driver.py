"""Sends a load to a server at its times of arrival, and records the result of each request."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from quire.load import LoadRequest, RequestRecord, conversations

_EARLIER_TURN_FAILED = "EARLIER_TURN_FAILED"
_TIMEOUT = "TIMEOUT"
MALFORMED_ANSWER = "MALFORMED_ANSWER"
_MAX_TOKENS = 1 << 30
"""Maximum tokens of one answer that a server may report."""


class CannotMeasureError(Exception):
    """No server answers; the message is one line."""


class RequestFailedError(Exception):
    """A request that did not end well.

    Args:
        reason: The same text for the same kind of error.
        message: The server's message.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


class Chunks:
    """The tokens of one request as they come. Methods raise RequestFailedError for impossible numbers."""

    __slots__ = ("_num_sequences", "_started", "sequences", "times", "tokens")

    def __init__(self, started: float, num_sequences: int = 1) -> None:
        self._started = started
        self._num_sequences = num_sequences
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.sequences: list[int] = []

    def add(self, sequence: int, num_tokens: int) -> None:
        """Records tokens that came now."""
        if not (isinstance(sequence, int) and 0 <= sequence < self._num_sequences):
            raise RequestFailedError(
                MALFORMED_ANSWER, f"the answer has a sequence {sequence!r:.40}; {self._num_sequences} were asked for"
            )
        self.times.append(time.perf_counter() - self._started)
        self.tokens.append(num_tokens)
        self.sequences.append(sequence)

    def spread(self, num_tokens: int) -> None:
        """Distributes the tokens of the whole answer evenly, for a server that reports their number only at the end."""
        check_count("number of output tokens", num_tokens)
        if not self.times and num_tokens:
            self.add(0, num_tokens)
        bounds = np.rint(np.linspace(0, num_tokens, len(self.tokens) + 1)).astype(np.int32)
        self.tokens = np.diff(bounds).tolist()


def check_count(name: str, value: object) -> None:
    """Raises RequestFailedError if a server reports an impossible number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_TOKENS:
        raise RequestFailedError(MALFORMED_ANSWER, f"the {name} is {value!r:.40}; it must be in [0, {_MAX_TOKENS:,}]")


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's report of a completed request; None for values that it does not report.

    Attributes:
        history: Data for the next turn of the conversation, for the same server's `send`.
        draft_tokens: Number of verified drafts; `accepted_draft_tokens` is the number of right ones.
    """

    prompt_tokens: int | None
    cached_tokens: int | None
    preemptions: int | None
    history: Any = None
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Attributes: `vocab_size` and `max_model_len` are None if the server does not report them."""

    model: str
    vocab_size: int | None
    max_model_len: int | None
    details: dict[str, Any]


class Server(Protocol):
    """A server under measurement."""

    async def connect(self) -> ServerFacts:
        """Raises CannotMeasureError if it does not answer, ConfigurationError if it does not serve the model."""
        ...

    async def send(self, request: LoadRequest, chunks: Chunks, history: Any) -> Answer:
        """Sends a request. Raises RequestFailedError. A cancelled call cancels the request."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Outcome:
    """The state of a run, during it and at its end.

    Attributes:
        records: Requests that have ended, in the order of their ends.
        messages: The first message of each reason of errors.
        num_sent: Requests that were sent.
        num_failed: Number of failed records.
        cpu_s: Processor time of this process, once the run is over.
        counters: Further numbers that servers reported, summed over all requests, by name.
    """

    records: list[RequestRecord] = field(default_factory=list)
    messages: dict[str, str] = field(default_factory=dict)
    num_sent: int = 0
    num_failed: int = 0
    cpu_s: float = 0.0
    counters: Counter[str] = field(default_factory=Counter[str])


@dataclass(frozen=True, slots=True)
class Pacing:
    """Attributes:
    max_concurrency: Requests, or conversations, that run at once; None is no limit.
    is_closed: Requests arrive when there is a slot for them, whatever their time of arrival.
    duration_s: Nothing is sent after it; None is no limit.
    timeout_s: Timeout of one request.
    """

    max_concurrency: int | None
    is_closed: bool
    duration_s: float | None
    timeout_s: float


class Driver:
    """Runs one load. `outcome` is filled while it runs, so that a cancelled run keeps its results."""

    def __init__(self, server: Server, pacing: Pacing, on_end: Callable[[int, int], None]) -> None:
        """`on_end` gets the numbers of requests that have ended and that have failed."""
        self.outcome = Outcome()
        self._server = server
        self._pacing = pacing
        self._on_end = on_end
        self._started = 0.0

    async def run(self, load: Iterable[LoadRequest]) -> None:
        """Returns when all requests have ended. If cancelled, it cancels the running ones."""
        cpu_before = time.process_time()
        self._started = time.perf_counter()
        limit = self._pacing.max_concurrency
        slots = None if limit is None else asyncio.Semaphore(limit)
        try:
            async with asyncio.TaskGroup() as tasks:
                for turns in conversations(load):
                    due_s = turns[0].arrival_s or 0.0
                    await self._sleep_until(due_s)
                    if slots is not None:
                        await slots.acquire()
                    if self._pacing.is_closed:
                        due_s = self._now()
                    if self._is_over():
                        break
                    task = tasks.create_task(self._converse(turns, due_s))
                    if slots is not None:
                        task.add_done_callback(lambda _: slots.release())
        finally:
            self.outcome.cpu_s = time.process_time() - cpu_before

    async def _converse(self, turns: Sequence[LoadRequest], due_s: float) -> None:
        history, has_failed = None, False
        for request in turns:
            if request.turn:
                due_s = self._now() + (0 if has_failed else request.delay_s)
                await self._sleep_until(due_s)
                if self._is_over():
                    return
            if has_failed:
                self._record(RequestRecord(request.index, due_s, None, due_s, error=_EARLIER_TURN_FAILED))
                continue
            answer = await self._request(request, due_s, history)
            has_failed = answer is None
            history = answer and answer.history

    async def _request(self, request: LoadRequest, due_s: float, history: Any) -> Answer | None:
        """The server's answer; None if the request failed."""
        chunks = Chunks(self._started, request.beam_width or request.n)
        self.outcome.num_sent += 1
        sent_s, answer, error = self._now(), None, None
        try:
            async with asyncio.timeout(self._pacing.timeout_s):
                answer = await self._server.send(request, chunks, history)
        except TimeoutError:
            error = _TIMEOUT
            self.outcome.messages.setdefault(error, f"no end after {self._pacing.timeout_s:g} s")
        except RequestFailedError as failure:
            error = failure.reason
            self.outcome.messages.setdefault(error, failure.message)
        if answer is not None and answer.draft_tokens:
            drafts = {"draft_tokens": answer.draft_tokens, "accepted_draft_tokens": answer.accepted_draft_tokens}
            self.outcome.counters.update(drafts)
        known = len(request.prompt) if isinstance(request.prompt, np.ndarray) else None
        record = RequestRecord(
            request.index,
            due_s,
            sent_s,
            self._now(),
            np.array(chunks.times, np.float64),
            np.array(chunks.tokens, np.int32),
            np.array(chunks.sequences, np.int32),
            prompt_tokens=known if answer is None or answer.prompt_tokens is None else answer.prompt_tokens,
            cached_tokens=None if answer is None else answer.cached_tokens,
            preemptions=None if answer is None else answer.preemptions,
            error=error,
        )
        self._record(record)
        return answer

    def _record(self, record: RequestRecord) -> None:
        self.outcome.records.append(record)
        self.outcome.num_failed += record.error is not None
        self._on_end(len(self.outcome.records), self.outcome.num_failed)

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _is_over(self) -> bool:
        return self._pacing.duration_s is not None and self._now() >= self._pacing.duration_s

    async def _sleep_until(self, time_s: float) -> None:
        if (left := time_s - self._now()) > 0:
            await asyncio.sleep(left)
