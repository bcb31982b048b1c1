"""Limits of answers: their memory, and the number of log probabilities that arrive at once.

Memory is limited for one call, for the calls of one API key, and for all calls. The maximum that a call may need is a
poor estimate of its need: a default of 32,000 tokens is rarely used up. So memory is counted as tokens arrive, and if
the sum is too large, the largest call is ended. A call is refused in advance only if its own `max_tokens` is too large.

A log probability costs each process that handles it one or two microseconds. In a stream they arrive a few at a time.
For a prompt, and for sequences that are selected when all candidates have finished, they arrive at once, so their
number is limited.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gateway.replicas.generation_request import GenerationRequest
from gateway.replicas.live import LiveRequest, TokenBytes
from quire.messages.logprob_columns import POSITION_BYTES, TOP_BYTES
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FailedPrecondition, QuireError, invalid_field

# Measured: an id in one list, and a piece of text in another.
_ID_BYTES = 40
_TEXT_BYTES = 70
# The text of a token in one long text: four bytes a character while it grows.
_JOINED_TEXT_BYTES = 20
_FEWER = "ask for fewer sequences, tokens or log probabilities"
MAX_PROMPT_LOGPROBS = 1 << 20
"""The maximum number of log probabilities of all prompts of a call."""
MAX_CHOSEN_LOGPROBS = 1 << 18
"""The maximum number of log probabilities of the selected sequences of one request."""


def check_answer_size(request: GenerationRequest) -> None:
    """Raises InvalidArgument if a request asks for more log probabilities than may come at once."""
    check_prompt_logprobs(num_prompt_logprobs(request))
    if request.logprobs is None or not request.chooses:
        return
    num_sequences, max_tokens = request.sampling.n, request.stopping.max_tokens
    count = num_sequences * max_tokens * (1 + request.logprobs)
    if count > MAX_CHOSEN_LOGPROBS:
        raise invalid_field(
            "output.logprobs",
            f"is {request.logprobs}; {num_sequences:,} chosen sequences of up to {max_tokens:,} tokens would have "
            f"{count:,} log probabilities, which come at once, and at most {MAX_CHOSEN_LOGPROBS:,} may",
        )


def num_prompt_logprobs(request: GenerationRequest) -> int:
    """How many log probabilities of its prompt a request asks for."""
    if request.prompt_logprobs is None:
        return 0
    return (len(request.prompt_token_ids) - request.prompt_logprobs_start + 1) * (1 + request.prompt_logprobs)


def check_prompt_logprobs(count: int) -> None:
    """Raises InvalidArgument if a call asks for too many log probabilities of its prompts."""
    if count > MAX_PROMPT_LOGPROBS:
        raise invalid_field(
            "output.prompt_logprobs",
            f"asks for {count:,} log probabilities of prompts; a call may ask for at most {MAX_PROMPT_LOGPROBS:,}",
        )


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """The form of an answer.

    Attributes:
        is_whole: All of it is held until the end.
        bytes_per_logprob: Additional bytes per log probability while one message is made of all of them.
        repeats_text: The end of the stream repeats the whole text, which is held until then.
    """

    is_whole: bool
    bytes_per_logprob: int = 0
    repeats_text: bool = False

    @property
    def way_out(self) -> str:
        """The advice in the error if the answer is too large."""
        return f"stream the answer, or {_FEWER}" if self.is_whole else f"read the stream faster, or {_FEWER}"


STREAMED = AnswerForm(is_whole=False)
STREAMED_AND_REPEATED = AnswerForm(is_whole=False, repeats_text=True)
IN_PIECES = AnswerForm(is_whole=True)
AS_MESSAGE = AnswerForm(is_whole=True, bytes_per_logprob=64)
AS_TENSORS = AnswerForm(is_whole=True, bytes_per_logprob=160)
"""JSON inside a message."""


class CallMemory:
    """The memory of the answer to one call. If it or all answers hold too much, the call and its requests are ended."""

    def __init__(self, memory: "AnswerMemory", key: object, form: AnswerForm) -> None:
        self.key = key
        self.num_bytes = 0
        self._memory = memory
        self.form = form
        self._num_expected = 0
        self.is_closed = False
        self._error: QuireError | None = None
        self._ends: list[Callable[[QuireError], object]] = []

    def expect(self, request: GenerationRequest, asked_max_tokens: int | None) -> None:
        """Adds a request that is about to run.

        Raises:
            InvalidArgument: the requests of the call together ask for more than the answer may hold.
        """
        if asked_max_tokens is None or not self.form.is_whole:
            return
        num_bytes = request.sampling.n * asked_max_tokens * (_ID_BYTES + self._pending_bytes(request))
        self._num_expected += num_bytes
        limit = self._memory.per_call
        if self._num_expected <= limit:
            return
        name, value = "output.logprobs", request.logprobs
        if value is None:
            name, value = "stopping.max_tokens", asked_max_tokens
        raise invalid_field(
            name,
            f"is {value:,}; with {request.sampling.n:,} sequences of up to {asked_max_tokens:,} tokens the answer "
            f"to the call takes at least {shown_bytes(self._num_expected)}; one that is not streamed may take at most "
            f"{shown_bytes(limit)} (--max-answer-bytes); {self.form.way_out}",
        )

    def count(self, live: LiveRequest) -> None:
        """Starts to count the memory of a request of the call. The request fails if the call is ended."""
        request = live.request
        kept = _ID_BYTES + (self._logprob_bytes(request.logprobs) if request.durable else 0)
        kept += _JOINED_TEXT_BYTES if self.form.repeats_text else 0
        prompt = self._logprob_bytes(request.prompt_logprobs)
        live.count_memory(self.add, TokenBytes(kept, self._pending_bytes(request), prompt))
        self.when_ended(live.fail)

    def drop_all(self) -> None:
        """Forgets the requests that were counted so far: they hold nothing any more."""
        self.add(-self.num_bytes)
        self._ends.clear()

    def _pending_bytes(self, request: GenerationRequest) -> int:
        """The bytes of a token that was not sent yet: its text and its log probabilities."""
        return _TEXT_BYTES + self._logprob_bytes(request.logprobs)

    def _logprob_bytes(self, num_top: int | None) -> int:
        """The bytes of a position with this many of the most likely tokens."""
        if num_top is None:
            return 0
        return POSITION_BYTES + TOP_BYTES * num_top + self.form.bytes_per_logprob * (1 + num_top)

    def add(self, num_bytes: int) -> None:
        """Adds to the memory of the answer; negative numbers release memory. May end this call or others."""
        if not self.is_closed:
            self._memory.add(self, num_bytes)

    def when_ended(self, end: Callable[[QuireError], object]) -> None:
        """Calls `end` if the call is ended for the memory of answers."""
        self._ends.append(end)

    def raise_if_ended(self) -> None:
        """Raises FailedPrecondition if the call was ended for the memory of answers."""
        if self._error is not None:
            raise self._error

    def abort(self, error: QuireError) -> None:
        """Ends the call and its requests by an error."""
        self._error = error
        for end in self._ends:
            end(error)


@dataclass(slots=True, eq=False)
class _KeyUse:
    num_bytes: int = 0
    calls: dict[CallMemory, None] = field(default_factory=dict[CallMemory, None])


class AnswerMemory:
    """The memory of all answers of a gateway.

    If all answers together hold too much, the largest call of the key that holds most is ended. So a small call is
    never ended because of others.
    """

    def __init__(self, *, per_call: int, per_key: int, total: int) -> None:
        """The maximum bytes of the answer to one call, of all answers of one key, and of all answers."""
        self.per_call = per_call
        self._per_key = per_key
        self._total = total
        self.num_bytes = 0
        self._keys: dict[object, _KeyUse] = {}

    @contextmanager
    def call(self, key: object, form: AnswerForm) -> Generator[CallMemory]:
        """A call of a key, which lasts until its answer is written."""
        call = CallMemory(self, key, form)
        self._keys.setdefault(key, _KeyUse()).calls[call] = None
        try:
            yield call
        finally:
            self._close(call)
            # They know the call too: no garbage collection has to find that.
            call.drop_all()

    def add(self, call: CallMemory, num_bytes: int) -> None:
        """Counts bytes of an open call; ends calls if there are too many."""
        use = self._keys[call.key]
        call.num_bytes += num_bytes
        use.num_bytes += num_bytes
        self.num_bytes += num_bytes
        if num_bytes <= 0:
            return
        if call.num_bytes > self.per_call:
            self._abort(call, f"the answer holds more than {shown_bytes(self.per_call)} (--max-answer-bytes)")
        elif use.num_bytes > self._per_key:
            limit = f"{shown_bytes(self._per_key)} (--max-key-answer-bytes)"
            self._abort(_largest(use), f"answers to this API key hold more than {limit}, this one most")
        elif self.num_bytes > self._total:
            largest = max(self._keys.values(), key=lambda each: each.num_bytes)
            limit = f"{shown_bytes(self._total)} (--max-total-answer-bytes)"
            self._abort(_largest(largest), f"all answers hold more than {limit}, this one most")

    def _abort(self, call: CallMemory, reason: str) -> None:
        self._close(call)
        call.abort(FailedPrecondition(f"{reason}; {call.form.way_out}", reason="ANSWER_TOO_LARGE"))

    def _close(self, call: CallMemory) -> None:
        use = self._keys.get(call.key)
        if call.is_closed or use is None:
            return
        call.is_closed = True
        self.num_bytes -= call.num_bytes
        use.num_bytes -= call.num_bytes
        call.num_bytes = 0
        del use.calls[call]
        if not use.calls:
            del self._keys[call.key]


def _largest(use: _KeyUse) -> CallMemory:
    return max(use.calls, key=lambda call: call.num_bytes)
