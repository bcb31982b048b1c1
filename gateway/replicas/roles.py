"""Disaggregated prefill: selects the replicas that a request may go to, if some are for prefill and others for decode.

The prefill of a long prompt delays each stream on the same replica. Such a prompt goes where the total delay is
smallest: its own wait for the prompts before it, plus the delay of the streams. Prefill replicas soon lose their
streams, so they are chosen until their queue is the longer delay; a replica without streams takes prompts in any role.

A request with a long prompt leaves a prefill replica after its first token, and all other streams leave when a long
prompt arrives. Until then streams stay if the other replicas are busier, and short prompts may go there, too.
"""

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from quire.messages.replica_role import ReplicaRole


class Stage(enum.Enum):
    """The next stage of a request.

    PROMPT  prefill; it can move to another replica afterwards
    STAY    prefill and decode on one replica: it cannot move until it is over
    STREAM  decode
    """

    PROMPT = enum.auto()
    STAY = enum.auto()
    STREAM = enum.auto()


@dataclass(slots=True)
class Work:
    """The work of one replica for this gateway.

    Attributes:
        prompts: The number of uncached prompt tokens of each request in prefill, by handle.
        num_prompt_tokens: The sum of `prompts`.
        streams: The handles of requests that have output tokens.
    """

    prompts: dict[int, int] = field(default_factory=dict[int, int])
    num_prompt_tokens: int = 0
    streams: set[int] = field(default_factory=set[int])

    @property
    def num_requests(self) -> int:
        return len(self.prompts) + len(self.streams)

    def add_prompt(self, handle: int, num_new_tokens: int) -> None:
        self.remove(handle)
        self.prompts[handle] = num_new_tokens
        self.num_prompt_tokens += num_new_tokens

    def add_stream(self, handle: int) -> None:
        """Adds a request that has output tokens; it may be in `prompts` until now."""
        self.remove(handle)
        self.streams.add(handle)

    def remove(self, handle: int) -> None:
        """Removes a request. Idempotent."""
        self.num_prompt_tokens -= self.prompts.pop(handle, 0)
        self.streams.discard(handle)


@dataclass(frozen=True, slots=True)
class Place:
    """A replica with its role, its work, and the number of tokens of a prompt that it would have to compute."""

    role: ReplicaRole
    work: Work
    num_new_tokens: int


def narrowed(places: Mapping[str, Place], stage: Stage, long_prompt: int) -> Collection[str]:
    """The addresses of the replicas that suit the stage, at least one. Cached prefix and load decide among them.

    Args:
        places: The replicas that can take the request. Not empty.
        long_prompt: The number of uncached tokens from which a prompt is long.
    """
    for_streams = [address for address, place in places.items() if place.role is not ReplicaRole.PREFILL]
    if not for_streams or all(place.role is ReplicaRole.BOTH for place in places.values()):
        return places.keys()
    if stage is Stage.STAY:
        return for_streams
    if stage is Stage.PROMPT and min(places[each].num_new_tokens for each in for_streams) >= long_prompt:
        costs = {address: (_delay(place), _ORDER.index(place.role)) for address, place in places.items()}
        least = min(costs.values())
        return [address for address, cost in costs.items() if cost == least]
    streams = [places[each].work for each in for_streams]
    idle = [each for each, place in places.items() if each not in for_streams and has_room(place.work, streams)]
    return [*for_streams, *idle]


_ORDER = (ReplicaRole.PREFILL, ReplicaRole.BOTH, ReplicaRole.DECODE)


def _delay(place: Place) -> int:
    """The total delay of a prompt and of the streams that it delays, in tokens that are computed first."""
    num_streams = 0 if place.role is ReplicaRole.PREFILL else len(place.work.streams)
    return place.work.num_prompt_tokens + place.num_new_tokens * (1 + num_streams)


def has_room(work: Work, others: Iterable[Work]) -> bool:
    """Whether a prefill replica may have a stream for now: it has no prompts, and all others have more streams."""
    return not work.num_prompt_tokens and len(work.streams) < min(len(other.streams) for other in others)
