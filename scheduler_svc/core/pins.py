"""Pinned prefixes: blocks kept for a prompt that is known to come (the paper's section 4.4, shared prefix).

An internal request of one token computes a pin. When it ends, the pin holds the sealed blocks, which cannot be evicted
meanwhile. A pin is a lease that decays: it holds all of its blocks for the first half of its time, and then gives them
back an eighth at a time, the end of the prefix first. Pinning the prefix again restores it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import BlockNames, PrefixHashes
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
from scheduler_svc.core.reservations import Earliest, Kind, Reservations

PIN_CLIENT = ClientId(-1)
"""The client of the requests that compute pins: the scheduler itself. Gateways are numbered from 0."""

PIN_ID_BYTES = 16

_NUM_PARTS = 8
"""Maximum number of parts in which a pin gives its blocks back, over the second half of its time."""


@dataclass(slots=True, eq=False)
class Pin:
    """Whole blocks of a tenant's prefix, with its adapter. `blocks` are the blocks of its reservation, empty until
    they are computed. `hashes` are the names of the blocks that it holds, or is to hold, at first `size` names:
    `num_parts` of `max_parts` are left."""

    pin_id: str
    tenant: str
    adapter: Adapter | None
    token_ids: list[int]
    hashes: list[BlockHash]
    size: int
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
        self._block_size, self._names = config.block_size, BlockNames(config.layout, config.state_blocks)
        # The start of a prefix has no windows and no checkpoint of its own.
        self._max_parts = 1 if config.windowed_groups or config.state_blocks else _NUM_PARTS
        self._quota = int(config.pin_quota * config.num_blocks)
        self._max_pinned = int(config.max_pinned * config.num_blocks)
        self._pins: dict[str, Pin] = {}
        self._by_key: dict[RequestKey, Pin] = {}
        self.num_made = num_made
        self._num_blocks = 0
        self._of_tenant: dict[str, Counter[BlockHash]] = {}
        """The blocks of each tenant's pins, held or not yet, with the number of the tenant's pins that have each block.
        Tenants share no blocks. `_num_blocks` is the total number of blocks."""
        self._changes: Earliest[RequestKey] = Earliest()
        self._reservations: Reservations

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def move_to(self, reservations: Reservations) -> None:
        """Reserves blocks in this table from now on. An earlier pool is gone, and no pin holds blocks."""
        self._reservations = reservations
        for pin in self:
            pin.blocks = []

    @property
    def num_pinned(self) -> int:
        """Blocks that pins hold, each counted once."""
        return len(self._reservations.holders[Kind.PIN])

    def holders(self) -> dict[BlockId, int]:
        """A copy of the number of pins that hold each pinned block."""
        return dict(self._reservations.holders[Kind.PIN])

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
        names = [name for name in self._names.needed(hashes, 0) if name is not None]
        # The request that computes it has its last checkpoint one block before its end.
        names += [name for content in hashes[-2:-1] for name in self._names.state(content)]
        pin = self._pins.get(pin_id)
        if pin is not None and len(pin.hashes) == pin.size:
            pin.expires_at, pin.time_to_live, pin.num_parts = expires_at, time_to_live, pin.max_parts
            self._set_times(pin)
            return pin
        self._check_quota(tenant, names)
        if pin is not None:
            self.remove(pin)
        self.num_made += 1
        key = RequestKey(PIN_CLIENT, Handle(self.num_made))
        whole, parts = token_ids[: num_blocks * self._block_size], min(num_blocks, self._max_parts)
        pin = Pin(pin_id, tenant, adapter, whole, names, len(names), key, expires_at, time_to_live, parts, parts)
        self._pins[pin_id] = self._by_key[key] = pin
        blocks = self._of_tenant.setdefault(tenant, Counter())
        self._num_blocks -= len(blocks)
        blocks.update(names)
        self._num_blocks += len(blocks)
        self._set_times(pin)
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

    def hold(self, pin: Pin) -> bool:
        """Adds a reference to each block that a pin still has. Returns whether all of its blocks were cached."""
        pool = self._reservations.pool
        blocks = pool.hits(pin.hashes)
        if len(blocks) < len(pin.hashes):
            return False
        pool.touch(blocks)
        pin.blocks = blocks
        self._reservations.add(Kind.PIN, pin.key, blocks, pin.expires_at)
        # Computing them may have taken more than half of its time.
        self._cut(pin, self._num_left(pin))
        return True

    def remove(self, pin: Pin) -> None:
        """Removes a pin. Its blocks stay cached until they are evicted."""
        del self._pins[pin.pin_id], self._by_key[pin.key]
        self._changes.discard(pin.key)
        self._cut(pin, 0)
        self._reservations.end(Kind.PIN, pin.key)

    def decay(self, pin: Pin, now: float) -> None:
        """Gives back the parts of a pin whose time is over, the end of the prefix first."""
        while pin.next_change <= now and pin.num_parts > 1:
            pin.num_parts -= 1
        if pin.is_held:
            self._cut(pin, self._num_left(pin))
        self._set_times(pin)

    def _num_left(self, pin: Pin) -> int:
        """Blocks that a pin still has at this time."""
        return -(-pin.size * pin.num_parts // pin.max_parts)

    def _cut(self, pin: Pin, num_left: int) -> None:
        """Keeps the first `num_left` blocks of the pin, and gives back the others."""
        known = self._of_tenant[pin.tenant]
        for content in pin.hashes[num_left:]:
            known[content] -= 1
            if not known[content]:
                del known[content]
                self._num_blocks -= 1
        if not known:
            del self._of_tenant[pin.tenant]
        del pin.hashes[num_left:]
        self._reservations.truncate(Kind.PIN, pin.key, num_left)

    @property
    def next_change(self) -> float | None:
        """The time at which the next pin ends or gives back blocks; None if there is none."""
        key = self._changes.first()
        return None if key is None else self._by_key[key].next_change

    def next_due(self, now: float) -> Pin | None:
        """The pin that ends or gives back blocks first, if it is time."""
        key = self._changes.first()
        return self._by_key[key] if key is not None and self._by_key[key].next_change <= now else None

    def _set_times(self, pin: Pin) -> None:
        """The pin has another end, or gives back its next part at another time."""
        self._changes.put(pin.key, pin.next_change)
        self._reservations.renew(Kind.PIN, pin.key, pin.expires_at)
