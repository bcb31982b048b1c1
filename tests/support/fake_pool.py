"""Blocks of a KV pool without keys and values: each slot holds a hash of all tokens up to it."""

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from worker_svc.device.seals import SealInventory
from worker_svc.step import CacheOperations, Int32Array

_MASK = 2**63 - 1


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
        for token_id in token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        before = self._hashes[-1] if self._hashes else 1 + int.from_bytes(self.adapter[:4], "little")
        self.token_ids.append(token_id)
        self._hashes.append((before * 6_364_136_223_846_793_005 + token_id + 1_442_695_040_888_963_407) & _MASK)

    def hashes(self, start: int, end: int) -> np.ndarray:
        """[end - start] int64."""
        return np.array(self._hashes[start:end], np.int64)


class FakePool:
    """The blocks on the device and on the host. A slot that was never written holds 0, which is never a hash."""

    def __init__(self, num_blocks: int, num_host_blocks: int, block_size: int) -> None:
        self._gpu = np.zeros((num_blocks, block_size), np.int64)
        self._host = np.zeros((num_host_blocks, block_size), np.int64)
        self._block_size = block_size

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
        """Computes the tokens of a sequence from `start` to `end`."""
        self._gpu[self._places(blocks, start, end)] = prefixes.hashes(start, end)

    def read(self, blocks: Sequence[int], end: int) -> np.ndarray:
        """Hashes that a row with these blocks finds in its slots; [end] int64."""
        num_blocks = -(-end // self._block_size)
        if num_blocks > len(blocks):
            raise IndexError(f"slot {end - 1} is in none of {len(blocks)} blocks")
        return self._gpu[list(blocks[:num_blocks])].reshape(-1)[:end]

    def check_read(self, row: int, blocks: Sequence[int], prefixes: Prefixes, end: int) -> None:
        """Checks that the row's slots hold the sequence's tokens up to `end`. ForeignBlockError if not."""
        if end:
            wrong = self.read(blocks, end) != prefixes.hashes(0, end)
            if np.count_nonzero(wrong):
                position = int(wrong.argmax())
                block = blocks[position // self._block_size]
                raise ForeignBlockError(f"row {row} reads block {block}, which does not hold its token {position}")

    def blocks(self, seals: SealInventory) -> "FakeBlocks":
        """Contents of the blocks, as bytes."""
        return FakeBlocks(self._gpu, seals)

    def _places(self, blocks: Sequence[int], start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        positions = np.arange(start, end)
        return np.array(blocks, np.int64)[positions // self._block_size], positions % self._block_size


class FakeBlocks:
    """A `worker_svc.device.seals.BlockStore` over slots, [number of blocks, block size] int64."""

    def __init__(self, slots: np.ndarray, seals: SealInventory) -> None:
        self._slots, self.seals = slots, seals
        self.block_bytes = slots[:1].nbytes

    def read(self, blocks: Int32Array) -> np.ndarray:
        return self._slots[blocks].view(np.uint8)

    def write(self, blocks: Int32Array, contents: np.ndarray) -> None:
        self._slots[blocks] = contents.copy().view(np.int64)
