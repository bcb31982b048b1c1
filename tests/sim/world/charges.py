"""Charges to keys: prompt tokens and generated tokens, each paid once."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from gateway.auth.quota import Account, TokenBucket, Use
from tests.sim.world.clients import Story
from tests.sim.world.oracles import FalseAnswerError
from tests.sim.world.traffic import Generate, Pin
from tests.sim.world.watch import report

_REFUSED = ("RATE_LIMIT_EXCEEDED", "CONCURRENCY_LIMIT", "QUEUE_FULL", "DURABLE_LIMIT")
_TOLERANCE = 1e-6
_MAX_CALLS = 5
"""Maximum number of calls that a client makes to pin something."""


@dataclass(slots=True)
class Charges:
    """The tokens taken from the buckets of keys, less refunds."""

    _taken: Counter[int] = field(default_factory=Counter[int])
    _buckets: list[TokenBucket] = field(default_factory=list[TokenBucket])
    """Keeps buckets alive, so that no new bucket has the identity of an old one."""

    def check(self, accounts: Iterable[Account], stories: Iterable[Story], num_gateways: int) -> None:
        """Raises FalseAnswerError unless the accounts of the tenant of these requests paid exactly for the tokens that
        it got. Call it only if nothing broke and nothing runs."""
        paid = sum(self._taken[id(account._tokens)] for account in accounts if account._tokens is not None)
        bounds = [_bounds(story, num_gateways) for story in stories]
        least, most = (sum(each) for each in zip(*bounds, strict=True)) if bounds else (0.0, 0.0)
        if not least - _TOLERANCE <= paid <= most + _TOLERANCE:
            raise FalseAnswerError(f"a key pays for {paid} tokens, not {least} to {most}")

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Records all charges inside the block."""
        take, resumed, admitted = TokenBucket.take, Account.resumed, Account.admitted

        def note(bucket: TokenBucket, amount: float, now: float) -> None:
            self._buckets.append(bucket) if id(bucket) not in self._taken else None
            self._taken[id(bucket)] += amount  # type: ignore[assignment]
            take(bucket, amount, now)
            if bucket._level > bucket.per_minute - max(amount, 0.0) + _TOLERANCE:
                report(AssertionError("a key saves up more than one minute of its rate"))

        @contextmanager
        def note_resumed(account: Account, use: Use, generated: Callable[[], float]) -> Iterator[Use]:
            bucket = account._requests
            before = self._taken[id(bucket)]
            with resumed(account, use, generated) as other:
                if bucket is not None and self._taken[id(bucket)] != before + 1:
                    report(AssertionError("a stream that is resumed does not count as a request of its key"))
                yield other

        @contextmanager
        def note_admitted(
            account: Account, num_tokens: int = 0, generated: Callable[[], float] = lambda: 0
        ) -> Iterator[Use]:
            before = dict[int, float]()
            try:
                with admitted(account, num_tokens, generated) as use:
                    try:
                        yield use
                    finally:
                        buckets = [each for each in (account._requests, account._tokens) if each is not None]
                        before = {id(each): self._taken[id(each)] for each in buckets} if use.generated() else {}
            finally:
                if any(self._taken[each] < taken - _TOLERANCE for each, taken in before.items()):
                    report(AssertionError("a request that has generated something gets back what it was charged"))

        changed = {"resumed": note_resumed, "admitted": note_admitted}
        with patch.object(TokenBucket, "take", note), patch.multiple(Account, **changed):
            yield


def _bounds(story: Story, num_gateways: int) -> tuple[float, float]:
    """The minimum and maximum cost of a request."""
    request = story.request
    has_parts = isinstance(request, Generate) and bool(request.others)
    if story.error is not None and story.error.reason in _REFUSED and not has_parts:
        return 0.0, 0.0
    if isinstance(request, Pin):
        # A pin that expires before it is computed is paid for, and pinned again.
        return 0.0, _MAX_CALLS * len(request.prompt)
    if not isinstance(request, Generate):
        return 0.0, 0.0
    options, prompt = request.options, request.num_prompt_tokens
    width = options.best_of or 1 if options.beam_search is None else options.beam_search.beam_width
    num_computed = max(width * len(request.parts), request.num_returned)
    # Two calls may read a token at two gateways before the first gateway hears of the second call.
    num_calls = 1 if request.taken_over_after_s is None or num_gateways == 1 else 1 + request.num_takeovers
    if story.has_ended and story.witness is not None:
        num_said = sum(len(each.token_ids) for each in story.witness.last.expected.sequences)
        cost = num_said * num_computed / request.num_returned
        return prompt + cost, prompt + num_calls * cost
    # A prompt is paid for once one of its tokens has arrived, whatever ended the rest.
    num_seen = 0 if story.witness is None else story.witness.last.num_tokens
    least = prompt + num_seen * num_computed / request.num_returned if num_seen and not has_parts else 0.0
    return least, prompt + num_calls * (options.max_tokens or 0) * num_computed
