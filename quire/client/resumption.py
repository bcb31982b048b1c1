"""How a stream goes on after its call failed. Streams do the waiting and calling."""

import copy
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from quire.client.calls import Streaming
from quire.client.connection import Stubs
from quire.client.retries import RESUME_FOR_S, Attempts, RetryPolicy
from quire.client.timing import CallTime
from quire.client.types import RequestCompleted, SequenceFinished, StreamEvent, TokenChunk
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import AlreadyExists, NotFound, QuireError, ResourceExhausted, Unavailable

_FIRST_DELAY_S, _LAST_DELAY_S = 0.05, 1.0

Start = Callable[[float | None], Any]
"""Makes the call that submits the request, with that many seconds of time."""

Continue = Callable[[Sequence[generation_pb2.HeldSequence], float | None], Any]
"""Makes the call that submits the request anew, to go on from what came, given what is held of each sequence."""

Resume = Callable[[generation_pb2.ResumeStreamRequest, float | None], Any]
"""Makes the call that resumes it, given a request and seconds of time."""


class Recovery(Protocol):
    """What came of one stream, and how to get the rest."""

    def accept(self, event: StreamEvent) -> bool:
        """Notes what came; returns whether it is new to the caller."""
        ...

    def delay_after(self, error: QuireError) -> float:
        """Seconds to wait before `call`. Raises the error where going on makes no sense."""
        ...

    def call(self) -> Any:
        """The call that brings what has not come yet; the first one brings all."""
        ...


@dataclass(slots=True)
class Restart:
    """A stream that can only be started again, while nothing of it has come.

    Attributes:
        start: Submits the request.
        attempts: How often.
    """

    start: Start
    attempts: Attempts
    _has_begun: bool = field(default=False, init=False)

    def accept(self, event: StreamEvent) -> bool:
        self._has_begun = True
        return True

    def delay_after(self, error: QuireError) -> float:
        if self._has_begun:
            raise error from None
        return self.attempts.delay_after(error)

    def call(self) -> Any:
        return self.start(self.attempts.time.left_s())


@dataclass(slots=True)
class _Progress:
    token_ids: list[int] = field(default_factory=list)
    num_characters: int = 0
    cumulative_logprob: float | None = None
    is_finished: bool = False


@dataclass(slots=True)
class Resumption:
    """A durable stream, which goes on from where it was: by resuming its request while a scheduler has it, else by
    submitting it anew with the tokens that came.

    Attributes:
        request_id: The request's id.
        start: Submits the request.
        resume: Resumes it.
        go_on: Submits it anew; None where its sequences are chosen at the end, so that nobody can go on from a part.
        num_sequences: How many it has.
        attempts: How often it is submitted where it is refused.
    """

    request_id: str
    start: Start
    resume: Resume
    go_on: Continue | None
    num_sequences: int
    attempts: Attempts
    _sequences: dict[int, _Progress] = field(default_factory=dict, init=False)
    _lost_at: float | None = field(default=None, init=False)
    _delay_s: float = field(default=_FIRST_DELAY_S, init=False)
    # Whether a scheduler may know the request.
    _is_submitted: bool = field(default=False, init=False)

    def accept(self, event: StreamEvent) -> bool:
        self._lost_at = None
        self._delay_s = _FIRST_DELAY_S
        if isinstance(event, RequestCompleted):
            return True
        progress = self._sequences.setdefault(event.sequence_index, _Progress())
        if isinstance(event, TokenChunk):
            progress.token_ids += event.token_ids
            progress.num_characters += len(event.text)
            if event.logprobs:
                chosen = (position.chosen.logprob for position in event.logprobs)
                progress.cumulative_logprob = sum(chosen, progress.cumulative_logprob or 0.0)
            return True
        assert isinstance(event, SequenceFinished)
        is_new, progress.is_finished = not progress.is_finished, True
        return is_new

    def delay_after(self, error: QuireError) -> float:
        if isinstance(error, ResourceExhausted):
            # The request most likely runs, so that a refusal to read it on is part of the loss.
            is_of_loss = self._lost_at is not None and error.retry_after_ms is not None
            delay_s = self._delay_of_loss(error) if is_of_loss else None
            return self.attempts.delay_after(error) if delay_s is None else delay_s
        if not self._may_go_on_after(error):
            raise error from None
        delay_s = self._delay_of_loss(error)
        if delay_s is None:
            raise error from None
        return delay_s

    def _may_go_on_after(self, error: QuireError) -> bool:
        """Whether there is another call to make, and notes which."""
        if isinstance(error, Unavailable):
            self._is_submitted = True
        elif isinstance(error, NotFound) and self._lost_at is not None:
            # It broke on its way in, or every process that had it is gone.
            self._is_submitted = False
            return self.go_on is not None or not self._sequences
        elif isinstance(error, AlreadyExists) and self._lost_at is not None:
            # A gateway has not noticed yet that this client has left it, or submitted the request again itself.
            self._is_submitted = True
        else:
            return False
        return True

    def _delay_of_loss(self, error: QuireError) -> float | None:
        """Seconds to wait, at least as long as the gateway says; None where the stream has been lost for too long."""
        time = self.attempts.time
        now = time.clock()
        self._lost_at = now if self._lost_at is None else self._lost_at
        delay_s = max(self._delay_s, (error.retry_after_ms or 0) / 1000)
        self._delay_s = min(2 * self._delay_s, _LAST_DELAY_S)
        policy = self.attempts.policy
        give_up_after_s = RESUME_FOR_S if policy is None else policy.resume_for_s
        if now + delay_s > self._lost_at + give_up_after_s or not time.allows(delay_s):
            return None
        return delay_s

    def call(self) -> Any:
        timeout_s = self.attempts.time.left_s()
        if not self._is_submitted:
            if not self._sequences or self.go_on is None:
                return self.start(timeout_s)
            return self.go_on(self._held(), timeout_s)
        request = generation_pb2.ResumeStreamRequest(request_id=self.request_id)
        for index, progress in self._sequences.items():
            request.offsets.add(
                sequence_index=index, offset=len(progress.token_ids), num_characters=progress.num_characters
            )
        return self.resume(request, timeout_s)

    def _held(self) -> list[generation_pb2.HeldSequence]:
        """What came of each sequence."""
        sequences = [self._sequences.get(index, _Progress()) for index in range(self.num_sequences)]
        return [
            generation_pb2.HeldSequence(
                token_ids=each.token_ids,
                num_characters=each.num_characters,
                cumulative_logprob=each.cumulative_logprob,
            )
            for each in sequences
        ]


def make_recovery(
    call: Streaming, stubs: Stubs, policy: RetryPolicy | None, timeout_s: float | None, *, durable: bool
) -> Recovery:
    """How a stream recovers; the request of a durable one is marked so, and has an id from here on."""
    attempts = Attempts(policy, CallTime.of(timeout_s), is_idempotent=False)
    method = call.method(stubs)

    def start(left_s: float | None) -> Any:
        return method(call.request, timeout=left_s)

    if not durable:
        return Restart(start, attempts)
    request = call.request
    request.durable = True
    # Nobody guesses it, and it is known also where no answer came.
    request.request_id = request.request_id or f"req-{secrets.token_hex(16)}"
    sampling = request.sampling
    if not sampling.HasField("seed"):
        # Known here, so that the request can be submitted anew when nobody else knows it any more.
        sampling.seed = secrets.randbits(64)
    num_sequences = sampling.n or 1
    chooses = sampling.HasField("beam_search") or sampling.best_of > num_sequences

    def go_on(held: Sequence[generation_pb2.HeldSequence], left_s: float | None) -> Any:
        again = copy.deepcopy(request)
        again.continue_from.extend(held)
        return method(again, timeout=left_s)

    return Resumption(
        request.request_id,
        start,
        lambda again, left_s: stubs.generation.ResumeStream(again, timeout=left_s),
        None if chooses else go_on,
        num_sequences,
        attempts,
    )
