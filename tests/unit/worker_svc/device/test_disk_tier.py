"""Blocks that a worker finds on disk: each is whole and its own, or it is not found."""

import errno
import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.messages.layer_groups import LayerGroups
from quire.runtime.settings import ConfigurationError
from tests.support.steps import int32, make_assign, make_batch, make_changes, make_operations, make_step
from tests.unit.worker_svc.device.test_pool_file import NAMESPACE, hashes
from worker_svc.device import file_lock
from worker_svc.device.disk_tier import BlockFile, DiskFailsError, DiskTier
from worker_svc.device.seals import SealInventory
from worker_svc.parallel.ranks import Ranks
from worker_svc.pool_setup import open_disk_tier
from worker_svc.settings import WorkerSettings
from worker_svc.step import Int32Array, SealedBlocks

SIZE = 5000
NUM_BLOCKS = 6


def name(number: int) -> bytes:
    return hashes(number).tobytes()


def content(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def read(file: BlockFile, name: bytes) -> bytes | None:
    into = np.empty(SIZE, np.uint8)
    return into.tobytes() if file.read(name, into) else None


def open_file(path: Path, num_slots: int = 3, **changes: Any) -> BlockFile:
    file = BlockFile(path, 4096 + num_slots * (SIZE + 48), replace(NAMESPACE, **changes).digest(), SIZE)
    assert file.num_slots == num_slots
    return file


def contents_of(file: BlockFile) -> dict[int, bool | None]:
    """By block, whether it is as it was written; None if it cannot be read."""
    # Blocks that are read last stay longest.
    found = {each[0]: read(file, each) for each in reversed(file.names)}
    return {number: None if data is None else data == content(number) for number, data in found.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kv" / "blocks.kv"


def test_file_keeps_the_blocks_written_last_for_its_namespace_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_file(path)
    for number in range(1, 6):
        file.write(name(number), content(number))
    assert contents_of(file) == {5: True, 4: True, 3: True}
    assert read(file, name(1)) is None
    assert path.stat().st_size == 4096 + 3 * (SIZE + 48)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)
    monkeypatch.setattr(file_lock, "_LOCK_TIMEOUT_S", 0.0)
    found, locks = path.stat(), path.parent / "locks"
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    monkeypatch.setattr(file_lock, "_LOCKS", locks)
    others = f"1: POSIX ADVISORY WRITE 1 {place} 0 EOF\n2: FLOCK ADVISORY WRITE 2 {place}0 0 EOF\n"
    for told, says in [
        (None, "another process"),
        (others, "another process"),
        (f"{others}3: FLOCK  ADVISORY  WRITE 4711 {place} 0 EOF\n", "process 4711"),
        (f"1: FLOCK ADVISORY WRITE 0 {place} 0 EOF", "a process outside of this container"),
    ]:
        if told is not None:
            locks.write_text(told)
        with pytest.raises(ConfigurationError, match=f"--kv-disk {path} is in use by {says}; .* name another place"):
            open_file(path)
    file.close()
    again = open_file(path)
    assert contents_of(again) == {5: True, 4: True, 3: True}
    again.write(name(6), content(6))
    assert contents_of(again) == {6: True, 5: True, 4: True}
    again.close()
    smaller = open_file(path, 2)
    assert len(smaller) == 2
    assert path.stat().st_size == 4096 + 2 * (SIZE + 48)
    smaller.close()
    with pytest.raises(ConfigurationError, match=r"--kv-disk-space is 4\.8 KiB"):
        BlockFile(path, 5000, NAMESPACE.digest(), SIZE)


def test_the_block_read_longest_ago_gives_way_and_each_change_is_told(path: Path) -> None:
    file = open_file(path)
    for number in (1, 2, 3):
        file.write(name(number), content(number))
    assert file.take_changes() == [(0, name(1)), (1, name(2)), (2, name(3))]
    assert read(file, name(1)) == content(1)
    file.write(name(4), content(4))
    assert file.take_changes() == [(1, name(4))]
    assert sorted(file.entries()) == [(0, name(1)), (1, name(4)), (2, name(3))]
    os.pwrite(file._file, b"damage", 4096 + 60)
    assert read(file, name(1)) is None
    assert file.take_changes() == [(0, None)]


def test_no_damaged_byte_is_ever_read(path: Path) -> None:
    file = open_file(path)
    for number in (1, 2):
        file.write(name(number), content(number))
    file.close()
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    # Each byte of a slot's head, and some bytes of its content and of the file's header.
    places = [*range(52), *range(4096, 4096 + 48), *(4096 + 48 + rng.integers(0, SIZE, 50)).tolist()]
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        file = open_file(path)
        found = contents_of(file)
        assert found.get(1) is None, place
        assert found.get(2) is (True if place >= 4096 else None)
        assert read(file, name(1)) is None
        file.write(name(1), content(1))
        assert read(file, name(1)) == content(1)
        file.close()
    for length in (0, 1, 4000, 4100, 4096 + SIZE, len(whole) - 1):
        path.write_bytes(whole[:length])
        file = open_file(path)
        assert False not in contents_of(file).values()
        file.close()


@dataclass
class Pool:
    """Blocks of SIZE bytes."""

    seals: SealInventory = field(default_factory=lambda: SealInventory(NUM_BLOCKS))
    block_bytes: int = SIZE
    blocks: dict[int, bytes] = field(default_factory=dict[int, bytes])
    writes_while_read: list[int] = field(default_factory=list[int])

    def read(self, blocks: Int32Array) -> NDArray[np.uint8]:
        contents = np.stack([np.frombuffer(self.blocks[each], np.uint8) for each in blocks.tolist()])
        if self.writes_while_read:
            self.seals.begin_write(int32(self.writes_while_read), 9)
        return contents

    def write(self, blocks: Int32Array, contents: NDArray[np.uint8]) -> None:
        self.blocks |= {block: each.tobytes() for block, each in zip(blocks.tolist(), contents, strict=True)}

    def fill(self, block: int, number: int, step: int = 1, *, is_short_lived: bool = False) -> None:
        self.seals.begin_write(int32([block]), step)
        self.blocks[block] = content(number)
        self.seals.add(SealedBlocks(int32([block]), hashes(number), int32([block] * is_short_lived)), step)

    def holds(self) -> set[int]:
        sealed = self.seals.snapshot()
        numbers = [int(each[0]) for each in sealed.hashes]
        assert all(self.blocks[b] == content(n) for b, n in zip(sealed.block_ids.tolist(), numbers, strict=True))
        return set(numbers)


def test_pool_begins_with_what_was_sealed(path: Path) -> None:
    pool = Pool()
    tier = DiskTier(open_file(path, 8), pool, NUM_BLOCKS)
    counted: list[tuple[str, int]] = []
    tier._count = lambda what, num_bytes: counted.append((what, num_bytes))
    for block in range(4):
        pool.fill(block, 10 + block)
    tier.write_behind()
    tier.write_behind()
    assert counted == [("written", SIZE)] * 4
    # Block 0 is written anew, and block 4 while it is read.
    pool.fill(0, 20, step=2)
    pool.fill(4, 21, step=2)
    pool.writes_while_read = [4]
    tier.write_behind()
    pool.writes_while_read = []
    pool.fill(5, 22, step=10)
    tier.stop()

    held = Pool()
    held.fill(3, 22)
    tier = DiskTier(open_file(path, 8), held, NUM_BLOCKS)
    assert tier.restore() == 5
    assert held.holds() == {10, 11, 12, 13, 20, 22}
    tier.stop()


def test_blocks_of_windowed_layers_are_found_from_the_beginning_of_the_window_on() -> None:
    tables = [make_assign(0, [1] * 10, [1, 11, 2, 12, 3, 13, 4, 14]), make_assign(1, [1], [5, 15])]
    step = make_step(make_changes(assign=tables), make_batch(rows=[0, 1], new=[1, 1], computed=[9, 0]))
    groups = LayerGroups(1, 1, window=5)
    assert step.cached_blocks(3, groups).tolist() == [1, 2, 3, 12, 13]
    assert step.cached_blocks(1, groups).tolist()[:3] == [1, 2, 3]


def test_blocks_that_sequences_begin_with_in_the_pool_stay_on_disk_their_beginning_longest(path: Path) -> None:
    pool = Pool()
    tier = DiskTier(open_file(path, 4), pool, NUM_BLOCKS)
    for block in range(4):
        pool.fill(block, 10 + block)
    tier.write_behind()
    # A block that is overwritten during a read is not the block that was looked up.
    pool.seals.begin_write(int32([2]), 5)
    assigned = [make_assign(0, [1] * 10, [0, 1, 2]), make_assign(1, [1], [3])]
    step = make_step(make_changes(assign=assigned), make_batch(rows=[2, 1, 0], new=[1, 1, 1], computed=[9, 0, 9]))
    tier.hit(step.cached_blocks(block_size=3))
    for block, number in ((4, 20), (5, 21), (2, 22)):
        pool.fill(block, number, step=6)
        tier.write_behind()
    assert set(tier._file.names) == {name(number) for number in (10, 20, 21, 22)}
    tier.stop()


def test_the_checkpoint_that_a_sequence_continues_from_is_among_the_blocks_it_begins_with() -> None:
    row = replace(make_assign(0, [1] * 10, [1, 2, 3]), state_blocks=int32([8, 9]))
    batch, copies = make_batch(rows=[0], new=[1], computed=[9]), make_operations(copy=[(4, 7), (5, 8), (6, 9)])
    step = make_step(make_changes(assign=[row]), batch, copies)
    assert step.cached_blocks(3).tolist() == [1, 2, 3, 5, 6]


def test_blocks_that_others_are_to_replace_are_written_once_they_are_to_last(path: Path) -> None:
    pool, file = Pool(), open_file(path, 8)
    tier = DiskTier(file, pool, NUM_BLOCKS)

    def on_disk() -> set[int]:
        tier.write_behind()
        return {each[0] for each in file.names}

    for block in range(4):
        pool.fill(block, 10 + block, is_short_lived=block > 0)
    assert on_disk() == {10}
    pool.seals.add(SealedBlocks(int32([3]), hashes(13)), 1)
    pool.fill(2, 20)
    assert on_disk() == {10, 13, 20}
    # The next scheduler does not know what is to be replaced.
    tier.follow(lambda changes: None)
    assert on_disk() == {10, 11, 13, 20}
    tier.stop()


def test_what_sequences_begin_with_while_the_disk_hangs_is_bounded(path: Path) -> None:
    tier = DiskTier(open_file(path, 4), Pool(), NUM_BLOCKS)
    for _ in range(5_000):
        tier.hit(np.zeros(1, np.int32))
    assert len(tier._hits) <= 1024


def test_a_worker_on_a_gpu_has_no_tier(path: Path) -> None:
    model: Any = SimpleNamespace(device=torch.device("cuda"), ranks=Ranks(0, 1))
    settings = WorkerSettings(model="m", listen="127.0.0.1:1", kv_disk=path.parent)
    unused: Any = None
    with pytest.raises(ConfigurationError, match="this one is on cuda; leave it out"):
        open_disk_tier(model, settings, unused, unused, unused)
    assert not path.parent.exists()


def test_a_disk_that_is_full_at_the_start_is_told_of_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", is_full)
        with pytest.raises(DiskFailsError, match="No space left on device"):
            open_file(path)
    # No object holds the file.
    assert len(open_file(path)) == 0


def test_full_disk_ends_writing_with_one_line(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool()
    tier = DiskTier(open_file(path), pool, NUM_BLOCKS)
    counted: list[str] = []
    tier._count = lambda what, num_bytes: counted.append(what)
    pool.fill(0, 1)
    tier.write_behind()
    write = BlockFile._write

    def write_head_only(file: BlockFile, data: bytes, start: int) -> None:
        if len(data) == SIZE:
            write(file, data[:100], start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, data, start)

    with monkeypatch.context() as patch:
        patch.setattr(BlockFile, "_write", write_head_only)
        for number in (2, 3):
            pool.fill(number, number)
            tier.write_behind()
    tier.stop()
    assert counted == ["written", "failed"]
    assert [each.getMessage() for each in caplog.records] == ["no more KV blocks go to disk: No space left on device"]
    again = Pool()
    assert DiskTier(open_file(path), again, NUM_BLOCKS).restore() == 1
    assert again.holds() == {1}


def test_what_is_no_file_of_its_own_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir()
    other = path.parent / "other"
    other.write_text("of somebody else")
    path.symlink_to(other)
    with pytest.raises(ConfigurationError, match=r"--kv-disk .*symbolic link"):
        open_file(path)
    assert other.read_text() == "of somebody else"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigurationError, match=r"--kv-disk .*not a regular file"):
        open_file(path)
