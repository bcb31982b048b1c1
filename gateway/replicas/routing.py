"""Which replica takes a request: the one that has most of its prompt cached, unless it is much busier than others.

Schedulers tell which blocks their prefix caches hold (`CachedBlocks`), and a prompt's blocks have the same names here
(`quire.prefix_hashes`). Blocks on the disk of a replica are worth a little less than those in its pool. What replicas
have alike, or none of them has, is decided by affinity: prompts that go on alike go to the same replica, by rendezvous
hashing. No replica may have much more than its fair share of requests.

Where replicas have roles, these come first: see `roles`.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gateway.replicas.events import CacheUpdate
from gateway.replicas.roles import Place, Stage, Work, narrowed
from quire.prefix_hashes import BlockHash, hash_chain, root_hash, short
from quire.replica_role import ReplicaRole

# Prompts that agree on this many blocks behind what is cached go to the same replica. With more, requests that share
# less would be separated.
_AFFINITY_BLOCKS = 4
# A replica may have this many times its fair share of live requests (consistent hashing with bounded loads).
_HEADROOM = 1.25
# A request weighs between these shares of the mean one, however long its caller expects it to be.
_LEAST_WEIGHT, _MOST_WEIGHT = 0.25, 4.0
# What a block on disk saves, of that in the pool: between the two, the first token of a long prompt was 0.98 of the way
# from computed to cached where the disk was fast (docs/kv.md).
_WORTH_ON_DISK = 0.9
# More blocks of a prompt are not looked for; bounds the time of a call to a few milliseconds.
_MAX_HASHED_BLOCKS = 4096

Prompt = NDArray[np.int32]


class RoutingPolicy(enum.Enum):
    """How a gateway chooses among its replicas.

    CACHE        the one with most of the prompt cached; of equals by affinity
    AFFINITY     by the first blocks of the prompt, whatever is cached
    ROUND_ROBIN  one after the other, whatever the prompt and the load
    """

    CACHE = "cache"
    AFFINITY = "affinity"
    ROUND_ROBIN = "round-robin"


class Found(NamedTuple):
    """How much of a prompt's beginning a replica has, in blocks or tokens, and how much of that only on disk."""

    num_cached: int
    num_on_disk: int = 0

    @property
    def worth(self) -> float:
        """As so much in the pool."""
        return self.num_cached - (1 - _WORTH_ON_DISK) * self.num_on_disk


_NOTHING = Found(0)


class CachedBlocks:
    """What a replica's prefix cache and its disks hold, as its scheduler tells: the ends of the blocks' hashes. Of
    large pools it tells a part, those whose hash ends in some zero bits, so that no more than some 65,536 are told."""

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()
        self._on_disk: set[bytes] = set()
        self._mask = 0

    def __len__(self) -> int:
        return len(self._blocks) + len(self._on_disk)

    def update(self, update: CacheUpdate) -> None:
        """Takes in what changed."""
        if update.is_cleared:
            self._blocks.clear()
            self._on_disk.clear()
        self._mask = (1 << update.sampling_bits) - 1
        self._blocks.difference_update(update.removed)
        self._blocks.update(update.stored)
        self._on_disk.difference_update(update.disk_removed)
        self._on_disk.update(update.disk_stored)

    def find(self, hashes: Sequence[BlockHash]) -> Found:
        """How many of a prompt's first blocks are there. If only a part is told, the last of these that is known."""
        blocks, mask = self._blocks, self._mask
        num_cached = num_on_disk = 0
        for index, content in enumerate(hashes, 1):
            if content[-1] & mask:
                continue
            if (name := short(content)) not in blocks:
                if name not in self._on_disk:
                    break
                num_on_disk += index - num_cached
            num_cached = index
        return Found(num_cached, num_on_disk)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that can take the request: its live requests here (see `loads_of`), what it has cached, None if that is
    unknown, what it is for and what it does."""

    load: float
    block_size: int
    cached: CachedBlocks | None = None
    role: ReplicaRole = ReplicaRole.BOTH
    work: Work = field(default_factory=Work)


class Choice(NamedTuple):
    """A replica by its address, and how many tokens of the prompt it has yet to compute, as far as that is known."""

    replica: str
    num_new_tokens: int


class Router:
    """Chooses replicas by one policy."""

    def __init__(self, policy: RoutingPolicy, long_prompt: int = 256) -> None:
        """`long_prompt`: the uncached tokens from which on a prompt goes to replicas for prefill."""
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
        """The replica for a prompt of token ids, of a request with the adapter and the salt of these digests.
        `candidates` has at least one, by address."""
        found = self._find(prompt, tenant, candidates, adapter, salt)
        places = {
            address: Place(each.role, each.work, len(prompt) - found.get(address, _NOTHING).num_cached)
            for address, each in candidates.items()
        }
        chosen = narrowed(places, stage, self.long_prompt)
        if len(chosen) < len(candidates):
            candidates = {address: candidates[address] for address in chosen}
            found = {address: each for address, each in found.items() if address in candidates}
        match self.policy:
            case RoutingPolicy.ROUND_ROBIN:
                addresses = sorted(candidates)
                replica = addresses[next(self._turns) % len(addresses)]
            case RoutingPolicy.AFFINITY | RoutingPolicy.CACHE:
                replica = _by_prefix(prompt, candidates, adapter, found)
        return Choice(replica, places[replica].num_new_tokens)

    def _find(
        self,
        prompt: Prompt,
        tenant: str,
        candidates: Mapping[str, Candidate],
        adapter: bytes | None,
        salt: bytes,
    ) -> dict[str, Found]:
        """How many of the first tokens each has; nothing where no replica is known to have anything."""
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
        # Of a prompt that is cached but for a little, that little is its own: what is cached decides, so that a prefix
        # stays at one replica though another one has it, too.
        num_keyed = num_cached + _AFFINITY_BLOCKS if num_left >= _AFFINITY_BLOCKS else num_cached or _AFFINITY_BLOCKS
    key = affinity_key(prompt, block_size, num_keyed) + (adapter or b"")
    worth = {address: each.worth for address, each in found.items()}
    return choose_replica(key, {address: each.load for address, each in candidates.items()}, worth)


def prompt_hashes(
    prompt: Prompt, tenant: str, block_size: int, adapter: bytes | None = None, salt: bytes = b""
) -> list[BlockHash]:
    """The names of a prompt's full blocks, as its scheduler computes them."""
    num_blocks = min(len(prompt) // block_size, _MAX_HASHED_BLOCKS)
    packed = np.ascontiguousarray(prompt[: num_blocks * block_size], np.int32).tobytes()
    return hash_chain(root_hash(tenant, adapter, salt), packed, 4 * block_size)


def affinity_key(prompt: Prompt, block_size: int, num_blocks: int = _AFFINITY_BLOCKS) -> bytes:
    """A key that prompts with the same first blocks share. A prompt of less than one block is its own key."""
    num_tokens = len(prompt)
    whole_blocks = min(num_tokens // block_size, num_blocks)
    end = whole_blocks * block_size if whole_blocks else num_tokens
    return blake2b(prompt[:end].astype("<i4").tobytes(), digest_size=16).digest()


def loads_of(num_live: Mapping[str, int], expected_tokens: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """How busy each replica is, in requests. A request counts as one, or if its caller said how long it will be, as its
    share of the mean of all that did.

    Args:
        num_live: The number of live requests of each replica.
        expected_tokens: The tokens that are yet to come of those that have such a hint; each is positive.
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
    """Among the replicas with room the one that has most cached; of equals the best by rendezvous hashing. When a
    replica joins or leaves, only the keys that it gains or loses move.

    Args:
        key: From `affinity_key`.
        loads: How busy each replica that can take the request is, in live requests. Not empty.
        cached_tokens: How many tokens of the prompt each has, by their worth; None if that is unknown.
    """
    capacity = math.ceil(_HEADROOM * (sum(loads.values()) + 1) / len(loads))
    with_room = [replica for replica, load in loads.items() if load < capacity]
    most = max((cached_tokens[replica] for replica in with_room), default=0) if cached_tokens else 0
    best = [replica for replica in with_room if not cached_tokens or cached_tokens[replica] == most]
    return min(best, key=lambda replica: blake2b(replica.encode(), key=key, digest_size=8).digest())
