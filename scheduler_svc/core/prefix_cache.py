"""Names of prefixes: a block's hash covers its tokens, all tokens before it, and whose they are.

Two sequences that agree on a hash agree on everything up to the end of that block, so they can share the block (the
paper's section 4.4, shared prefix). Hashes are computed here only and never taken from a client.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import cast

from scheduler_svc.core.block import BlockHash

HASH_BYTES = 32


def root_hash(tenant: str) -> BlockHash:
    """What a tenant's prefixes start from: tenants share nothing, and cannot probe what others computed."""
    return BlockHash(blake2b(tenant.encode(), digest_size=HASH_BYTES, person=b"quire/prefix/1").digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block behind the prefix `parent`."""
    return BlockHash(_chained(parent, array("i", token_ids).tobytes()))


def _chained(parent: bytes, packed: bytes) -> bytes:
    # A parent has one length, so nothing else is hashed to the same bytes.
    return blake2b(parent + packed, digest_size=HASH_BYTES).digest()


class PrefixHashes:
    """The hashes of a sequence's full blocks, computed once each, when they are first asked for."""

    def __init__(self, tenant: str, block_size: int) -> None:
        self._hashes: list[BlockHash] = []
        self._parent: bytes = root_hash(tenant)
        self._block_size = block_size

    def first(self, count: int, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of the first `count` blocks, all of which `token_ids` fills."""
        self._compute(count, token_ids)
        return self._hashes[:count]

    def between(self, first: int, end: int, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of the blocks from `first` to before `end`, likewise."""
        self._compute(end, token_ids)
        return self._hashes[first:end]

    def _compute(self, count: int, token_ids: Sequence[int]) -> None:
        known = len(self._hashes)
        if known >= count:
            return
        packed = array("i", token_ids[known * self._block_size : count * self._block_size]).tobytes()
        block_bytes = 4 * self._block_size
        assert len(packed) == (count - known) * block_bytes, "only full blocks have a hash"
        parent, hashes = self._parent, cast(list[bytes], self._hashes)
        for start in range(0, len(packed), block_bytes):
            parent = _chained(parent, packed[start : start + block_bytes])
            hashes.append(parent)
        self._parent = parent

    def copy(self) -> "PrefixHashes":
        """For a sequence that forks: the same so far, going its own way from here."""
        twin = object.__new__(PrefixHashes)
        twin._hashes = list(self._hashes)
        twin._parent, twin._block_size = self._parent, self._block_size
        return twin
