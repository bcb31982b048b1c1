"""When a client calls again by itself: what gRPC does for every client, and what a RetryPolicy adds to it."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from quire.client.timing import CallTime
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.rpc.errors import QuireError, ResourceExhausted, Unavailable

_GENERATION: ServiceDescriptor = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
_IDEMPOTENT: tuple[ServiceDescriptor | MethodDescriptor, ...] = (
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"],
    *(_GENERATION.methods_by_name[name] for name in ("Cancel", "Tokenize", "Detokenize")),
)
"""Services and methods that may be called twice, as the protos say."""

# gRPC says in words alone that it found nobody to send a call to; tests call ports where nobody listens.
_NOBODY_REACHED = ("failed to connect to all addresses", "connections to all backends failing")
# Calls in a row that reach nobody, after which it is the address that is wrong, or all gateways are down.
_MOST_IN_VAIN = 5

RESUME_FOR_S = 30.0
"""How long a durable stream that was lost tries to go on where no policy says so."""

# Of waits that grow, those who were refused together come back apart.
_JITTER = 0.25


def service_config(*, spread: bool) -> dict[str, Any]:
    """How gRPC spreads calls over addresses, and which calls it makes again where the connection was lost.

    The gateways' health is left out of it: one whose worker restarts is not healthy, and takes requests all the same.

    Args:
        spread: Whether there may be several addresses. Where there is one, gRPC connects when it is called: a gateway
            that has just come back is called at once, and not when the wait after the last refusal is over.
    """
    return {
        "loadBalancingConfig": [{"round_robin": {}} if spread else {"pick_first": {}}],
        "methodConfig": [
            {
                "name": [_name(each) for each in _IDEMPOTENT],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        # Gateways that fail most calls are not called four times as often.
        "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.1},
    }


def _name(each: ServiceDescriptor | MethodDescriptor) -> dict[str, str]:
    if isinstance(each, ServiceDescriptor):
        return {"service": each.full_name}
    return {"service": each.containing_service.full_name, "method": each.name}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """When a client calls again: where a gateway refuses and says when to come back (RESOURCE_EXHAUSTED with
    RetryInfo), where UNAVAILABLE ends a call that may be made twice, and where it reached no gateway, but not five
    times in a row. A stream is started again only while nothing of it has come.

    Between two calls it waits as long as the gateway says, or else `first_delay_s`, twice as long each time up to
    `last_delay_s`, and up to a quarter more. It never waits beyond the call's `timeout_s`.

    Attributes:
        attempts: Most calls in all; None is as many as the call's time allows.
        first_delay_s: Before the second call.
        last_delay_s: The longest that it waits of its own accord.
        lost_generations: Whether generations are made again after UNAVAILABLE, too, where a gateway may have been at
            one: the model may then work twice, and without a seed the two differ; the caller sees one. Durable streams
            do without it.
        resume_for_s: How long a durable stream that was lost tries to go on. A server that starts anew takes as long as
            its model takes to load.
    """

    attempts: int | None = 5
    first_delay_s: float = 0.1
    last_delay_s: float = 5.0
    lost_generations: bool = False
    resume_for_s: float = RESUME_FOR_S

    def __post_init__(self) -> None:
        """Raises ValueError for what is no policy."""
        if self.attempts is not None and self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}; the least value is 1")
        if not 0 < self.first_delay_s <= self.last_delay_s:
            raise ValueError(
                f"first_delay_s is {self.first_delay_s} and last_delay_s {self.last_delay_s}; "
                "expected seconds above 0, the last one not below the first"
            )
        if not self.resume_for_s >= 0:
            raise ValueError(f"resume_for_s is {self.resume_for_s}; expected seconds of at least 0")


@dataclass(slots=True)
class Attempts:
    """The calls made for one call of a client's method.

    Attributes:
        policy: None never calls again.
        time: Of all of them together.
        is_idempotent: Whether the call may be made again where the first one may have been served.
        draw: A number in [0, 1).
    """

    policy: RetryPolicy | None
    time: CallTime
    is_idempotent: bool
    draw: Callable[[], float] = random.random
    _made: int = field(default=1, init=False)
    _in_vain: int = field(default=0, init=False)

    def delay_after(self, error: QuireError) -> float:
        """Seconds to wait before the next call. Raises the error where there is none."""
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
        is_safe = self.is_idempotent or policy.lost_generations or 0 < self._in_vain < _MOST_IN_VAIN
        return isinstance(error, Unavailable) and is_safe
