"""The limits of a key, and its usage at this gateway."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import NoReturn

from quire.rpc.errors import (
    AlreadyExists,
    InvalidArgument,
    QuireError,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)

# An estimate: the end of a running request is not known.
_CONCURRENCY_RETRY_MS = 1000
# The errors with which a request is rejected, here or later.
_REFUSALS = (AlreadyExists, InvalidArgument, ResourceExhausted, Unavailable)


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a key; None means no limit.

    Attributes:
        requests_per_minute: Rate of requests. Each prompt of a call, text to tokenize or prefix to pin counts as one.
        tokens_per_minute: Rate of prompt tokens and generated tokens together.
        max_concurrent_requests: Maximum number of running requests.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None


class TokenBucket:
    """A rate limit: a bucket that fills steadily, starts full, and has the capacity of one minute. Its level may be
    negative, and rises with time. The caller passes the time, in seconds of a monotonic clock.

    Attributes:
        per_minute: The rate and the capacity.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """The time until the bucket holds `amount`, which is at most `per_minute`."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Removes `amount`, even if the bucket holds less. A negative amount is given back."""
        self._fill(now)
        self._level = min(self._level - amount, self.per_minute)

    def level(self, now: float) -> float:
        """The remaining amount; negative after overuse."""
        self._fill(now)
        return self._level

    def resize(self, per_minute: int, now: float) -> None:
        """Changes the rate. The amount in use stays the same."""
        self._fill(now)
        self._level = min(self._level + per_minute - self.per_minute, per_minute)
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        passed_s = max(0.0, now - self._filled_at)
        self._level = min(self._level + passed_s * self.per_minute / 60, self.per_minute)
        self._filled_at = max(now, self._filled_at)


class Refund(Enum):
    """The refund of a rejected request: the request and the tokens of its prompt, only the prompt, or nothing."""

    ALL = auto()
    PROMPT = auto()
    NOTHING = auto()


def _refund_before_it_ran(error: QuireError) -> Refund:
    """The default refund: nothing for a caller's error, which was found by work that the rates limit."""
    return Refund.NOTHING if isinstance(error, InvalidArgument) else Refund.ALL


class Use:
    """One running request.

    Attributes:
        generated: Returns the number of generated tokens; `charged` of them are charged.
        prompt_tokens: The number of charged prompt tokens.
        refund: Returns its refund if this error ends it before its first token. Computed tokens are never refunded.
    """

    def __init__(self, generated: Callable[[], float], charged: float = 0.0) -> None:
        self.generated = generated
        self.charged = charged
        self.prompt_tokens = 0
        self.refund: Callable[[QuireError], Refund] = _refund_before_it_ran

    def uncharged(self) -> float:
        """The tokens generated since the last call; negative if `generated` returns less than before."""
        amount = self.generated() - self.charged
        self.charged += amount
        return amount


class Account:
    """Admits requests of one key, before their prompts are tokenized.

    The prompt is charged when its length is known, the output as it is generated. A running request is never ended
    because of its output: tokens beyond the limit make the level negative, and no request is admitted until it has
    recovered.

    Attributes:
        is_closed: Whether the key was revoked or has expired: running requests continue, new requests are rejected.
    """

    def __init__(
        self, limits: Limits, clock: Callable[[], float], on_refusal: Callable[[str], None] = lambda reason: None
    ) -> None:
        """`clock` returns seconds of a monotonic clock; `on_refusal` is called with the reason of each rejection."""
        self._clock = clock
        self._on_refusal = on_refusal
        self._limits = Limits()
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        # In the order of admission, since sums of fractions depend on the order.
        self._running: dict[Use, None] = {}
        self.is_closed = False
        self.change_limits(limits)

    def change_limits(self, limits: Limits) -> None:
        """Replaces the limits. The usage stays the same."""
        now = self._clock()
        self._limits = limits
        self._requests = _resized(self._requests, limits.requests_per_minute, now)
        self._tokens = _resized(self._tokens, limits.tokens_per_minute, now)

    def check(self, num_tokens: int = 1, num_requests: int = 1) -> None:
        """Checks whether `num_requests` requests with prompts of `num_tokens` together would be admitted now.

        Raises:
            Unauthenticated: the key was revoked after the call began.
            ResourceExhausted: a limit is reached. The error has a retry time, if a retry can succeed.
        """
        with self.counting_refusals():
            self._check_open()
            limit = self._limits.max_concurrent_requests
            if limit is not None and len(self._running) + num_requests > limit:
                _refuse_concurrency(f"{len(self._running)} requests of this API key run", limit, _CONCURRENCY_RETRY_MS)
            now = self._clock()
            _check_rate(self._requests, num_requests, now, "requests_per_minute")
            self._check_tokens(num_tokens, now)

    def check_call(self, num_requests: int) -> None:
        """Checks whether a call of `num_requests` concurrent requests would be admitted now.

        Raises:
            ResourceExhausted: as `check`. The error has no retry time if the call can never be admitted.
        """
        with self.counting_refusals():
            limit = self._limits.max_concurrent_requests
            if limit is not None and num_requests > limit:
                _refuse_concurrency(f"the call makes {num_requests} requests", limit, None)
            if self._requests is not None and num_requests > self._requests.per_minute:
                advice = f"the call makes {num_requests} requests at once, so it can never be admitted"
                _refuse_rate(advice, self._requests.per_minute, "requests_per_minute", None)
        self.check(num_requests=num_requests)

    def rates(self) -> Iterator[tuple[str, int, int, float]]:
        """Yields for each rate of the key, `requests` and `tokens`: its name, its limit, the remaining amount, and the
        seconds until the whole amount is available again."""
        now = self._clock()
        for use in self._running:
            self._charge(use)
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                yield (
                    name,
                    bucket.per_minute,
                    max(0, int(bucket.level(now))),
                    bucket.seconds_until(bucket.per_minute, now),
                )

    def check_resumption(self) -> None:
        """Checks whether an admitted request may be resumed now. Raises the errors of `check`."""
        with self.counting_refusals():
            self._check_open()
            _check_rate(self._requests, 1, self._clock(), "requests_per_minute")

    @contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts a QuireError that leaves the context as a rejection."""
        try:
            yield
        except QuireError as error:
            self._on_refusal(error.reason)
            raise

    @contextmanager
    def admitted(self, num_tokens: int = 0, generated: Callable[[], float] = lambda: 0) -> Iterator[Use]:
        """Counts a running request during the context. Its prompt has `num_tokens`, or is charged later by
        `charge_prompt`; `generated` returns the number of generated tokens. Raises the errors of `check`, and then
        charges nothing."""
        self.check(num_tokens)
        use = Use(generated)
        self._take(1, num_tokens)
        use.prompt_tokens = num_tokens
        self._running[use] = None
        try:
            yield use
        except _REFUSALS as error:
            refund = Refund.NOTHING if use.generated() else use.refund(error)
            if refund is not Refund.NOTHING:
                self._take(-1 if refund is Refund.ALL else 0, -use.prompt_tokens)
            raise
        finally:
            self.end(use)

    def charge_prompt(self, use: Use, num_tokens: int) -> None:
        """Charges the prompt of an admitted request. Raises ResourceExhausted if `tokens_per_minute` does not cover
        it."""
        with self.counting_refusals():
            self._check_tokens(num_tokens, self._clock())
        self._take(0, num_tokens)
        use.prompt_tokens += num_tokens

    @contextmanager
    def resumed(self, use: Use, generated: Callable[[], float]) -> Iterator[Use]:
        """Counts a resumed request during the context; `use` is replaced as by `replace`. Raises the errors of
        `check_resumption`."""
        self.check_resumption()
        self._take(1, 0)
        use = self.replace(use, generated)
        try:
            yield use
        finally:
            self.end(use)

    def replace(self, use: Use, generated: Callable[[], float]) -> Use:
        """Counts the tokens of a running request with another function, and charges or refunds the difference.
        Afterwards `end` of the old `use` has no effect."""
        self._running.pop(use, None)
        other = Use(generated, use.charged)
        self._running[other] = None
        self._charge(other)
        return other

    def end(self, use: Use) -> None:
        """Charges the uncharged tokens of the request, and stops counting it. Idempotent."""
        if use in self._running:
            del self._running[use]
            self._charge(use)

    def _check_tokens(self, num_tokens: int, now: float) -> None:
        if self._tokens is not None:
            for use in self._running:
                self._charge(use)
            _check_rate(self._tokens, num_tokens, now, "tokens_per_minute")

    def _check_open(self) -> None:
        if self.is_closed:
            raise Unauthenticated("the API key is no longer valid", reason="INVALID_API_KEY")

    def _take(self, num_requests: int, num_tokens: int) -> None:
        """Charges both buckets. Negative numbers are refunds."""
        for bucket, amount in ((self._requests, num_requests), (self._tokens, num_tokens)):
            if bucket is not None:
                bucket.take(amount, self._clock())

    def _charge(self, use: Use) -> None:
        """Charges the tokens since the last charge, or refunds tokens that were charged in excess."""
        if self._tokens is not None:
            self._tokens.take(use.uncharged(), self._clock())


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _check_rate(bucket: TokenBucket | None, amount: int, now: float, limit: str) -> None:
    """Raises ResourceExhausted if the bucket holds less than `amount`."""
    if bucket is None:
        return
    if amount > bucket.per_minute:
        _refuse_rate(f"the request needs {amount} at once, so it can never be admitted", bucket.per_minute, limit, None)
    wait_s = bucket.seconds_until(amount, now)
    if wait_s > 0:
        retry_after_ms = math.ceil(wait_s * 1000)
        _refuse_rate(f"try again in {retry_after_ms / 1000:.1f} s", bucket.per_minute, limit, retry_after_ms)


def _refuse_rate(advice: str, per_minute: int, limit: str, retry_after_ms: int | None) -> NoReturn:
    raise ResourceExhausted(
        f"this API key has {per_minute:,} {limit.replace('_', ' ')}; {advice}",
        reason="RATE_LIMIT_EXCEEDED",
        retry_after_ms=retry_after_ms,
        metadata={"limit": limit, "value": str(per_minute)},
    )


def _refuse_concurrency(fact: str, limit: int, retry_after_ms: int | None) -> NoReturn:
    raise ResourceExhausted(
        f"{fact}; this API key may run at most {limit} at once",
        reason="CONCURRENCY_LIMIT",
        retry_after_ms=retry_after_ms,
        metadata={"limit": "max_concurrent_requests", "value": str(limit)},
    )
