"""Hashes of prefixes, and the names of cached blocks, which are made from them. The scheduler finds blocks by their
names. Gateways compute the hashes too, to know which replica has most of a prompt.

A prefix ends with a full block of tokens. Its hash covers all its tokens, the tenant and the adapter: two sequences
that agree on a hash agree on everything up to the end of that block. A model with several groups of layers has one
block of memory for these tokens in each group, and each of them has a name of its own.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)
"""Name of the content of one block of memory, in one group of layers, with all that comes before it."""

PrefixHash = NewType("PrefixHash", BlockHash)
"""Hash of a prefix. It is also the name of the prefix's last block in group 0; `in_group` makes the other names."""

HASH_BYTES = 32

SALT_BYTES = 16

SHORT_BYTES = 8
"""The bytes of a hash that stand for it where a mistake costs time only: in events and digests of a cache."""


def salt_digest(salt: str) -> bytes:
    """The digest that replaces a caller's salt outside of its gateway."""
    return blake2b(salt.encode(), digest_size=SALT_BYTES, person=b"quire/salt").digest() if salt else b""


def _prefix_hash(data: bytes) -> PrefixHash:
    return PrefixHash(BlockHash(data))


def root_hash(tenant: str, adapter: bytes | None = None, salt: bytes = b"") -> PrefixHash:
    """The root hash of a tenant's sequences, with an adapter and with a `salt_digest`: sequences with different salts
    share no blocks."""
    root = _unsalted_root(tenant, adapter)
    if not salt:
        return root
    return _prefix_hash(blake2b(root + salt, digest_size=HASH_BYTES, person=b"quire/prefix/s").digest())


def _unsalted_root(tenant: str, adapter: bytes | None) -> PrefixHash:
    """The root hash of a tenant: tenants share no blocks, and cannot probe each other's computations. With the digest
    of an adapter it is the root of the tenant's sequences with this adapter, which have other keys and values."""
    if adapter is not None:
        return _prefix_hash(
            blake2b(adapter + tenant.encode(), digest_size=HASH_BYTES, person=b"quire/prefix/a").digest()
        )
    return _prefix_hash(blake2b(tenant.encode(), digest_size=HASH_BYTES, person=b"quire/prefix/1").digest())


def prefix_hash(parent: PrefixHash, token_ids: Sequence[int]) -> PrefixHash:
    """The hash of the prefix `parent` with one full block behind it."""
    return hash_chain(parent, pack(token_ids), 4 * len(token_ids))[0]


def in_group(prefix: PrefixHash, group: int) -> BlockHash:
    """The name of the prefix's last block in a group of layers. Names of different groups have different `short` forms.
    The blocks of a state are further groups, below 2^24."""
    if not group:
        return prefix
    number = int.from_bytes(prefix[-4:-1], "big") ^ group
    return BlockHash(prefix[:-4] + number.to_bytes(3, "big") + prefix[-1:])


def prefix_of(name: BlockHash, group: int) -> PrefixHash:
    """The prefix whose last block in this group has the name: undoes `in_group`."""
    return PrefixHash(in_group(PrefixHash(name), group))


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids in the form that is hashed: int32 of this machine's byte order."""
    return array("i", token_ids).tobytes()


def hash_chain(parent: PrefixHash, packed: bytes, block_bytes: int) -> list[PrefixHash]:
    """The hashes of the prefixes that end with each of the full blocks in `packed`, which follow the prefix `parent`.
    `packed` has 4 bytes a token."""
    assert len(packed) % block_bytes == 0, "only full blocks have a hash"
    hashes: list[bytes] = []
    last: bytes = parent
    for start in range(0, len(packed), block_bytes):
        # A parent has one length, so nothing else is hashed to the same bytes.
        last = blake2b(last + packed[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(last)
    return cast(list[PrefixHash], hashes)


def hashes_of(data: bytes) -> list[BlockHash]:
    """Names that follow each other in a message. Raises ValueError if the last one is not whole."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no hashes of {HASH_BYTES} bytes")
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]


def short(name: BlockHash) -> bytes:
    """The last SHORT_BYTES of a name."""
    return name[-SHORT_BYTES:]
