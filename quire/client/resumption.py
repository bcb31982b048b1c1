"""How a durable stream goes on after its connection was lost. Streams do the waiting and calling."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.client.types import RequestCompleted, SequenceFinished, StreamEvent, TokenChunk
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import NotFound, QuireError, Unavailable

_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 1.0
_GIVE_UP_AFTER_S = 30.0

Calls = Callable[[float | None], Any]
"""Makes a call with that many seconds of time."""


def new_request_id() -> str:
    """An id that nobody guesses, made here so that it is known also where no answer came."""
    return f"req-{secrets.token_hex(16)}"


@dataclass(slots=True)
class _Progress:
    num_tokens: int = 0
    num_characters: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class Resumption:
    """What came of one durable stream, and how to get the rest.

    Attributes:
        request_id: The request's id.
        start: Submits the request.
        resume: Makes the call that resumes it, given a request and seconds of time.
        deadline: When the caller's time is over, on `clock`; None where it never is.
    """

    request_id: str
    start: Calls
    resume: Callable[[generation_pb2.ResumeStreamRequest, float | None], Any]
    deadline: float | None
    clock: Callable[[], float] = time.monotonic
    _sequences: dict[int, _Progress] = field(default_factory=dict)
    _lost_at: float | None = None
    _delay_s: float = _FIRST_DELAY_S
    _is_unknown: bool = False

    def accept(self, event: StreamEvent) -> bool:
        """Notes what came; returns whether it is new to the caller."""
        self._lost_at = None
        self._delay_s = _FIRST_DELAY_S
        if isinstance(event, RequestCompleted):
            return True
        progress = self._sequences.setdefault(event.sequence_index, _Progress())
        if isinstance(event, TokenChunk):
            progress.num_tokens += len(event.token_ids)
            progress.num_characters += len(event.text)
            return True
        assert isinstance(event, SequenceFinished)
        is_new, progress.is_finished = not progress.is_finished, True
        return is_new

    def delay_after(self, error: QuireError) -> float:
        """Seconds to wait before `call`. Raises the error where going on makes no sense."""
        now = self.clock()
        # A request that broke on its way in is not known to anyone.
        self._is_unknown = isinstance(error, NotFound) and not self._sequences
        if not (isinstance(error, Unavailable) or (self._is_unknown and self._lost_at is not None)):
            raise error
        self._lost_at = now if self._lost_at is None else self._lost_at
        delay_s = self._delay_s if error.retry_after_ms is None else error.retry_after_ms / 1000
        self._delay_s = min(2 * self._delay_s, _LAST_DELAY_S)
        end = self._lost_at + _GIVE_UP_AFTER_S
        if now + delay_s > (end if self.deadline is None else min(end, self.deadline)):
            raise error
        return delay_s

    def call(self) -> Any:
        """The call that brings what has not come yet."""
        timeout_s = None if self.deadline is None else max(self.deadline - self.clock(), 0.0)
        if self._is_unknown:
            return self.start(timeout_s)
        request = generation_pb2.ResumeStreamRequest(request_id=self.request_id)
        for index, progress in self._sequences.items():
            request.offsets.add(
                sequence_index=index, offset=progress.num_tokens, num_characters=progress.num_characters
            )
        return self.resume(request, timeout_s)


def make_resumption(
    start: Callable[..., Any], resume: Callable[..., Any], request: Any, timeout_s: float | None
) -> Resumption:
    """For a request with an id, and the stub's methods that submit and resume it."""
    return Resumption(
        request.request_id,
        lambda left_s: start(request, timeout=left_s),
        lambda again, left_s: resume(again, timeout=left_s),
        None if timeout_s is None else time.monotonic() + timeout_s,
    )
