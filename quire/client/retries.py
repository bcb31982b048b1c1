"""Decides when a call is retried and how a lost stream is resumed. The clients wait and call.

gRPC itself retries idempotent calls for every client (`service_config` in connection.py). A RetryPolicy adds to that.
A durable stream continues after a lost connection even without a policy.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.client.types import RequestCompleted, SequenceFinished, StreamEvent, TokenChunk, ToolCallDelta
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import Aborted, AlreadyExists, Cancelled, NotFound, QuireError, ResourceExhausted, Unavailable
from quire.runtime import entropy
from quire.runtime.clock import monotonic

# Only the text of a gRPC status shows that no gateway was reached. Tests check the texts with unused ports.
_NOBODY_REACHED = ("failed to connect to all addresses", "connections to all backends failing")
# After this number of consecutive calls that reach no gateway, the address is wrong or all gateways are down.
_MAX_IN_VAIN = 5
RESUME_FOR_S = 30.0
"""Seconds for which a lost durable stream tries to continue, unless a policy sets them."""
_FIRST_RESUME_DELAY_S, _MAX_RESUME_DELAY_S = 0.05, 1.0
# Spreads the retries of clients that were refused together.
_JITTER = 0.25
_MAX_TIMEOUT_S = 1e9


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Retries a call if a gateway refuses it and says when to retry (RESOURCE_EXHAUSTED with RetryInfo), if UNAVAILABLE
    ends an idempotent call, or if the call reached no gateway, but not after five such calls in a row. A stream is
    started again only before its first event.

    Between two calls it waits as long as the gateway says; else `first_delay_s`, doubled each time up to
    `last_delay_s`, and up to a quarter more. It never waits beyond the call's `timeout_s`.

    Attributes:
        attempts: Maximum number of calls in all; None is limited only by the call's time.
        first_delay_s: Before the second call.
        last_delay_s: Maximum delay if the gateway gives none.
        lost_generations: Whether generations are also retried after UNAVAILABLE. A gateway may still run the first
            one: then the model works twice, and without a seed the two differ; the caller sees one. Durable streams
            do not need it.
        resume_for_s: Seconds for which a lost durable stream tries to continue. A server's restart takes as long as
            its model takes to load.
    """

    attempts: int | None = 5
    first_delay_s: float = 0.1
    last_delay_s: float = 5.0
    lost_generations: bool = False
    resume_for_s: float = RESUME_FOR_S

    def __post_init__(self) -> None:
        """Raises ValueError for a value out of range."""
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; the least value is 1")
        if not 0 < self.first_delay_s <= self.last_delay_s:
            raise ValueError(
                f"first_delay_s is {self.first_delay_s} and last_delay_s {self.last_delay_s}; "
                "expected seconds above 0, the last one not below the first"
            )
        if not self.resume_for_s >= 0:
            raise ValueError(f"resume_for_s is {self.resume_for_s}; expected seconds of at least 0")


@dataclass(frozen=True, slots=True)
class CallTime:
    """The maximum time of a call in all, waits included.

    Attributes:
        end: The end of its time on `clock`; None for no limit.
    """

    end: float | None
    clock: Callable[[], float] = monotonic

    @classmethod
    def of(cls, timeout_s: float | None) -> "CallTime":
        """The time from now on. Many years, which gRPC refuses, mean no limit. Raises ValueError for NaN."""
        if timeout_s is not None and math.isnan(timeout_s):
            raise ValueError("timeout_s is NaN")
        return cls(None if timeout_s is None or timeout_s > _MAX_TIMEOUT_S else monotonic() + timeout_s)

    def left_s(self) -> float | None:
        """The remaining seconds, for gRPC."""
        return None if self.end is None else max(self.end - self.clock(), 0.0)

    def allows(self, delay_s: float) -> bool:
        """Whether time remains after a wait."""
        return self.end is None or self.clock() + delay_s <= self.end


@dataclass(slots=True)
class Attempts:
    """The calls made for one call of a client's method.

    Attributes:
        policy: None never calls again.
        time: The time of all calls together.
        is_idempotent: Whether the call may be made again if the first one may have been served.
        draw: A number in [0, 1).
    """

    policy: RetryPolicy | None
    time: CallTime
    is_idempotent: bool
    draw: Callable[[], float] = entropy.fraction
    _made: int = field(default=1, init=False)
    _in_vain: int = field(default=0, init=False)

    def delay_after(self, error: QuireError) -> float:
        """Seconds to wait before the next call. Raises the error if there is no next call."""
        policy = self.policy
        self._in_vain = self._in_vain + 1 if error.message.startswith(_NOBODY_REACHED) else 0
        if policy is None or not self._may_follow(error, policy):
            raise error from None
        own_s = min(policy.first_delay_s * 2.0 ** min(self._made - 1, 60), policy.last_delay_s)
        delay_s = own_s if error.retry_after_ms is None else error.retry_after_ms / 1000
        delay_s *= 1 + _JITTER * self.draw()
        if not self.time.allows(delay_s):
            raise error from None
        self._made += 1
        return delay_s

    def _may_follow(self, error: QuireError, policy: RetryPolicy) -> bool:
        if policy.attempts is not None and self._made >= policy.attempts:
            return False
        if isinstance(error, ResourceExhausted):
            return error.retry_after_ms is not None
        is_safe = self.is_idempotent or policy.lost_generations or 0 < self._in_vain < _MAX_IN_VAIN
        return isinstance(error, Unavailable) and is_safe


Start = Callable[[float | None], Any]
"""Makes the call that submits the request, given the remaining seconds."""

Continue = Callable[[Sequence[generation_pb2.HeldSequence], float | None], Any]
"""Makes the call that submits the request anew, to continue after the received part of each sequence."""

Resume = Callable[[generation_pb2.ResumeStreamRequest, float | None], Any]
"""Makes the call that resumes the request if a scheduler still has it."""


@dataclass(slots=True)
class Recovery:
    """The calls that get one stream. This one can only be started again, before its first event.

    Attributes:
        start: Submits the request.
        attempts: The submissions of a request that is refused.
    """

    start: Start
    attempts: Attempts
    _has_begun: bool = field(default=False, init=False)

    def accept(self, event: StreamEvent) -> StreamEvent | None:
        """Records an event; returns the part of it that is new to the caller, None if nothing is."""
        self._has_begun = True
        return event

    def record_accepted(self) -> None:
        """Records that a server accepted the call that has ended. No effect here: it is not known whether the request
        ran."""

    def delay_after(self, error: QuireError) -> float:
        """Seconds to wait before `call`. Raises the error if the stream cannot continue."""
        if self._has_begun:
            raise error from None
        return self.attempts.delay_after(error)

    def call(self) -> Any:
        """The call that brings the rest; the first one brings all."""
        return self.start(self.attempts.time.left_s())


_TEXT, _REASONING = -1, -2
Characters = Counter[int]
"""The number of characters of the text, of the reasoning, and of the name and arguments of each call."""


@dataclass(slots=True)
class _Progress:
    """The received part of a sequence, and the part received again since the last restart."""

    token_ids: list[int] = field(default_factory=list[int])
    characters: Characters = field(default_factory=Characters)
    characters_again: Characters = field(default_factory=Characters)
    cumulative_logprob: float | None = None
    is_finished: bool = False

    @property
    def num_characters(self) -> int:
        return self.characters.total()

    def add(self, chunk: TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.characters += _characters_of(chunk)
        if chunk.logprobs:
            chosen = (position.chosen.logprob for position in chunk.logprobs)
            self.cumulative_logprob = sum(chosen, self.cumulative_logprob or 0.0)

    def new_part(self, chunk: TokenChunk, problem: QuireError) -> TokenChunk | None:
        """Returns the new part of a chunk that begins with tokens received before; None if nothing is new. Raises
        `problem` if the tokens differ from the earlier ones."""
        had = self.token_ids[chunk.offset :][: len(chunk.token_ids)]
        if list(chunk.token_ids[: len(had)]) != had:
            # Another answer, for example from a device that rounds differently.
            raise problem from None
        if not chunk.offset:
            self.characters_again.clear()
        characters = self.characters - self.characters_again
        self.characters_again += _characters_of(chunk)
        return None if len(had) == len(chunk.token_ids) else _without(chunk, len(had), characters)


def _characters_of(chunk: TokenChunk) -> Characters:
    of_calls = {call.index: len(call.name) + len(call.arguments) for call in chunk.tool_calls}
    return Counter({_TEXT: len(chunk.text), _REASONING: len(chunk.reasoning)} | of_calls)


def _without(chunk: TokenChunk, num_tokens: int, characters: Characters) -> TokenChunk:
    """A chunk without its first tokens and characters."""
    calls: list[ToolCallDelta] = []
    for call in chunk.tool_calls:
        if not (num_had := characters[call.index]):
            calls.append(call)
        elif rest := call.arguments[max(num_had - len(call.name), 0) :]:
            calls.append(ToolCallDelta(call.index, "", "", rest))
    return TokenChunk(
        chunk.sequence_index,
        chunk.offset + num_tokens,
        chunk.token_ids[num_tokens:],
        chunk.text[characters[_TEXT] :],
        chunk.logprobs[num_tokens:],
        chunk.reasoning[characters[_REASONING] :],
        tuple(calls),
    )


@dataclass(slots=True)
class Resumption(Recovery):
    """A durable stream, which continues after the received part: by resuming its request while a scheduler has it, else
    by submitting it anew, if possible with the tokens received so far.

    Attributes:
        request_id: The request's id.
        resume: Resumes the request.
        go_on: Submits it anew, to continue after the received tokens; None if sequences are chosen at the end, so that
            they cannot be continued. Then the whole output is generated again, and must begin with the received tokens.
        num_sequences: The number of its sequences.
    """

    request_id: str
    resume: Resume
    go_on: Continue | None
    num_sequences: int
    _sequences: dict[int, _Progress] = field(default_factory=dict[int, _Progress], init=False)
    _is_lost: bool = field(default=False, init=False)
    # The time since which no server has accepted a call.
    _lost_at: float | None = field(default=None, init=False)
    _lost_by: Unavailable | None = field(default=None, init=False)
    _delay_s: float = field(default=_FIRST_RESUME_DELAY_S, init=False)
    # Whether a scheduler may know the request.
    _is_submitted: bool = field(default=False, init=False)
    # The reason why the whole answer comes again.
    _again_after: NotFound | None = field(default=None, init=False)

    def accept(self, event: StreamEvent) -> StreamEvent | None:
        self._is_lost, self._lost_at, self._lost_by = False, None, None
        self._delay_s = _FIRST_RESUME_DELAY_S
        if isinstance(event, RequestCompleted):
            return event
        progress = self._sequences.setdefault(event.sequence_index, _Progress())
        if isinstance(event, TokenChunk):
            new: TokenChunk | None = event
            if event.offset < len(progress.token_ids) and self._again_after is not None:
                new = progress.new_part(event, self._again_after)
            if new is not None:
                progress.add(new)
            return new
        assert isinstance(event, SequenceFinished)
        is_new, progress.is_finished = not progress.is_finished, True
        return event if is_new else None

    def record_accepted(self) -> None:
        self._lost_at = None

    def delay_after(self, error: QuireError) -> float:
        if isinstance(error, ResourceExhausted):
            # The request most likely runs, so a refusal to resume it is part of the loss.
            is_of_loss = self._is_lost and error.retry_after_ms is not None
            delay_s = self._delay_of_loss(error) if is_of_loss else None
            return self.attempts.delay_after(error) if delay_s is None else delay_s
        delay_s = self._delay_of_loss(error) if self._may_go_on_after(error) else None
        if delay_s is None:
            # A caller whose time is over does not need the error that the request still runs.
            raise (self._lost_by or error if isinstance(error, AlreadyExists) else error) from None
        return delay_s

    def _may_go_on_after(self, error: QuireError) -> bool:
        """Whether there is another call to make; records its kind."""
        if isinstance(error, Cancelled) and error.reason == Cancelled.default_reason:
            # No caller cancelled it: a gateway that ends, or a proxy, has reset the call.
            error = Unavailable(error.message)
        if isinstance(error, Unavailable):
            # A request that ended since its model went is not resumed: the text would be of two models.
            has_ended = error.reason == "MODEL_CHANGED"
            self._lost_by = error
            self._is_submitted = not has_ended
            return not (has_ended and self._sequences)
        if isinstance(error, NotFound) and self._is_lost:
            # The submission was lost, or every process that had the request is gone.
            self._is_submitted = False
            self._again_after = error if self.go_on is None else None
            return True
        if isinstance(error, AlreadyExists) and self._is_lost:
            # A gateway has not noticed yet that this client is gone, or has itself submitted the request again.
            self._is_submitted = True
        elif isinstance(error, Aborted) and error.reason == "REQUEST_TAKEN_OVER" and self._is_lost:
            # Most likely by this client's previous call, whose gateway reconnected to the scheduler later.
            self._is_submitted = True
        else:
            return False
        return True

    def _delay_of_loss(self, error: QuireError) -> float | None:
        """Seconds to wait, at least the gateway's delay; None if the stream has been lost for too long."""
        time = self.attempts.time
        now = time.clock()
        self._is_lost, self._lost_at = True, now if self._lost_at is None else self._lost_at
        delay_s = max(self._delay_s, (error.retry_after_ms or 0) / 1000)
        self._delay_s = min(2 * self._delay_s, _MAX_RESUME_DELAY_S)
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
    method: Callable[..., Any],
    request: generation_pb2.GenerateStreamRequest | generation_pb2.ChatStreamRequest,
    resume_stream: Callable[..., Any] | None,
    attempts: Attempts,
) -> Recovery:
    """The recovery of the stream of `request`, sent by `method`.

    Args:
        resume_stream: The method ResumeStream for a durable stream. Its request is marked as durable here, and gets an
            id and a seed if it has none.
    """

    def start(left_s: float | None) -> Any:
        return method(request, timeout=left_s)

    if resume_stream is None:
        return Recovery(start, attempts)
    request.durable = True
    # An id that cannot be guessed, known here even if no answer came.
    request.request_id = request.request_id or f"req-{entropy.random_hex(16)}"
    sampling = request.sampling
    if not sampling.HasField("seed"):
        # Known here, so that the request can be submitted anew when no server knows it any more.
        sampling.seed = entropy.random_bits(64)
    num_sequences = sampling.n or 1
    chooses = sampling.HasField("beam_search") or sampling.best_of > num_sequences

    def go_on(held: Sequence[generation_pb2.HeldSequence], left_s: float | None) -> Any:
        again = copy.deepcopy(request)
        again.continue_from.extend(held)
        return method(again, timeout=left_s)

    def resume(again: generation_pb2.ResumeStreamRequest, left_s: float | None) -> Any:
        return resume_stream(again, timeout=left_s)

    return Resumption(start, attempts, request.request_id, resume, None if chooses else go_on, num_sequences)
