"""Prefix-aware routing: a request goes to the replica that has most of its prompt cached, unless that is too busy.

Schedulers report the blocks in their prefix caches (`CachedBlocks`), and the gateway hashes the blocks of a prompt in
the same way (`quire.messages.prefix_hashes`). A block on a replica's disk is worth a little less than a block in its
pool. If replicas have the same part of a prompt, or no replica has any, affinity decides: rendezvous hashing sends
prompts with the same next blocks to the same replica. No replica may have much more than its fair share of requests.

If some replicas are for prefill and others for decode, roles narrow the choice first (`narrowed`). The prefill of a
long prompt delays each stream on the same replica. Such a prompt goes where the total delay is smallest: its own wait
for the prompts before it, plus the delay of the streams. Prefill replicas soon lose their streams, so they are chosen
until their queue is the longer delay; a replica without streams takes prompts in any role.

A request with a long prompt leaves a prefill replica after its first token, and all other streams leave when a long
prompt arrives. Until then streams stay if the other replicas are busier, and short prompts may go there, too.
"""

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.replicas.cache_messages import CachedBlocks, Found
from quire.messages.prefix_hashes import PrefixHash, hash_chain, root_hash
from quire.messages.replica_role import ReplicaRole

# Prompts that share this number of blocks after the cached ones go to the same replica. A larger number would separate
# requests that share fewer blocks.
_AFFINITY_BLOCKS = 4
# Maximum live requests of a replica, as a multiple of its fair share (consistent hashing with bounded loads).
_HEADROOM = 1.25
# Bounds of a request's weight, relative to the mean request, for any expected length.
_LEAST_WEIGHT, _MOST_WEIGHT = 0.25, 4.0
# Maximum blocks of a prompt that are looked up, which bounds the time of a call to a few milliseconds.
_MAX_HASHED_BLOCKS = 4096

Prompt = NDArray[np.int32]


class RoutingPolicy(enum.Enum):
    """The way in which a gateway chooses among its replicas.

    CACHE        the replica with most of the prompt cached; among equals by affinity
    AFFINITY     by the first blocks of the prompt, independent of the caches
    ROUND_ROBIN  in turn, independent of prompt and load
    """

    CACHE = "cache"
    AFFINITY = "affinity"
    ROUND_ROBIN = "round-robin"


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


_NOTHING = Found(0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can take the request: its load from this gateway (see `loads_of`), its cached blocks (None if
    unknown), its role and its work."""

    load: float
    block_size: int
    cached: CachedBlocks | None = None
    role: ReplicaRole = ReplicaRole.BOTH
    work: Work = field(default_factory=Work)


class Choice(NamedTuple):
    """The chosen replica's address, and the number of prompt tokens that it is not known to have cached."""

    replica: str
    num_new_tokens: int


class Router:
    """Chooses replicas by one policy."""

    def __init__(self, policy: RoutingPolicy, long_prompt: int = 256) -> None:
        """`long_prompt` is the number of uncached tokens from which a prompt goes to prefill replicas."""
        self.policy = policy
        self.long_prompt = long_prompt
        self._turns = count()

    def choose(
        self,
        prompt: Prompt,
        tenant: str,
        candidates: Mapping[str, Candidate],
        adapter: bytes | None = None,
        salt: bytes = b"",
        stage: Stage = Stage.PROMPT,
    ) -> Choice:
        """Chooses the replica for a prompt of token ids. `adapter` and `salt` are digests; `candidates` are by address,
        at least one."""
        found = self._find(prompt, tenant, candidates, adapter, salt)
        num_new = {address: len(prompt) - found.get(address, _NOTHING).num_cached for address in candidates}
        chosen = narrowed(candidates, num_new, stage, self.long_prompt)
        if len(chosen) < len(candidates):
            candidates = {address: candidates[address] for address in chosen}
            found = {address: each for address, each in found.items() if address in candidates}
        match self.policy:
            case RoutingPolicy.ROUND_ROBIN:
                addresses = sorted(candidates)
                replica = addresses[next(self._turns) % len(addresses)]
            case RoutingPolicy.AFFINITY | RoutingPolicy.CACHE:
                replica = _by_prefix(prompt, candidates, adapter, found)
        return Choice(replica, num_new[replica])

    def _find(
        self,
        prompt: Prompt,
        tenant: str,
        candidates: Mapping[str, Candidate],
        adapter: bytes | None,
        salt: bytes,
    ) -> dict[str, Found]:
        """The cached prefix at each replica, in tokens; empty if no replica is known to have cached blocks."""
        if self.policy is not RoutingPolicy.CACHE or not any(each.cached for each in candidates.values()):
            return {}
        sizes = {each.block_size for each in candidates.values()}
        chains = {size: prompt_hashes(prompt, tenant, size, adapter, salt) for size in sizes}
        found = {
            address: _NOTHING if each.cached is None else each.cached.find(chains[each.block_size])
            for address, each in candidates.items()
        }
        return {
            address: Found(*(candidates[address].block_size * num for num in each)) for address, each in found.items()
        }


def _by_prefix(
    prompt: Prompt, candidates: Mapping[str, Candidate], adapter: bytes | None, found: Mapping[str, Found]
) -> str:
    block_size = min(each.block_size for each in candidates.values())
    num_keyed = _AFFINITY_BLOCKS
    if found:
        num_cached = max(each.num_cached for each in found.values()) // block_size
        num_left = len(prompt) // block_size - num_cached
        # If only a short end of the prompt is not cached, no other prompt shares that end. The key then covers the
        # cached part, so that a prefix stays at one replica even if other replicas have it, too.
        num_keyed = num_cached + _AFFINITY_BLOCKS if num_left >= _AFFINITY_BLOCKS else num_cached or _AFFINITY_BLOCKS
    key = affinity_key(prompt, block_size, num_keyed) + (adapter or b"")
    worth = {address: each.worth for address, each in found.items()}
    return choose_replica(key, {address: each.load for address, each in candidates.items()}, worth)


def prompt_hashes(
    prompt: Prompt, tenant: str, block_size: int, adapter: bytes | None = None, salt: bytes = b""
) -> list[PrefixHash]:
    """The hashes of a prompt's full blocks, as its scheduler computes them."""
    num_blocks = min(len(prompt) // block_size, _MAX_HASHED_BLOCKS)
    packed = np.ascontiguousarray(prompt[: num_blocks * block_size], np.int32).tobytes()
    return hash_chain(root_hash(tenant, adapter, salt), packed, 4 * block_size)


def affinity_key(prompt: Prompt, block_size: int, num_blocks: int = _AFFINITY_BLOCKS) -> bytes:
    """A key that prompts with the same first blocks share. The key of a prompt below one block covers all of it."""
    num_tokens = len(prompt)
    whole_blocks = min(num_tokens // block_size, num_blocks)
    end = whole_blocks * block_size if whole_blocks else num_tokens
    return blake2b(prompt[:end].astype("<i4").tobytes(), digest_size=16).digest()


def loads_of(num_live: Mapping[str, int], expected_tokens: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """The load of each replica, in requests. A request counts as one; if its caller gave an expected length, it counts
    as that length relative to the mean of all expected lengths, within bounds.

    Args:
        num_live: The number of live requests of each replica.
        expected_tokens: The expected remaining tokens of the requests that have such a hint; each is positive.
    """
    hints = [tokens for each in expected_tokens.values() for tokens in each]
    if not hints:
        return dict(num_live)
    mean = sum(hints) / len(hints)
    extra = {
        address: sum(min(max(tokens / mean, _LEAST_WEIGHT), _MOST_WEIGHT) - 1 for tokens in each)
        for address, each in expected_tokens.items()
    }
    return {address: num + extra.get(address, 0.0) for address, num in num_live.items()}


def choose_replica(key: bytes, loads: Mapping[str, float], cached_tokens: Mapping[str, float] | None = None) -> str:
    """The replica with the longest cached prefix among replicas that have room; among equals the first by rendezvous
    hashing. When a replica joins or leaves, only the keys that it gains or loses move.

    Args:
        key: From `affinity_key`.
        loads: The load of each replica that can take the request, in live requests. Not empty.
        cached_tokens: The cached tokens of the prompt at each replica, weighted by `worth`; None if unknown.
    """
    capacity = math.ceil(_HEADROOM * (sum(loads.values()) + 1) / len(loads))
    with_room = [replica for replica, load in loads.items() if load < capacity]
    most = max((cached_tokens[replica] for replica in with_room), default=0) if cached_tokens else 0
    best = [replica for replica in with_room if not cached_tokens or cached_tokens[replica] == most]
    return min(best, key=lambda replica: blake2b(replica.encode(), key=key, digest_size=8).digest())


def narrowed(
    candidates: Mapping[str, Candidate], num_new: Mapping[str, int], stage: Stage, long_prompt: int
) -> Collection[str]:
    """The addresses of the replicas that suit the stage, at least one. Cached prefix and load decide among them.

    Args:
        candidates: The replicas that can take the request. Not empty.
        num_new: The number of tokens of the prompt that each of them would have to compute.
        long_prompt: The number of uncached tokens from which a prompt is long.
    """
    for_streams = [address for address, each in candidates.items() if each.role is not ReplicaRole.PREFILL]
    if not for_streams or all(each.role is ReplicaRole.BOTH for each in candidates.values()):
        return candidates.keys()
    if stage is Stage.STAY:
        return for_streams
    if stage is Stage.PROMPT and min(num_new[each] for each in for_streams) >= long_prompt:
        costs = {
            address: (_delay(each, num_new[address]), _ORDER.index(each.role)) for address, each in candidates.items()
        }
        least = min(costs.values())
        return [address for address, cost in costs.items() if cost == least]
    streams = [candidates[each].work for each in for_streams]
    idle = [at for at, each in candidates.items() if at not in for_streams and has_room(each.work, streams)]
    return [*for_streams, *idle]


_ORDER = (ReplicaRole.PREFILL, ReplicaRole.BOTH, ReplicaRole.DECODE)


def _delay(replica: Candidate, num_new_tokens: int) -> int:
    """The total delay of a prompt and of the streams that it delays, in tokens that are computed first."""
    num_streams = 0 if replica.role is ReplicaRole.PREFILL else len(replica.work.streams)
    return replica.work.num_prompt_tokens + num_new_tokens * (1 + num_streams)


def has_room(work: Work, others: Iterable[Work]) -> bool:
    """Whether a prefill replica may have a stream for now: it has no prompts, and all others have more streams."""
    return not work.num_prompt_tokens and len(work.streams) < min(len(other.streams) for other in others)
