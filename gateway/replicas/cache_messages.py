"""The blocks that replicas have cached, as their schedulers report them."""

from collections.abc import Sequence
from typing import NamedTuple

from quire.messages.prefix_hashes import SHORT_BYTES, PrefixHash, short
from quire.rpc.errors import InvalidArgument
from quire.scheduler.v1 import scheduler_pb2

# The value of a block on disk, relative to a block in the pool. With a fast disk, blocks on disk saved 0.98 of the time
# to the first token that blocks in the pool saved (docs/kv.md).
_WORTH_ON_DISK = 0.9
# The sampling bits are within the last byte of a hash.
_MAX_SAMPLING_BITS = 8


class Found(NamedTuple):
    """The length of a prompt's prefix that a replica has, in blocks or tokens, and the part that is only on disk."""

    num_cached: int
    num_on_disk: int = 0

    @property
    def worth(self) -> float:
        """The equivalent length in the pool."""
        return self.num_cached - (1 - _WORTH_ON_DISK) * self.num_on_disk


class CachedBlocks:
    """The blocks in a replica's prefix cache and on its disks, by the ends of their hashes, as its scheduler reports
    them. A large pool is sampled: only hashes that end in some zero bits are reported, about 65,536 at most."""

    def __init__(self) -> None:
        self._blocks: set[bytes] = set()
        self._on_disk: set[bytes] = set()
        self._mask = 0

    def __len__(self) -> int:
        return len(self._blocks) + len(self._on_disk)

    def update(self, update: scheduler_pb2.CacheUpdate) -> None:
        """Applies changes. Raises InvalidArgument if the message is malformed."""
        if update.sampling_bits > _MAX_SAMPLING_BITS:
            raise InvalidArgument(f"cache.sampling_bits is {update.sampling_bits}; at most {_MAX_SAMPLING_BITS}")
        names = ("removed", "stored", "disk_removed", "disk_stored")
        removed, stored, disk_removed, disk_stored = (_blocks(getattr(update, name), name) for name in names)
        if update.cleared:
            self._blocks.clear()
            self._on_disk.clear()
        self._mask = (1 << update.sampling_bits) - 1
        self._blocks.difference_update(removed)
        self._blocks.update(stored)
        self._on_disk.difference_update(disk_removed)
        self._on_disk.update(disk_stored)

    def find(self, hashes: Sequence[PrefixHash]) -> Found:
        """The number of a prompt's first blocks that the replica has, up to the last reported one if it is sampled."""
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


def _blocks(joined: bytes, name: str) -> list[bytes]:
    if len(joined) % SHORT_BYTES:
        raise InvalidArgument(f"cache.{name} has {len(joined)} bytes; it must have {SHORT_BYTES} for each block")
    return [joined[start : start + SHORT_BYTES] for start in range(0, len(joined), SHORT_BYTES)]
