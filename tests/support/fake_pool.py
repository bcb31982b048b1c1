"""Blocks of a KV pool without keys and values: a slot holds a hash of all tokens up to it, in its group of layers."""

from array import array
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from worker_svc.device.seals import SealInventory
from worker_svc.step import CacheOperations, Int32Array

_MASK = 2**63 - 1


def salt_of(group: int) -> int:
    """Turns the hash of a token into that of its slot in this group of layers, and back, by exclusive or."""
    return group * 0x9E37_79B9_7F4A_7C15 & _MASK


class BlockError(Exception):
    """A step misuses a block in a way that no check of the protocol finds: a model's output would silently be wrong."""


class ForeignBlockError(BlockError):
    """A step reads a block that does not hold what its row has computed."""


class Prefixes:
    """The tokens of one sequence, and a hash of all tokens up to each position, which the position's slot must hold. It
    depends on the digest of the adapter, if the sequence has one."""

    def __init__(self, token_ids: Iterable[int] = (), adapter: bytes = b"") -> None:
        self.adapter = adapter
        self.token_ids: list[int] = []
        self._hashes = array("q")
        self.replace(0, token_ids)

    def copy(self) -> "Prefixes":
        same = Prefixes(adapter=self.adapter)
        same.token_ids, same._hashes = self.token_ids[:], self._hashes[:]
        return same

    def replace(self, position: int, token_ids: Iterable[int]) -> None:
        """Replaces the tokens from a position on."""
        del self.token_ids[position:], self._hashes[position:]
        last = self._hashes[-1] if self._hashes else 1 + int.from_bytes(self.adapter[:4], "little")
        for token_id in token_ids:
            last = (last * 6_364_136_223_846_793_005 + token_id + 1_442_695_040_888_963_407) & _MASK
            self.token_ids.append(token_id)
            self._hashes.append(last)

    def append(self, token_id: int) -> None:
        self.replace(len(self.token_ids), (token_id,))

    def hashes(self, start: int, end: int) -> np.ndarray:
        """[end - start] int64."""
        return np.frombuffer(self._hashes[start:end], np.int64)


class FakePool:
    """The blocks on the device and on the host. A slot that was never written holds 0, which is never a hash. All slots
    of a block of a state hold the hash of the tokens that the state is of, as if it was a further group of layers."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int, groups: LayerGroups = ONE_GROUP) -> None:
        self._gpu = np.zeros((num_blocks, block_size), np.int64)
        self._host = np.zeros((num_host_blocks, block_size), np.int64)
        self._block_size, self._groups = block_size, groups

    def move(self, operations: CacheOperations) -> None:
        """Swaps out, swaps in and copies, in this order."""
        moves = (
            (self._gpu, self._host, operations.swap_out),
            (self._host, self._gpu, operations.swap_in),
            (self._gpu, self._gpu, operations.copy),
        )
        for source, destination, pairs in moves:
            destination[pairs[:, 1]] = source[pairs[:, 0]]

    def write(self, blocks: Sequence[int], prefixes: Prefixes, start: int, end: int) -> None:
        """Computes the tokens of a sequence from `start` to `end`, in all groups of layers."""
        hashes = prefixes.hashes(start, end)
        for group, places in enumerate(self._places(blocks, start, end)):
            self._gpu[places] = hashes ^ salt_of(group)

    def read(self, blocks: Sequence[int], prefixes: Prefixes, start: int, end: int) -> np.ndarray:
        """Hashes that layers find in a row's slots for its tokens from `start` to `end`; [end] int64. Where any layer
        finds another hash than the sequence's, it has that one; hashes that no layer reads are the sequence's."""
        if self._groups == ONE_GROUP:
            return self._read(blocks, 0, 0, end)
        content = prefixes.hashes(0, end)
        true = content.copy()
        for group, first in enumerate(self._firsts(start)):
            found = self._read(blocks, group, first, end)
            content[first:] = np.where(found != true[first:], found, content[first:])
        return content

    def check_read(self, row: int, blocks: Sequence[int], prefixes: Prefixes, end: int) -> None:
        """Checks that the slots that a row reads for its token at `end` hold the sequence's tokens before it.
        ForeignBlockError if not."""
        for group, first in enumerate(self._firsts(end)):
            if first >= end:
                continue
            wrong = self._read(blocks, group, first, end) != prefixes.hashes(first, end)
            if np.count_nonzero(wrong):
                position = first + int(wrong.argmax())
                block = blocks[position // self._block_size * self._groups.num_groups + group]
                raise ForeignBlockError(
                    f"row {row} reads block {block}, which does not hold its token {position} in group {group}"
                )

    def read_state(self, blocks: Sequence[int], num_tokens: int, prefixes: Prefixes) -> int:
        """The hash of the tokens that a state in these blocks is of: below 0 if it is not finite, and another hash than
        that of the first `num_tokens` tokens if any block holds another one."""
        (true,) = prefixes.hashes(num_tokens - 1, num_tokens).tolist()
        salts = np.array([salt_of(self._groups.num_groups + piece) for piece in range(len(blocks))], np.int64)
        held = self._gpu[list(blocks)] ^ salts[:, None]
        return next((each for each in held.reshape(-1).tolist() if each != true), true)

    def write_state(self, blocks: Sequence[int], content: int) -> None:
        """Writes the state of the tokens with this hash; one that is not finite if it is below 0."""
        for piece, block in enumerate(blocks):
            self._gpu[block] = content if content < 0 else content ^ salt_of(self._groups.num_groups + piece)

    def blocks(self, seals: SealInventory) -> "FakeBlocks":
        """Contents of the blocks, as bytes."""
        return FakeBlocks(self._gpu, seals)

    def _firsts(self, position: int) -> Iterator[int]:
        """The first position that the layers of each group read for the token at this position."""
        for group in range(self._groups.num_groups):
            yield 0 if group < self._groups.num_full else self._groups.first_read(position)

    def _read(self, blocks: Sequence[int], group: int, first: int, end: int) -> np.ndarray:
        """The hashes of the tokens from `first` to `end` in this group; below 0 where the slots are."""
        column = blocks if self._groups.num_groups == 1 else blocks[group :: self._groups.num_groups]
        begin, num_blocks = first // self._block_size, -(-end // self._block_size)
        if num_blocks > len(column):
            raise IndexError(f"slot {end - 1} is in none of {len(column)} blocks")
        slots = self._gpu[list(column[begin:num_blocks])].reshape(-1)
        found = slots[first - begin * self._block_size : end - begin * self._block_size]
        return found ^ salt_of(group) if group else found

    def _places(self, blocks: Sequence[int], start: int, end: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The blocks and slots of these tokens, in each group."""
        positions = np.arange(start, end)
        by_group = np.array(blocks, np.int64).reshape(-1, self._groups.num_groups)
        for group in range(self._groups.num_groups):
            yield by_group[positions // self._block_size, group], positions % self._block_size


class FakeBlocks:
    """A `worker_svc.device.seals.BlockStore` over slots, [number of blocks, block size] int64."""

    def __init__(self, slots: np.ndarray, seals: SealInventory) -> None:
        self._slots, self.seals = slots, seals
        self.block_bytes = slots[:1].nbytes

    def read(self, blocks: Int32Array) -> np.ndarray:
        return self._slots[blocks].view(np.uint8)

    def write(self, blocks: Int32Array, contents: np.ndarray) -> None:
        self._slots[blocks] = contents.copy().view(np.int64)
