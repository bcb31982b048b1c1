"""Reservations: blocks and rows that are kept for other purposes than running and swapped requests.

One table has all of them. Each has a kind, an owner, blocks with a reference, and perhaps a time at which it ends. If
running requests lack blocks, reservations give way in one order (`Reservations.give_way`). Host blocks that a step
copies to the pool are no reservations: they are held only until that step is planned (see `HostMemory`).
"""

import enum
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler_svc.core.moves import Lease
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.request import RequestKey

Owner = Lease | RequestKey | int
"""A lease, the key of a request, or the number of a preparation."""


class Kind(enum.Enum):
    """The purpose of a reservation."""

    LEASE = enum.auto()
    """Sealed blocks that another replica may fetch, by their lease."""
    PROMISE = enum.auto()
    """Blocks and rows for a request that still runs at another replica and may move here, by the key of its offer."""
    COMING = enum.auto()
    """Rows for a request that has moved here because of a promise, while it waits for its blocks."""
    PIN = enum.auto()
    """The blocks of a pinned prefix, by the key of the request that computes it."""
    FETCH = enum.auto()
    """Blocks that workers fill with fetched content, by the number of the preparation."""
    FETCH_START = enum.auto()
    """The cached blocks that come before the fetched ones in the same request. If they were evicted, the request could
    not use the fetched blocks; or it would fetch the evicted ones next, and the fetched ones be evicted meanwhile."""

    # An enum's own hash is computed in Python, and tables by kind are read in each step.
    __hash__ = object.__hash__


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks that are kept for an owner until `expires_at`, in seconds. `num_fetched` counts the ranks that have sent
    their part of the blocks of a lease."""

    kind: Kind
    owner: Owner
    blocks: list[BlockId]
    expires_at: float
    num_fetched: int = 0


class Reservations:
    """All reservations of blocks of one pool.

    Attributes:
        holders: By kind, the number of reservations that have each block.
    """

    def __init__(self, pool: PrefixIndex) -> None:
        self.pool = pool
        self.holders: dict[Kind, Counter[BlockId]] = {kind: Counter() for kind in Kind}
        self._by_kind: dict[Kind, dict[Owner, Reservation]] = {kind: {} for kind in Kind}
        self._pin_ends: Earliest[Owner] = Earliest()

    def __getitem__(self, kind: Kind) -> Mapping[Owner, Reservation]:
        """The reservations of a kind by owner, the oldest first."""
        return self._by_kind[kind]

    def requests(self, *kinds: Kind) -> list[RequestKey]:
        return [owner for kind in kinds for owner in self._by_kind[kind] if isinstance(owner, RequestKey)]

    def tables(self, *kinds: Kind) -> list[list[BlockId]]:
        """The blocks of each reservation of these kinds."""
        return [each.blocks for kind in kinds for each in list(self._by_kind[kind].values())]

    def num_blocks(self, kind: Kind) -> int:
        """Blocks of all reservations of a kind. A block of several counts for each."""
        return sum(map(len, self.tables(kind)))

    def add(self, kind: Kind, owner: Owner, blocks: list[BlockId], expires_at: float = math.inf) -> None:
        """Keeps blocks. The caller's references and its list belong to the reservation from now on."""
        assert owner not in self._by_kind[kind], f"{owner} has a {kind.name} already"
        self._by_kind[kind][owner] = Reservation(kind, owner, blocks, expires_at)
        self.holders[kind].update(blocks)
        self.renew(kind, owner, expires_at)

    def renew(self, kind: Kind, owner: Owner, expires_at: float) -> None:
        """Gives a reservation another end. Does nothing if it is over."""
        if (known := self._by_kind[kind].get(owner)) is not None:
            known.expires_at = expires_at
            if kind is Kind.PIN:
                self._pin_ends.put(owner, expires_at)

    def truncate(self, kind: Kind, owner: Owner, num_left: int) -> None:
        """Frees the blocks behind the first `num_left`. Does nothing if the reservation is over."""
        if (known := self._by_kind[kind].get(owner)) is not None:
            freed, holders = known.blocks[num_left:], self.holders[kind]
            del known.blocks[num_left:]
            for block in freed:
                holders[block] -= 1
                if not holders[block]:
                    del holders[block]
            self.pool.free(freed)

    def end(self, kind: Kind, owner: Owner) -> None:
        """Ends a reservation. Its blocks stay cached until they are evicted. Does nothing if it is over."""
        self.truncate(kind, owner, 0)
        self._by_kind[kind].pop(owner, None)
        if kind is Kind.PIN:
            self._pin_ends.discard(owner)

    def expire_leases(self, now: float) -> None:
        for lease in [lease for lease, leased in self[Kind.LEASE].items() if leased.expires_at <= now]:
            self.end(Kind.LEASE, lease)

    def give_way(self, *, may_end_pins: bool) -> Reservation | None:
        """Ends the least important reservation, and returns it: the oldest lease; or the newest promise, whose request
        would come last; or, if pins may end, the pin with the earliest end. Returns None if there is none. Fetches
        never give way: workers write to their blocks."""
        leases, promises = self._by_kind[Kind.LEASE], self._by_kind[Kind.PROMISE]
        first = next(itertools.chain(leases.values(), reversed(promises.values())), None)
        if first is None and may_end_pins and (pin := self._pin_ends.first()) is not None:
            first = self._by_kind[Kind.PIN][pin]
        if first is not None:
            self.end(first.kind, first.owner)
        return first

    def count_fetched(self, lease: Lease) -> int:
        """Counts one more rank that has sent its part of the blocks. Returns the count; 0 if the lease is over."""
        if (leased := self._by_kind[Kind.LEASE].get(lease)) is None:
            return 0
        leased.num_fetched += 1
        return leased.num_fetched


K = TypeVar("K")


class Earliest(Generic[K]):
    """A priority queue of keys: each has a place, and the lowest place comes first. An operation costs O(log n)."""

    def __init__(self) -> None:
        self._places: dict[K, float] = {}
        # Entries whose key is gone or has another place are void.
        self._heap: list[tuple[float, K]] = []

    def put(self, key: K, place: float) -> None:
        """Gives a key its place, which replaces an earlier one."""
        self._places[key] = place
        heapq.heappush(self._heap, (place, key))
        if len(self._heap) > 2 * len(self._places) + 64:
            self._heap = sorted((place, key) for key, place in self._places.items())

    def discard(self, key: K) -> None:
        self._places.pop(key, None)

    def first(self) -> K | None:
        """The key with the lowest place; None if there is no key."""
        while self._heap:
            place, key = self._heap[0]
            if self._places.get(key) == place:
                return key
            heapq.heappop(self._heap)
        return None
