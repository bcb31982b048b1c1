"""Invariants of every answer and of every refusal, whatever breaks."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.client import (
    Generation,
    PinnedPrefix,
    PositionLogprobs,
    RequestCompleted,
    SequenceFinished,
    StreamEvent,
    TokenChunk,
    Tokenization,
    Usage,
)
from quire.client.retries import Continue
from quire.gateway.v1.generation_pb2 import HeldSequence
from quire.rpc.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
)
from tests.sim.world.gateways import character_of
from tests.sim.world.reference import Answer, ExpectedSequence, answer_of
from tests.sim.world.traffic import TENANT, Generate, Pin, Request, Tokenize, Verb
from tests.support.logprobs import Line

_TOLERANCE = 1e-4
_PATIENCE_S = 30.0
"""Less than the time for which clients try to continue durable streams."""


class FalseAnswerError(AssertionError):
    """An answer differs from the undisturbed one, or a refusal has no reason in this world."""


@dataclass(slots=True)
class _Said:
    """The output of one sequence so far."""

    num_tokens: int = 0
    text: str = ""
    is_finished: bool = False


@dataclass(slots=True)
class Witness:
    """Compares what a client sees with the undisturbed answer, event by event."""

    request: Generate
    expected: Answer
    num_events: int = 0
    is_complete: bool = False
    usage: Usage | None = None
    _said: dict[int, _Said] = field(default_factory=dict[int, _Said])

    @classmethod
    def of(cls, request: Generate, model: int) -> "Witness":
        return cls(request, answer_of(request, model))

    def resumed(self) -> "Witness":
        """A witness of a call that continues from here. It sees the ends of sequences once more."""
        said = {index: _Said(each.num_tokens, each.text) for index, each in self._said.items()}
        return Witness(self.request, self.expected, _said=said)

    @property
    def offsets(self) -> list[tuple[int, int, int]]:
        """Index, number of tokens and number of characters of each sequence that has output."""
        return [(index, each.num_tokens, len(each.text)) for index, each in self._said.items()]

    @property
    def num_tokens(self) -> int:
        return sum(said.num_tokens for said in self._said.values())

    def event(self, event: StreamEvent) -> None:
        """The next event of a stream."""
        self.num_events += 1
        self._demand(not self.is_complete, "an event comes after the last one")
        match event:
            case TokenChunk():
                self._chunk(event)
            case SequenceFinished():
                said, expected = self._of(event.sequence_index)
                self._demand(event.num_tokens == said.num_tokens, f"{event} after {said.num_tokens} tokens")
                self._demand(said.text == expected.text, f"it ends with {said.text!r}, not {expected.text!r}")
                self._ending(event, expected)
                said.is_finished = True
            case RequestCompleted():
                self._demand(len(self._said) == self.request.num_returned, "a sequence has said nothing")
                self._demand(all(said.is_finished for said in self._said.values()), "it completes before a sequence")
                self._completion(event.request_id, event.usage, event.prompt_logprobs)

    def generation(self, answer: Generation) -> None:
        """A whole answer."""
        self._demand([each.index for each in answer.sequences] == [*range(self.request.num_returned)], "wrong indices")
        for each in answer.sequences:
            said, expected = self._of(each.index)
            self._demand(each.token_ids == expected.token_ids, f"says {each.token_ids}, not {expected.token_ids}")
            self._demand(each.text == expected.text, f"says {each.text!r}, not {expected.text!r}")
            self._lines(each.token_ids, each.logprobs, expected.lines, self.request.options.logprobs)
            self._ending(each, expected)
            said.num_tokens = len(each.token_ids)
        self._completion(answer.request_id, answer.usage, answer.prompt_logprobs)

    def _chunk(self, chunk: TokenChunk) -> None:
        said, expected = self._of(chunk.sequence_index)
        start, end = said.num_tokens, said.num_tokens + len(chunk.token_ids)
        self._demand(chunk.offset == start, f"a chunk starts at {chunk.offset}, not at {start}")
        self._demand(
            chunk.token_ids == expected.token_ids[start:end],
            f"says {chunk.token_ids} at {start}, not {expected.token_ids[start:end]}",
        )
        said.num_tokens, said.text = end, said.text + chunk.text
        self._demand(expected.text.startswith(said.text), f"says {said.text!r}, not {expected.text!r}")
        self._lines(chunk.token_ids, chunk.logprobs, expected.lines[start:end], self.request.options.logprobs)

    def _ending(self, ending: "SequenceFinished | object", expected: ExpectedSequence) -> None:
        seen = tuple(getattr(ending, name) for name in ("finish_reason", "stop_string", "stop_token_id"))
        wanted = (expected.finish_reason, expected.stop_string, expected.stop_token_id)
        self._demand(seen == wanted, f"ends by {seen}, not {wanted}")
        count = getattr(ending, "num_tokens", len(expected.token_ids))
        self._demand(count == len(expected.token_ids), f"has {count} tokens, not {len(expected.token_ids)}")
        if self.request.options.logprobs is not None or self.request.chooses:
            summed = getattr(ending, "cumulative_logprob", None)
            close = summed is not None and abs(summed - expected.cumulative_logprob) < _TOLERANCE
            self._demand(close, f"its log probability is {summed}, not {expected.cumulative_logprob}")

    def _completion(self, request_id: str, usage: Usage, prompt: Sequence[PositionLogprobs]) -> None:
        self.is_complete, self.usage = True, usage
        self._demand(request_id == self.request.request_id, f"it is {request_id}")
        self._demand(usage.prompt_tokens == len(self.request.prompt), f"{usage} of {len(self.request.prompt)} tokens")
        # All of the prompt may be cached if the request continues elsewhere after some tokens.
        self._demand(usage.cached_tokens <= usage.prompt_tokens, f"{usage} has more cached than there is")
        counts = self.expected.num_generated
        self._demand(counts is None or usage.generated_tokens in counts, f"{usage}, not {counts} tokens")
        start = self.request.options.prompt_logprobs_start or 1
        self._lines(
            self.request.prompt[start:], prompt, self.expected.prompt_lines, self.request.options.prompt_logprobs
        )

    def _lines(
        self, token_ids: Sequence[int], seen: Sequence[PositionLogprobs], expected: Sequence[Line], count: int | None
    ) -> None:
        if count is None:
            self._demand(not seen, "it has log probabilities")
            return
        self._demand(len(seen) == len(token_ids), f"{len(seen)} log probabilities of {len(token_ids)} tokens")
        for token_id, each, line in zip(token_ids, seen, expected, strict=True):
            chosen = (each.chosen.token_id, each.chosen.logprob, each.chosen.rank)
            self._demand(chosen == (token_id, line.logprob, line.rank), f"{chosen} is not {line} of {token_id}")
            top = [(position.token_id, position.logprob) for position in each.top]
            wanted = [*zip(line.top_token_ids, line.top_logprobs, strict=True)]
            self._demand(top == wanted, f"{top} are not {wanted}")

    def _of(self, index: int) -> tuple[_Said, ExpectedSequence]:
        self._demand(index < self.request.num_returned, f"there is no sequence {index}")
        said = self._said.setdefault(index, _Said())
        self._demand(not said.is_finished, f"sequence {index} goes on after its end")
        return said, self.expected.sequences[index]

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise FalseAnswerError(f"{self.request.request_id}: {otherwise}")


@dataclass(slots=True)
class Testimony:
    """The answer to a request as its client sees it, which must come from one of the world's models.

    Attributes:
        witnesses: Witnesses of the models that the answer may come from.
        may_mix: Whether the client has submitted its tokens again when no process knew their model any more.
    """

    witnesses: list[Witness]
    origin: "Testimony | None" = None
    may_mix: bool = False

    @classmethod
    def of(cls, request: Generate, models: Sequence[int]) -> "Testimony":
        return cls([Witness.of(request, model) for model in models])

    def resumed(self) -> "Testimony":
        """The testimony of a call that continues from here."""
        return Testimony([witness.resumed() for witness in self.witnesses], origin=self)

    def watched(self, go_on: Continue) -> Continue:
        """Submits the request again, and records that."""

        def submit(held: Sequence[HeldSequence], left_s: float | None) -> Any:
            self.may_mix = True
            return go_on(held, left_s)

        return submit

    @property
    def last(self) -> Witness:
        """A witness of a model that the answer may come from."""
        return self.witnesses[0]

    def event(self, event: StreamEvent) -> None:
        """The next event of a stream."""
        self.demand(lambda witness: witness.event(event))
        self.last.is_complete |= isinstance(event, RequestCompleted)

    def generation(self, answer: Generation) -> None:
        """A whole answer."""
        self.demand(lambda witness: witness.generation(answer))

    def demand(self, check: Callable[[Any], None]) -> None:
        """Checks new output against each model that the answer may come from."""
        errors: list[FalseAnswerError] = []
        believed: list[Witness] = []
        for witness in self.witnesses:
            try:
                check(witness)
            except FalseAnswerError as error:
                errors.append(error)
            else:
                believed.append(witness)
        if not believed and not (self.may_mix or (self.origin is not None and self.origin.may_mix)):
            raise errors[-1]
        self.witnesses = believed or self.witnesses


def check_tokens(request: Tokenize, answer: Tokenization) -> None:
    """Checks that a text has one token for each character."""
    spelled = tuple(character_of(token_id) for token_id in request.prompt)
    if answer.token_ids != request.prompt or answer.tokens != spelled:
        raise FalseAnswerError(f"the tokens of text {request.number} are {answer}")


def check_pin(request: Pin, pin: PinnedPrefix, block_sizes: Collection[int]) -> None:
    """Checks that a pin holds the whole blocks of its prefix, in one of these block sizes."""
    whole = [(len(request.prompt) // size, len(request.prompt) // size * size) for size in block_sizes]
    if (pin.pinned_blocks, pin.pinned_tokens) not in whole:
        raise FalseAnswerError(f"pin {request.number} of {len(request.prompt)} tokens: {pin}")


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Causes for which a call may fail in a world.

    Attributes:
        block_sizes: Block sizes of all workers.
        has_short_queue, has_few_durable: Whether a scheduler refuses waiting requests, or durable ones.
        trouble_s: Total duration of faults.
        may_fail_loads, may_be_slow: Whether some adapters cannot be loaded, or some preparations take too long.
        may_glitch: Whether a device may compute non-finite values.
        models: The numbers of the models that workers have.
        may_lose_model: Whether at some time no replica may have the model that all workers start with.
        may_mix_models: Whether a client may have to continue from its tokens with another model.
        deadly: The position of a token whose computation kills a worker, by the seed of its request.
        deadly_need: The adapter or the pattern of a constraint that kills each worker that prepares it.
        may_hang: Whether a step of a worker may take longer than its limit.
        may_cut: Whether a connection between a client and a gateway may end early.
    """

    block_sizes: tuple[int, ...]
    has_faults: bool
    has_short_queue: bool
    has_few_durable: bool
    trouble_s: float
    may_glitch: bool = False
    may_fail_loads: bool = False
    may_be_slow: bool = False
    models: tuple[int, ...] = (0,)
    may_lose_model: bool = False
    may_mix_models: bool = False
    deadly: Mapping[int, int] = field(default_factory=dict[int, int])
    deadly_need: str | None = None
    may_hang: bool = True
    may_cut: bool = False

    def check_refusal(self, request: Request, error: QuireError, witness: Witness | None = None) -> None:
        """Checks that a call fails only because of its client's wishes, the limits of its key, or faults. Full queues
        refuse no request that has begun, as its witness has seen: its client waits for a place. One prompt of a call
        with several may be refused while another one has begun."""
        is_one = not (isinstance(request, Generate) and request.others)
        has_begun = is_one and witness is not None and witness.num_events > 0 and self.trouble_s <= _PATIENCE_S
        is_full = error.reason in ("QUEUE_FULL", "DURABLE_LIMIT")
        if (has_begun and is_full) or not any(self._reasons(request, error)):
            raise FalseAnswerError(f"{request} fails by {type(error).__name__} {error.reason}: {error}") from error

    @property
    def may_wait(self) -> bool:
        """Whether calls may wait for processes that are away, and not only for their turn."""
        return bool(self.has_faults or self.deadly or self.deadly_need)

    def check_takeover(self, request: Generate, error: QuireError) -> None:
        """Checks why a call that resumes a stream fails: the stream does not exist, is over, or is taken back."""
        may_be_late = self.may_wait and isinstance(error, DeadlineExceeded)
        if not isinstance(error, NotFound | Aborted) and not may_be_late:
            self.check_refusal(replace(request, verb=Verb.STREAM), error)

    def _reasons(self, request: Request, error: QuireError) -> Iterable[bool]:
        limits, generate = TENANT[request.tenant], request if isinstance(request, Generate) else None
        is_limited = generate is not None and generate.timeout_s is not None
        is_cancelled = generate is not None and generate.cancels_after_s is not None
        is_durable = generate is not None and generate.verb.is_durable
        is_taken_over = generate is not None and generate.taken_over_after_s is not None
        returns = generate is not None and generate.returns_after is not None
        match error:
            case InvalidArgument():
                yield isinstance(request, Pin) and len(request.prompt) < max(self.block_sizes)
            case DeadlineExceeded():
                yield is_limited
            case Aborted(reason="REQUEST_TAKEN_OVER"):
                yield is_taken_over
            case Cancelled():
                yield is_cancelled
            case ResourceExhausted(reason="RATE_LIMIT_EXCEEDED"):
                yield limits.requests_per_minute is not None or limits.tokens_per_minute is not None
            case ResourceExhausted(reason="QUEUE_FULL"):
                yield self.has_short_queue
            case ResourceExhausted(reason="DURABLE_LIMIT"):
                # A call that took the stream over gets this error, too.
                yield self.has_few_durable and (is_durable or is_taken_over or returns)
            case ResourceExhausted(reason="PIN_QUOTA"):
                yield isinstance(request, Pin)
            case ResourceExhausted(reason="CONCURRENCY_LIMIT"):
                yield limits.max_concurrent_requests is not None
            case Unavailable(reason="PIN_LOST"):
                # The pin expired before its blocks were computed, or made way for a request that needs them.
                yield True
            case Unavailable(reason="MODEL_CHANGED"):
                # No other model continues an output that began with the model that a worker had for a while.
                yield self.may_lose_model or "weights 0 and" not in str(error)
            case Unavailable():
                # A durable stream outlives failures that are shorter than its client's patience.
                yield self.has_faults and (not is_durable or is_limited or self.trouble_s > _PATIENCE_S)
            case _ if error.reason == "ADAPTER_NOT_LOADED":
                yield self.may_fail_loads and generate is not None and generate.adapter is not None
            case _ if error.reason == "ADAPTER_TIMEOUT":
                may_be_late = self.may_be_slow or self.has_faults
                yield may_be_late and generate is not None and generate.adapter is not None
            case _ if error.reason == "CONSTRAINT_TIMEOUT":
                yield self.may_be_slow and generate is not None and generate.options.constraint is not None
            case _ if error.reason == "NON_FINITE_LOGITS":
                yield self.may_glitch
            case _ if error.reason == "WORKER_LOST":
                yield generate is not None and generate.deadly_at is not None
                yield generate is not None and self.deadly_need is not None and self.deadly_need in generate.needs
            case NotFound():
                # A choice among sequences cannot be completed if no process has a part of it any more.
                ends = generate is not None and (generate.chooses or is_cancelled or is_limited)
                yield self.has_faults and is_durable and (ends or self.trouble_s > _PATIENCE_S)
                # Over HTTP a request that all its processes have lost is not submitted again.
                yield returns and (self.has_faults or is_cancelled)
                # After a move, another gateway does not find it: its scheduler lacks the earlier log probabilities.
                yield returns and self.may_wait and generate.options.logprobs is not None
            case _:
                pass
