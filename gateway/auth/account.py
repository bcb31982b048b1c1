"""What one key has used of its limits at this gateway."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from gateway.auth.token_bucket import TokenBucket
from quire.rpc.errors import InvalidArgument, ResourceExhausted, Unauthenticated, Unavailable

# When a running request will be over is not known, so this is only an invitation to try again.
_CONCURRENCY_RETRY_MS = 1000
# By these a request is refused, as long as it has not generated anything.
_REFUSALS = (InvalidArgument, ResourceExhausted, Unavailable)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a key; None is no limit.

    Attributes:
        requests_per_minute: Requests; each prompt of a call is one, and so is a text to tokenize and a prefix to pin.
        tokens_per_minute: Tokens of prompts and of what is generated, together.
        max_concurrent_requests: Requests that run at once.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class _Use:
    """One running request: what it has generated, and how much of that is charged."""

    def __init__(self, generated: Callable[[], float]) -> None:
        self.generated = generated
        self._charged = 0.0

    def uncharged(self) -> float:
        """What came since it was asked last."""
        amount = self.generated() - self._charged
        self._charged += amount
        return amount


class Account:
    """Admits requests of one key. A request that is refused, here or later, costs nothing.

    The prompt is charged when a request is admitted and its output as it is generated. A running request is never cut
    off for its output; what is generated beyond the limit is a debt, and nothing is admitted until it is paid off.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._limits = Limits()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._running: dict[int, _Use] = {}
        self._num_admitted = 0
        self._is_closed = False
        self.change_limits(limits)

    def change_limits(self, limits: Limits) -> None:
        """Other limits from now on; what was used stays used."""
        now = self._clock()
        self._limits = limits
        self._requests = _resized(self._requests, limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)

    def close(self) -> None:
        """The key is not valid any more: what runs goes on, nothing new is admitted."""
        self._is_closed = True

    def check(self, num_tokens: int = 1) -> None:
        """Whether a request with a prompt of that many tokens would be admitted now.

        Raises:
            Unauthenticated: the key was taken away since the call began.
            ResourceExhausted: a limit is reached; where waiting helps it says how long.
        """
        if self._is_closed:
            raise Unauthenticated("the API key is not valid any more", reason="INVALID_API_KEY")
        self._check_concurrency()
        now = self._clock()
        _check_rate(self._requests, 1, now, "requests_per_minute")
        if self._tokens is not None:
            self._charge_generated(self._tokens, now)
            _check_rate(self._tokens, num_tokens, now, "tokens_per_minute")

    @contextmanager
    def admitted(self, num_tokens: int, generated: Callable[[], float] = lambda: 0) -> Iterator[None]:
        """A request with a prompt of that many tokens, which runs while the context does.

        Args:
            num_tokens: Tokens of the prompt.
            generated: Tells how many tokens it has generated so far.

        Raises:
            Unauthenticated, ResourceExhausted: as `check` does; nothing is charged then.
        """
        self.check(num_tokens)
        self._take(1, num_tokens)
        use, number = _Use(generated), self._num_admitted
        self._running[number] = use
        self._num_admitted += 1
        try:
            yield
        except _REFUSALS:
            if not generated():
                self._take(-1, -num_tokens)
            raise
        finally:
            del self._running[number]
            if self._tokens is not None:
                self._tokens.take(use.uncharged(), self._clock())

    def _check_concurrency(self) -> None:
        most = self._limits.max_concurrent_requests
        if most is not None and len(self._running) >= most:
            raise ResourceExhausted(
                f"{len(self._running)} requests of this API key run; the most at once is {most}",
                reason="CONCURRENCY_LIMIT",
                retry_after_ms=_CONCURRENCY_RETRY_MS,
                metadata={"limit": "max_concurrent_requests", "value": str(most)},
            )

    def _take(self, num_requests: int, num_tokens: int) -> None:
        """Charges both buckets; negative numbers give back."""
        now = self._clock()
        for bucket, amount in ((self._requests, num_requests), (self._tokens, num_tokens)):
            if bucket is None:
                continue
            if amount < 0:
                bucket.give_back(-amount, now)
            else:
                bucket.take(amount, now)

    def _charge_generated(self, tokens: TokenBucket, now: float) -> None:
        for use in self._running.values():
            tokens.take(use.uncharged(), now)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _check_rate(bucket: TokenBucket | None, amount: int, now: float, limit: str) -> None:
    """Raises ResourceExhausted where `amount` is not there now."""
    if bucket is None:
        return
    if amount > bucket.per_minute:
        _refuse(f"the request needs {amount} at once, so it can never be admitted", bucket.per_minute, limit, None)
    wait_s = bucket.seconds_until(amount, now)
    if wait_s > 0:
        retry_after_ms = math.ceil(wait_s * 1000)
        _refuse(f"come back in {retry_after_ms / 1000:.1f} s", bucket.per_minute, limit, retry_after_ms)


def _refuse(advice: str, per_minute: int, limit: str, retry_after_ms: int | None) -> NoReturn:
    raise ResourceExhausted(
        f"this API key has {per_minute:,} {limit.replace('_', ' ')}; {advice}",
        reason="RATE_LIMIT_EXCEEDED",
        retry_after_ms=retry_after_ms,
        metadata={"limit": limit, "value": str(per_minute)},
    )
