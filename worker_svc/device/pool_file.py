"""A KV pool in a file in memory that outlives the worker: its blocks, and which of them are final.

`quire serve` holds such a file for each worker, and a container may have one on tmpfs. A worker that is killed then
leaves behind all blocks that were sealed, and the next one begins with them. The content is used only if a worker of
the same `KvNamespace` wrote it.

    0                    `_MAGIC`; the number of blocks, 8 bytes; a digest of the namespace and of that number, 32 bytes
    4096                 a byte for each block: 0 unless it is sealed; then their hashes
    multiples of 2 MiB   the layers

The digest is written last and erased first, so that a worker that is killed while it writes the rest leaves a file that
is worth nothing. Blocks lose their seal before they are written (`SealInventory`), and a process that is killed leaves
behind its writes, in their order.
"""

import hashlib
import json
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from quire.model_files.progress import shown_bytes
from quire.runtime.settings import ConfigurationError
from quire_kernels.host_memory import HUGE_PAGE, collapse, map_file, populate
from worker_svc.device.file_lock import open_alone
from worker_svc.device.seals import SealInventory
from worker_svc.step import HASH_BYTES

_MAGIC = b"quire-kv"
_DIGEST_BYTES = 32
_HEADER_BYTES = len(_MAGIC) + 8 + _DIGEST_BYTES
_INVENTORY_AT = 4096
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvNamespace:
    """Everything that the meaning of a block's bytes depends on: blocks of different namespaces are never mixed up.

    Attributes:
        model: fingerprint of config, tokenizer and weights, and config and weights of a draft model.
            Adapter and tenant are in the hash of each block.
        dtype, kv_dtype: of the model and of the pool.
        block_size, num_layers, num_kv_heads, head_dim, lines_per_token: the shape of a block, of one rank, without a
            draft model.
        groups: of layers, the fields of `LayerGroups`.
        rank, world_size: which part of the model.
        numerics: The causes of rounding: release, implementation of the model, quantization, kernels and their
            instruction set, torch; and the rotation of a model that has several.
        state: of layers that keep one, the fields of `StateSize`; empty if there are none.
    """

    model: tuple[str, ...]
    dtype: str
    kv_dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    lines_per_token: int
    groups: tuple[int, ...]
    rank: int
    world_size: int
    numerics: tuple[str, ...]
    state: tuple[int, ...] = ()

    def digest(self, num_blocks: int | None = None) -> bytes:
        """32 bytes; with `num_blocks`, the digest for a pool of this number of blocks."""
        text = json.dumps([asdict(self), num_blocks], sort_keys=True)
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where everything lies in the file of a pool, in bytes."""

    num_blocks: int
    layer_bytes: Sequence[int]
    """Size of each layer."""

    @property
    def layers_at(self) -> int:
        return _whole_pages(_INVENTORY_AT + self.num_blocks * (1 + HASH_BYTES))

    @property
    def num_bytes(self) -> int:
        return self.layers_at + sum(map(_whole_pages, self.layer_bytes))

    def layer(self, index: int) -> slice:
        start = self.layers_at + sum(map(_whole_pages, self.layer_bytes[:index]))
        return slice(start, start + self.layer_bytes[index])


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE


class PoolFile:
    """An open file that only this process uses while it lives."""

    def __init__(self, path: Path, namespace: KvNamespace, *, needs_huge_pages: bool = False) -> None:
        """Waits a moment for another process that uses it.

        Args:
            namespace: of the blocks that it holds or will hold.
            needs_huge_pages: another place is better for large layers, if the file gets no huge pages.

        Raises:
            ConfigurationError: it cannot be opened, or has a name and holds something else, which a pool would erase.
        """
        self._path, self._namespace, self._needs_huge_pages = path, namespace, needs_huge_pages
        self._file = open_alone(path, "--kv-cache-file")
        begin = os.pread(self._file, len(_MAGIC), 0)
        if os.fstat(self._file).st_nlink and begin != _MAGIC and any(begin):
            os.close(self._file)
            raise ConfigurationError(
                f"--kv-cache-file {path} holds something else than a KV pool; remove it, or name another file"
            )

    def close(self) -> None:
        """Gives all memory back, and lets others use the file."""
        os.ftruncate(self._file, 0)
        os.close(self._file)

    @property
    def held_bytes(self) -> int:
        """Memory that it takes."""
        return os.fstat(self._file).st_blocks * 512

    @property
    def num_held(self) -> int | None:
        """The number of blocks that the file holds; None if it holds none of its namespace."""
        header = os.pread(self._file, _HEADER_BYTES, 0)
        number = int.from_bytes(header[len(_MAGIC) : len(_MAGIC) + 8], "little")
        return number if header == _header(self._namespace, number) else None

    def map(
        self, num_blocks: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> tuple[tuple[Tensor, ...], SealInventory] | None:
        """Maps the layers of these shapes, of `num_blocks` blocks each; returns them with the inventory of the usable
        earlier blocks. If another place is better, closes the file and returns None.

        Raises:
            MemoryError: the file cannot be mapped.
            ConfigurationError: its file system has not the space.
        """
        layout = FileLayout(num_blocks, [math.prod(shape) * dtype.itemsize for shape in shapes])
        self._check_space(layout.num_bytes)
        is_held = self.num_held == num_blocks and os.fstat(self._file).st_size >= layout.num_bytes
        try:
            if not is_held:
                # All that was there is gone, the header first.
                os.ftruncate(self._file, 0)
            os.ftruncate(self._file, layout.num_bytes)
        except OSError as error:
            raise MemoryError(f"{self._path} cannot have {shown_bytes(layout.num_bytes)}: {error.strerror}") from error
        memory = map_file(self._file, layout.num_bytes)
        if not is_held:
            first = memory[layout.layer(0)]
            are_large = self._needs_huge_pages and first.nbytes >= HUGE_PAGE
            if are_large and not (populate(first, 0, HUGE_PAGE) and collapse(first, 0, HUGE_PAGE)):
                _logger.info(
                    "the KV pool ends with this worker: a file in memory gets no huge pages here, and steps would be "
                    "slower; --persistent-kv-cache on puts it there"
                )
                self.close()
                return None
            header = _header(self._namespace, num_blocks)
            os.pwrite(self._file, header[:-_DIGEST_BYTES], 0)
            os.pwrite(self._file, header[-_DIGEST_BYTES:], _HEADER_BYTES - _DIGEST_BYTES)
        inventory = memory.numpy()[_INVENTORY_AT : _INVENTORY_AT + num_blocks * (1 + HASH_BYTES)]
        seals = SealInventory(
            num_blocks, (inventory[:num_blocks], inventory[num_blocks:].reshape(num_blocks, HASH_BYTES))
        )
        layers = tuple(memory[layout.layer(index)].view(dtype).view(*shape) for index, shape in enumerate(shapes))
        if is_held:
            _logger.info("%d of %d blocks are final since before", len(seals.snapshot().block_ids), num_blocks)
        return layers, seals

    def _check_space(self, num_bytes: int) -> None:
        """Checks the free space: the file takes space when it is written, and a write without space kills a process."""
        system = os.fstatvfs(self._file)
        left = system.f_bavail * system.f_frsize + self.held_bytes
        # A file system without blocks is limited only by memory, as for files without a name.
        if system.f_blocks and num_bytes > left:
            raise ConfigurationError(
                f"--kv-cache-file {self._path}: the KV pool takes {shown_bytes(num_bytes)}, and its file system has "
                f"{shown_bytes(left)} left; lower --kv-cache-memory, or make that larger (docker run --shm-size)"
            )


def _header(namespace: KvNamespace, num_blocks: int) -> bytes:
    return _MAGIC + num_blocks.to_bytes(8, "little") + namespace.digest(num_blocks)
