"""What one key has used of its limits at this gateway."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from gateway.auth.token_bucket import TokenBucket
from quire.rpc.errors import InvalidArgument, QuireError, ResourceExhausted, Unauthenticated, Unavailable

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


class Use:
    """One running request: what it has generated, and how much of that is charged."""

    def __init__(self, generated: Callable[[], float], charged: float = 0.0) -> None:
        self.generated = generated
        self.charged = charged

    def uncharged(self) -> float:
        """What came since it was asked last; below 0 where less is counted now."""
        amount = self.generated() - self.charged
        self.charged += amount
        return amount


class Account:
    """Admits requests of one key. A request that is refused, here or later, costs nothing.

    The prompt is charged when a request is admitted and its output as it is generated. A running request is never cut
    off for its output; what is generated beyond the limit is a debt, and nothing is admitted until it is paid off.
    """

    def __init__(
        self, limits: Limits, clock: Callable[[], float], on_refusal: Callable[[str], None] = lambda reason: None
    ) -> None:
        """`clock` gives seconds and never goes back; `on_refusal` gets the reason of each refusal."""
        self._clock = clock
        self._on_refusal = on_refusal
        self._limits = Limits()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._running: set[Use] = set()
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
        with self.counting_refusals():
            self._check_open()
            self._check_concurrency()
            now = self._clock()
            _check_rate(self._requests, 1, now, "requests_per_minute")
            if self._tokens is not None:
                for use in self._running:
                    self._charge(use)
                _check_rate(self._tokens, num_tokens, now, "tokens_per_minute")

    def check_call(self, num_requests: int) -> None:
        """Whether a call that makes so many requests at once can ever be admitted.

        Raises:
            ResourceExhausted: it cannot, and so does not say when to come back.
        """
        with self.counting_refusals():
            most = self._limits.max_concurrent_requests
            if most is not None and num_requests > most:
                raise ResourceExhausted(
                    f"the call makes {num_requests} requests; the most at once of this API key is {most}",
                    reason="CONCURRENCY_LIMIT",
                    metadata={"limit": "max_concurrent_requests", "value": str(most)},
                )
            if self._requests is not None and num_requests > self._requests.per_minute:
                advice = f"the call makes {num_requests} requests at once, so it can never be admitted"
                _refuse(advice, self._requests.per_minute, "requests_per_minute", None)

    def check_resumption(self) -> None:
        """Whether a request that has its place already may be read again now. Raises as `check` does."""
        with self.counting_refusals():
            self._check_open()
            _check_rate(self._requests, 1, self._clock(), "requests_per_minute")

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """While the context runs, it is checked whether the key allows something; an error that leaves it says no."""
        try:
            yield
        except QuireError as error:
            self._on_refusal(error.reason)
            raise

    @contextmanager
    def admitted(self, num_tokens: int, generated: Callable[[], float] = lambda: 0) -> Iterator[Use]:
        """A request with a prompt of that many tokens, which runs while the context does.

        Args:
            num_tokens: Tokens of the prompt.
            generated: Tells how many tokens it has generated so far.

        Raises:
            Unauthenticated, ResourceExhausted: as `check` does; nothing is charged then.
        """
        self.check(num_tokens)
        self._take(1, num_tokens)
        use = Use(generated)
        self._running.add(use)
        try:
            yield use
        except _REFUSALS:
            if not generated():
                self._take(-1, -num_tokens)
            raise
        finally:
            self.end(use)

    @contextmanager
    def resumed(self, use: Use, generated: Callable[[], float]) -> Iterator[Use]:
        """A request that has its place already, read again while the context runs; `use` becomes another, as by
        `replace`. Raises as `check_resumption` does."""
        self.check_resumption()
        self._take(1, 0)
        use = self.replace(use, generated)
        try:
            yield use
        finally:
            self.end(use)

    def replace(self, use: Use, generated: Callable[[], float]) -> Use:
        """Counts a running request otherwise from now on; the difference is charged or given back. The end of `use` has
        no effect any more."""
        self._running.discard(use)
        other = Use(generated, use.charged)
        self._running.add(other)
        self._charge(other)
        return other

    def end(self, use: Use) -> None:
        """A request is over; what it has generated is charged. Idempotent."""
        if use in self._running:
            self._running.remove(use)
            self._charge(use)

    def _check_open(self) -> None:
        if self._is_closed:
            raise Unauthenticated("the API key is not valid any more", reason="INVALID_API_KEY")

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

    def _charge(self, use: Use) -> None:
        """Charges what a request has generated since, or gives back what it was charged too much for."""
        if self._tokens is None:
            return
        amount = use.uncharged()
        if amount < 0:
            self._tokens.give_back(-amount, self._clock())
        else:
            self._tokens.take(amount, self._clock())


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
