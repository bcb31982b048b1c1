"""Pinned prefixes: blocks kept for a prompt that is known to come (the paper's section 4.4, shared prefix).

An internal request of one token computes a pin. When it ends, the pin holds the sealed blocks, which cannot be evicted
meanwhile. A pin is a lease that decays: it holds all of its blocks for the first half of its time, and then gives them
back an eighth at a time, the end of the prefix first. Pinning the prefix again restores it.
"""

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixHashes, PrefixIndex
from scheduler_svc.core.request import (
    Adapter,
    ClientId,
    Handle,
    PinQuotaError,
    RefusedError,
    Request,
    RequestKey,
    RowSampling,
    cache_root,
)

PIN_CLIENT = ClientId(-1)
"""The client of the requests that compute pins: the scheduler itself. Gateways are numbered from 0."""

PIN_ID_BYTES = 16

_NUM_PARTS = 8
"""Maximum number of parts in which a pin gives its blocks back, over the second half of its time."""


@dataclass(slots=True, eq=False)
class Pin:
    """Whole blocks of a tenant's prefix, with its adapter. `blocks` is empty until they are computed. `hashes` are the
    hashes of the blocks that it holds, or is to hold: `num_parts` of `max_parts` are left."""

    pin_id: str
    tenant: str
    adapter: Adapter | None
    token_ids: list[int]
    hashes: list[BlockHash]
    key: RequestKey
    expires_at: float
    time_to_live: float
    max_parts: int
    num_parts: int
    blocks: list[BlockId] = field(default_factory=list[BlockId])

    @property
    def next_change(self) -> float:
        """The time at which it gives back the next part. It ends with the last part."""
        return self.expires_at - self.time_to_live / 2 * (self.num_parts - 1) / self.max_parts

    @property
    def is_held(self) -> bool:
        return bool(self.blocks)

    def request(self) -> Request:
        """The request that computes the blocks."""
        return Request(
            key=self.key,
            request_id=f"pin-{self.pin_id}",
            prompt=self.token_ids,
            sampling=RowSampling(seed=0),
            max_tokens=1,
            tenant=self.tenant,
            adapter=self.adapter,
        )


class Pins:
    """All pins of one replica, by id. The id follows from the content, so the same prefix is pinned once.

    An operation on one pin costs O(its blocks + log of the number of pins).
    """

    def __init__(self, config: SchedulerConfig, num_made: int = 0) -> None:
        """`num_made` pins were made before; no new pin gets one of their handles."""
        self._block_size = config.block_size
        self._quota = int(config.pin_quota * config.num_blocks)
        self._max_pinned = int(config.max_pinned * config.num_blocks)
        self._pins: dict[str, Pin] = {}
        self._by_key: dict[RequestKey, Pin] = {}
        self._holders: Counter[BlockId] = Counter()
        self._num_made = num_made
        self._num_blocks = 0
        self._of_tenant: dict[str, Counter[BlockHash]] = {}
        """The blocks of each tenant's pins, held or not yet, with the number of the tenant's pins that have each block.
        Tenants share no blocks. `_num_blocks` is the total number of blocks."""
        # Heaps of (time, handle). An entry is void if the pin is gone, has another time or holds nothing.
        self._changes: list[tuple[float, Handle]] = []
        self._held_ends: list[tuple[float, Handle]] = []

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def of_other_pool(self, config: SchedulerConfig) -> "Pins":
        """An empty set of pins for a pool with these limits, which continues the numbering of handles."""
        return Pins(config, self._num_made)

    @property
    def num_pinned(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self._holders)

    def held_tables(self) -> list[list[BlockId]]:
        """The blocks of each pin."""
        return [pin.blocks for pin in self._pins.values()]

    def holders(self) -> dict[BlockId, int]:
        """A copy of the number of pins that hold each pinned block."""
        return dict(self._holders)

    def of_key(self, key: RequestKey) -> Pin | None:
        return self._by_key.get(key)

    def of_tenant(self, tenant: str, pin_id: str) -> Pin | None:
        """The tenant's pin with this id. Tenants do not see each other's pins."""
        pin = self._pins.get(pin_id)
        return pin if pin is not None and pin.tenant == tenant else None

    def add(
        self,
        tenant: str,
        adapter: Adapter | None,
        token_ids: list[int],
        expires_at: float,
        time_to_live: float,
        pool: PrefixIndex,
    ) -> Pin:
        """The pin of the whole blocks of this prefix. Renews an existing pin that is still whole. Otherwise makes a new
        pin, which holds nothing yet, and replaces an old one that has given blocks back.

        Raises:
            RefusedError: the prefix fills no block.
            PinQuotaError: the tenant, or all tenants together, would pin too many blocks.
        """
        num_blocks = len(token_ids) // self._block_size
        if not num_blocks:
            raise RefusedError(f"the prefix has {len(token_ids)} tokens; it takes {self._block_size} to fill a block")
        hashes = PrefixHashes(cache_root(tenant, adapter), self._block_size).first(num_blocks, token_ids)
        pin_id = hashes[-1][:PIN_ID_BYTES].hex()
        pin = self._pins.get(pin_id)
        if pin is not None and len(pin.hashes) == num_blocks:
            pin.expires_at, pin.time_to_live, pin.num_parts = expires_at, time_to_live, pin.max_parts
            self._note_end(pin)
            return pin
        self._check_quota(tenant, hashes)
        if pin is not None:
            self.remove(pin, pool)
        self._num_made += 1
        key = RequestKey(PIN_CLIENT, Handle(self._num_made))
        whole, parts = token_ids[: num_blocks * self._block_size], min(num_blocks, _NUM_PARTS)
        pin = Pin(pin_id, tenant, adapter, whole, hashes, key, expires_at, time_to_live, parts, parts)
        self._pins[pin_id] = self._by_key[key] = pin
        blocks = self._of_tenant.setdefault(tenant, Counter())
        self._num_blocks -= len(blocks)
        blocks.update(hashes)
        self._num_blocks += len(blocks)
        self._note_end(pin)
        return pin

    def _check_quota(self, tenant: str, hashes: list[BlockHash]) -> None:
        """A prefix costs only the blocks that no pin of the tenant has, so a conversation pays only for new turns."""
        known = self._of_tenant.get(tenant, Counter())
        num_blocks, of_tenant, of_all = sum(each not in known for each in hashes), len(known), self._num_blocks
        if of_tenant + num_blocks > self._quota:
            raise PinQuotaError(
                f"the prefix has {num_blocks} new blocks and {of_tenant} are pinned already; a tenant can "
                f"pin {self._quota}"
            )
        if of_all + num_blocks > self._max_pinned:
            raise PinQuotaError(
                f"the prefix has {num_blocks} new blocks and {of_all} are pinned by all; together they can "
                f"pin {self._max_pinned}"
            )

    def hold(self, pin: Pin, pool: PrefixIndex) -> bool:
        """Adds a reference to each block that a pin still has. Returns whether all of its blocks were cached."""
        blocks = pool.hits(pin.hashes)
        if len(blocks) < len(pin.hashes):
            return False
        pool.touch(blocks)
        pin.blocks = blocks
        self._holders.update(blocks)
        # Computing them may have taken more than half of its time.
        self._cut(pin, self._num_left(pin), pool)
        self._note_end(pin)
        return True

    def remove(self, pin: Pin, pool: PrefixIndex) -> None:
        """Removes a pin. Its blocks stay cached until they are evicted."""
        del self._pins[pin.pin_id], self._by_key[pin.key]
        self._cut(pin, 0, pool)

    def decay(self, pin: Pin, now: float, pool: PrefixIndex) -> None:
        """Gives back the parts of a pin whose time is over, the end of the prefix first."""
        while pin.next_change <= now and pin.num_parts > 1:
            pin.num_parts -= 1
        if pin.is_held:
            self._cut(pin, self._num_left(pin), pool)
        self._note_end(pin)

    def _num_left(self, pin: Pin) -> int:
        """Blocks that a pin still has at this time."""
        num_blocks = len(pin.token_ids) // self._block_size
        return -(-num_blocks * pin.num_parts // pin.max_parts)

    def _cut(self, pin: Pin, num_left: int, pool: PrefixIndex) -> None:
        """Keeps the first `num_left` blocks of the pin, and gives back the others."""
        known = self._of_tenant[pin.tenant]
        for content in pin.hashes[num_left:]:
            known[content] -= 1
            if not known[content]:
                del known[content]
                self._num_blocks -= 1
        if not known:
            del self._of_tenant[pin.tenant]
        given_back = pin.blocks[num_left:]
        for block in given_back:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
        pool.free(given_back)
        del pin.hashes[num_left:], pin.blocks[num_left:]

    @property
    def next_change(self) -> float | None:
        """The time at which the next pin ends or gives back blocks; None if there is none."""
        pin = self._first(self._changes)
        return None if pin is None else pin.next_change

    def next_due(self, now: float) -> Pin | None:
        """The pin that ends or gives back blocks first, if it is time."""
        pin = self._first(self._changes)
        return pin if pin is not None and pin.next_change <= now else None

    def give_way(self, pool: PrefixIndex) -> bool:
        """Removes the pin with the earliest end that holds blocks. Returns whether there was one."""
        pin = self._first(self._held_ends)
        if pin is None:
            return False
        self.remove(pin, pool)
        return True

    def lose_blocks(self) -> list[Pin]:
        """The pool is gone. Returns the pins that held blocks, to be computed again."""
        lost = [pin for pin in self._pins.values() if pin.is_held]
        for pin in lost:
            pin.blocks = []
        self._holders.clear()
        self._held_ends.clear()
        return lost

    def _note_end(self, pin: Pin) -> None:
        """Records that the pin has another time, or holds its blocks from now on."""
        heapq.heappush(self._changes, (pin.next_change, pin.key.handle))
        if pin.is_held:
            heapq.heappush(self._held_ends, (pin.expires_at, pin.key.handle))
        if len(self._changes) > 2 * len(self._pins) + 64:
            self._changes = sorted((each.next_change, each.key.handle) for each in self._pins.values())
        if len(self._held_ends) > 2 * len(self._pins) + 64:
            held = (each for each in self._pins.values() if each.is_held)
            self._held_ends = sorted((each.expires_at, each.key.handle) for each in held)

    def _first(self, ends: list[tuple[float, Handle]]) -> Pin | None:
        """The pin of the first entry of a heap that is not void; None if all are. Drops void ones."""
        while ends:
            time, handle = ends[0]
            pin = self._by_key.get(RequestKey(PIN_CLIENT, handle))
            if pin is not None and (
                pin.next_change == time if ends is self._changes else pin.is_held and pin.expires_at == time
            ):
                return pin
            heapq.heappop(ends)
        return None
