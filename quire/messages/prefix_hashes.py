"""Hashes that name full blocks of tokens. The scheduler finds cached blocks by them. Gateways compute them
too, to know which replica has most of a prompt.

A block's hash covers its tokens, all tokens before it, the tenant and the adapter. Two sequences that agree on a hash
agree on everything up to the end of that block.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType, cast

BlockHash = NewType("BlockHash", bytes)
"""Name of a block's content and of all that comes before it."""

HASH_BYTES = 32

SALT_BYTES = 16

SHORT_BYTES = 8
"""The bytes of a hash that stand for it where a mistake costs time only: in events and digests of a cache."""


def salt_digest(salt: str) -> bytes:
    """The digest that replaces a caller's salt outside of its gateway."""
    return blake2b(salt.encode(), digest_size=SALT_BYTES, person=b"quire/salt").digest() if salt else b""


def root_hash(tenant: str, adapter: bytes | None = None, salt: bytes = b"") -> BlockHash:
    """The root hash of a tenant's sequences, with an adapter and with a `salt_digest`: sequences with different salts
    share no blocks."""
    root = _unsalted_root(tenant, adapter)
    if not salt:
        return root
    return BlockHash(blake2b(root + salt, digest_size=HASH_BYTES, person=b"quire/prefix/s").digest())


def _unsalted_root(tenant: str, adapter: bytes | None) -> BlockHash:
    """The root hash of a tenant: tenants share no blocks, and cannot probe each other's computations. With the digest
    of an adapter it is the root of the tenant's sequences with this adapter, which have other keys and values."""
    if adapter is not None:
        return BlockHash(blake2b(adapter + tenant.encode(), digest_size=HASH_BYTES, person=b"quire/prefix/a").digest())
    return BlockHash(blake2b(tenant.encode(), digest_size=HASH_BYTES, person=b"quire/prefix/1").digest())


def block_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """The hash of a full block behind the prefix `parent`."""
    return hash_chain(parent, pack(token_ids), 4 * len(token_ids))[0]


def in_group(content: BlockHash, group: int) -> BlockHash:
    """The name of a block of the same tokens in another group of layers, whose `short` form is another, too; a
    `block_hash` names the block of group 0. The blocks of a state are further groups, below 2^24."""
    if not group:
        return content
    number = int.from_bytes(content[-4:-1], "big") ^ group
    return BlockHash(content[:-4] + number.to_bytes(3, "big") + content[-1:])


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids in the form that is hashed: int32 of this machine's byte order."""
    return array("i", token_ids).tobytes()


def hash_chain(parent: BlockHash, packed: bytes, block_bytes: int) -> list[BlockHash]:
    """The hashes of consecutive full blocks behind the prefix `parent`; `packed` has 4 bytes a token."""
    assert len(packed) % block_bytes == 0, "only full blocks have a hash"
    hashes: list[bytes] = []
    last: bytes = parent
    for start in range(0, len(packed), block_bytes):
        # A parent has one length, so nothing else is hashed to the same bytes.
        last = blake2b(last + packed[start : start + block_bytes], digest_size=HASH_BYTES).digest()
        hashes.append(last)
    return cast(list[BlockHash], hashes)


def hashes_of(data: bytes) -> list[BlockHash]:
    """Hashes that follow each other in a message. Raises ValueError where the last one is not whole."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are no hashes of {HASH_BYTES} bytes")
    return [BlockHash(data[start : start + HASH_BYTES]) for start in range(0, len(data), HASH_BYTES)]


def short(content: BlockHash) -> bytes:
    """The last SHORT_BYTES of a hash."""
    return content[-SHORT_BYTES:]
