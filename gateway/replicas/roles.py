"""Which replicas a request may go to, where some are for prompts and others for the tokens after them.

A long prompt delays each stream that runs beside it by as many tokens as are computed, so it goes where the sum of the
delays is least: that of the prompts before it, and those of the streams. Replicas for prefill have no streams for long,
so they win until their queue is the longer delay, and a replica without streams takes prompts whatever it is for.

A request with a long prompt leaves a replica for prefill with its first token, and so do all others that run there when
a long prompt comes. Until then streams stay where others are busier, and short prompts go there, too.
"""

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from quire.replica_role import ReplicaRole


class Stage(enum.Enum):
    """What a request needs next.

    PROMPT  its prompt computed; it can move to another replica after that
    STAY    the same, and it cannot move until it is over
    STREAM  tokens behind those that it has
    """

    PROMPT = enum.auto()
    STAY = enum.auto()
    STREAM = enum.auto()


@dataclass(slots=True)
class Work:
    """What one replica has to do for this gateway.

    Attributes:
        prompts: The uncached tokens of requests without a token, by handle.
        num_prompt_tokens: Their sum.
        streams: The handles of requests with tokens.
    """

    prompts: dict[int, int] = field(default_factory=dict[int, int])
    num_prompt_tokens: int = 0
    streams: set[int] = field(default_factory=set[int])

    def add_prompt(self, handle: int, num_new_tokens: int) -> None:
        self.remove(handle)
        self.prompts[handle] = num_new_tokens
        self.num_prompt_tokens += num_new_tokens

    def add_stream(self, handle: int) -> None:
        """A request that has tokens came, or got its first one."""
        self.remove(handle)
        self.streams.add(handle)

    def remove(self, handle: int) -> None:
        """Idempotent."""
        self.num_prompt_tokens -= self.prompts.pop(handle, 0)
        self.streams.discard(handle)


@dataclass(frozen=True, slots=True)
class Place:
    """A replica as roles see it: its role, its work, and how much of a prompt it would have to compute."""

    role: ReplicaRole
    work: Work
    num_new_tokens: int


def narrowed(places: Mapping[str, Place], stage: Stage, long_prompt: int) -> Collection[str]:
    """The replicas among which prefix and load decide, by address. At least one.

    Args:
        places: Those that can take the request. Not empty.
        long_prompt: The uncached tokens from which on a prompt is long.
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
    """In tokens that are computed before: the sum over the prompt and the streams that it delays."""
    num_streams = 0 if place.role is ReplicaRole.PREFILL else len(place.work.streams)
    return place.work.num_prompt_tokens + place.num_new_tokens * (1 + num_streams)


def has_room(work: Work, others: Iterable[Work]) -> bool:
    """Whether a replica for prefill takes a stream for now: it has no prompts, and the others have more streams."""
    return not work.num_prompt_tokens and len(work.streams) < min(len(other.streams) for other in others)
