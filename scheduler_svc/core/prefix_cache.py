"""Names of prefixes: a block's hash covers its tokens, all tokens before it, and whose they are.

Two sequences that agree on a hash agree on everything up to the end of that block, so they can share the block (the
paper's section 4.4, shared prefix). Hashes are computed here only and never taken from a client.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from scheduler_svc.core.block import BlockHash

HASH_BYTES = 32


def root_hash(tenant: str) -> BlockHash:
    """What a tenant's prefixes start from: tenants share nothing, and cannot probe what others computed."""
    return BlockHash(blake2b(tenant.encode(), digest_size=HASH_BYTES, person=b"quire/prefix/1").digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block behind the prefix `parent`."""
    return BlockHash(blake2b(array("i", token_ids).tobytes(), digest_size=HASH_BYTES, key=parent).digest())


class PrefixHashes:
    """The hashes of a sequence's full blocks, computed once each, as its tokens come."""

    def __init__(self, tenant: str, block_size: int) -> None:
        self._hashes: list[BlockHash] = []
        self._parent = root_hash(tenant)
        self._block_size = block_size

    def first(self, count: int, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of the first `count` blocks, all of which `token_ids` fills."""
        while len(self._hashes) < count:
            start = len(self._hashes) * self._block_size
            block = token_ids[start : start + self._block_size]
            assert len(block) == self._block_size, "only full blocks have a hash"
            self._parent = block_hash(self._parent, block)
            self._hashes.append(self._parent)
        return self._hashes[:count]

    def copy(self) -> "PrefixHashes":
        """For a sequence that forks: the same so far, going its own way from here."""
        twin = object.__new__(PrefixHashes)
        twin._hashes = list(self._hashes)
        twin._parent, twin._block_size = self._parent, self._block_size
        return twin
