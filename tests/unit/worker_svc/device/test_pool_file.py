"""Blocks that a worker finds in the file of its pool: all that the earlier worker had sealed, or none."""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.runtime.settings import ConfigurationError
from quire_kernels.host_memory import release
from tests.support.steps import int32
from worker_svc.device import file_lock, pool_file
from worker_svc.device.pool_file import FileLayout, KvNamespace, PoolFile
from worker_svc.device.seals import SealInventory
from worker_svc.step import HASH_BYTES, SealedBlocks

NAMESPACE = KvNamespace(
    model=("config", "tokenizer", "weights"),
    dtype="torch.bfloat16",
    kv_dtype="torch.bfloat16",
    block_size=4,
    num_layers=3,
    num_kv_heads=2,
    head_dim=8,
    lines_per_token=2,
    groups=(1, 0, 0),
    rank=0,
    world_size=1,
    numerics=("1.0", "kernels"),
)
OTHERS: dict[str, Any] = {
    "model": ("config", "tokenizer", "others"),
    "dtype": "torch.float32",
    "kv_dtype": "torch.int8",
    "block_size": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "rank": 1,
    "world_size": 2,
    "numerics": ("1.1", "kernels"),
}
NUM_BLOCKS = 10
SHAPE = (2, NUM_BLOCKS, 2, 4, 8)
LAYOUT = FileLayout(NUM_BLOCKS, [2 * NUM_BLOCKS * 2 * 4 * 8 * 2] * 3)


@pytest.fixture
def path() -> Iterator[Path]:
    """A file that this process holds, as a supervisor does."""
    file = os.memfd_create("pool")
    yield Path(f"/proc/{os.getpid()}/fd/{file}")
    os.close(file)


class OpenPool:
    """A worker's view of its file."""

    def __init__(self, path: Path, namespace: KvNamespace = NAMESPACE, num_blocks: int = NUM_BLOCKS) -> None:
        self.file = PoolFile(path, namespace)
        self.num_held = self.file.num_held
        shapes = [(2, num_blocks, *SHAPE[2:])] * NAMESPACE.num_layers
        mapped = self.file.map(num_blocks, shapes, torch.bfloat16)
        assert mapped is not None
        self.layers, self.seals = mapped

    def die(self) -> None:
        """Ends like a killed process, without any clean-up."""
        os.close(self.file._file)
        del self.layers, self.seals
        gc.collect()

    @property
    def sealed(self) -> dict[int, bytes]:
        inventory = self.seals.snapshot()
        return dict(zip(inventory.block_ids.tolist(), (each.tobytes() for each in inventory.hashes), strict=True))


def hashes(*names: int) -> np.ndarray:
    return np.repeat(np.array(names, np.uint8), HASH_BYTES).reshape(-1, HASH_BYTES)


def seal(seals: SealInventory, blocks: list[int], step: int = 1) -> None:
    seals.begin_write(int32(blocks), step)
    seals.add(SealedBlocks(int32(blocks), hashes(*blocks)), step)


def leave_blocks(path: Path) -> None:
    """A worker fills the pool, seals blocks 2, 5 and 9, begins to rewrite block 5, and is killed."""
    pool = OpenPool(path)
    for index, layer in enumerate(pool.layers):
        layer[:] = torch.arange(NUM_BLOCKS).view(1, -1, 1, 1, 1) + 100 * index
    seal(pool.seals, [2, 5, 9])
    pool.seals.begin_write(int32([5]), 2)
    pool.die()


def test_a_successor_finds_what_was_sealed_and_its_bytes(path: Path) -> None:
    leave_blocks(path)
    pool = OpenPool(path)
    assert pool.num_held == NUM_BLOCKS
    assert pool.sealed == {2: bytes([2] * HASH_BYTES), 9: bytes([9] * HASH_BYTES)}
    for index, layer in enumerate(pool.layers):
        assert layer.shape == SHAPE
        assert (layer[:, 9] == 9 + 100 * index).all()
    # The new worker counts its steps from 1 again.
    pool.seals.begin_write(int32([2]), 1)
    assert list(pool.sealed) == [9]


@pytest.mark.parametrize("field", OTHERS)
def test_blocks_of_another_namespace_are_not_found(path: Path, field: str) -> None:
    leave_blocks(path)
    pool = OpenPool(path, replace(NAMESPACE, **{field: OTHERS[field]}))
    assert (pool.num_held, pool.sealed) == (None, {})
    assert not any(layer.any() for layer in pool.layers)
    pool.die()
    # The first worker's blocks are gone then.
    assert OpenPool(path).sealed == {}


def test_blocks_of_a_pool_of_another_size_are_not_found(path: Path) -> None:
    leave_blocks(path)
    pool = OpenPool(path, num_blocks=NUM_BLOCKS - 1)
    assert (pool.num_held, pool.sealed) == (NUM_BLOCKS, {})


def _torn(file: int) -> None:
    """A worker was killed while it wrote the digest."""
    os.pwrite(file, bytes(17), pool_file._HEADER_BYTES - 17)


def _of_garbage(file: int) -> None:
    os.pwrite(file, os.urandom(LAYOUT.num_bytes), 0)


def _with_another_number(file: int) -> None:
    os.pwrite(file, (NUM_BLOCKS + 1).to_bytes(8, "little"), 8)


HARM: dict[str, Callable[[int], object]] = {
    "a torn header": _torn,
    "garbage": _of_garbage,
    "another number of blocks": _with_another_number,
    "a cut file": lambda file: os.ftruncate(file, LAYOUT.num_bytes - 4096),
    "a cut header": lambda file: os.ftruncate(file, 20),
    "nothing": lambda file: os.ftruncate(file, 0),
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_a_file_that_is_not_whole_is_as_a_new_one(path: Path, harm: Callable[[int], object]) -> None:
    leave_blocks(path)
    file = os.open(path, os.O_RDWR)
    harm(file)
    os.close(file)
    pool = OpenPool(path)
    assert pool.sealed == {}
    assert not any(layer.any() for layer in pool.layers)
    seal(pool.seals, [3])
    pool.die()
    assert list(OpenPool(path).sealed) == [3]


def test_a_pool_that_its_file_system_has_no_space_for_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example /dev/shm of a container, 64 MB by default: writing without free space would kill the process."""

    def of_blocks(count: int, free: int) -> Callable[[int], SimpleNamespace]:
        return lambda file: SimpleNamespace(f_blocks=count, f_bavail=free, f_frsize=4096)

    num_blocks = LAYOUT.num_bytes // 4096
    monkeypatch.setattr(os, "fstatvfs", of_blocks(num_blocks, num_blocks - 1))
    file = PoolFile(path, NAMESPACE)
    with pytest.raises(ConfigurationError, match=r"takes 8.0 MiB, and its file system has 7.9 MiB left; lower"):
        file.map(NUM_BLOCKS, [SHAPE] * 3, torch.bfloat16)
    file.close()
    monkeypatch.setattr(os, "fstatvfs", of_blocks(num_blocks, num_blocks))
    pool = OpenPool(path)
    pool.layers[0].fill_(1)
    assert pool.file.held_bytes > 0
    pool.die()
    # Memory that the file already has is not taken twice.
    monkeypatch.setattr(os, "fstatvfs", of_blocks(num_blocks, num_blocks - 1))
    OpenPool(path).die()


def test_a_file_has_one_worker_at_a_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock, "_LOCK_TIMEOUT_S", 0.0)
    first = OpenPool(path)
    with pytest.raises(ConfigurationError, match=r"is in use by .* stop that one, or name another place"):
        PoolFile(path, NAMESPACE)
    first.die()
    OpenPool(path)


def test_a_path_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="none/pool cannot be opened: No such file"):
        PoolFile(tmp_path / "none" / "pool", NAMESPACE)


def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("notes")
    with pytest.raises(ConfigurationError, match=r"^--kv-cache-file .*notes.txt holds something else than a KV pool; "):
        PoolFile(path, NAMESPACE)
    assert path.read_text() == "notes"
    # An empty file, or one without a finished header, and then the file of a pool.
    for size in (0, 4096):
        path.write_bytes(bytes(size))
        pool = OpenPool(path)
        seal(pool.seals, [3])
        pool.die()
        successor = OpenPool(path)
        assert list(successor.sealed) == [3]
        successor.die()


def test_a_closed_file_takes_no_memory(path: Path) -> None:
    pool = OpenPool(path)
    assert pool.file.held_bytes > 0
    # A mapped file stays in use.
    del pool.layers, pool.seals
    pool.file.close()
    file = PoolFile(path, NAMESPACE)
    assert (file.held_bytes, file.num_held) == (0, None)


def test_a_file_whose_blocks_are_given_back_holds_none_for_a_successor(path: Path) -> None:
    pool = OpenPool(path, num_blocks=1000)
    assert all(layer.fill_(1).all() for layer in pool.layers)
    seal(pool.seals, [2, 200])
    before = pool.file.held_bytes
    pool.seals.clear()
    assert all(release(layer, is_over_file=True) for layer in pool.layers)
    assert pool.file.held_bytes < before // 2
    assert not any(layer[:, 200].any() for layer in pool.layers)
    pool.die()
    assert OpenPool(path, num_blocks=1000).sealed == {}


def test_parts_of_a_file_do_not_overlap() -> None:
    for layout in (FileLayout(1, [512, 256]), FileLayout(100_000, [5 << 20] * 3), LAYOUT):
        parts = [(0, pool_file._INVENTORY_AT + layout.num_blocks * (1 + HASH_BYTES))]
        parts += [(each.start, each.stop) for each in map(layout.layer, range(len(layout.layer_bytes)))]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(parts))
        assert parts[-1][1] <= layout.num_bytes
        assert all(start % pool_file.HUGE_PAGE == 0 for start, _ in parts)
