"""Swaps during steps, on streams that run in any allowed order, have the same effects as in sequence."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from quire_kernels import ops
from tests.support.fake_streams import FakeDevice
from tests.support.steps import int32, make_assign, make_changes, make_operations, make_step
from worker_svc.device import block_moves
from worker_svc.device.block_moves import BlockMoves
from worker_svc.device.kv_pool import KvPool
from worker_svc.step import AdmittedStep, PoolGeometry
from worker_svc.streams import Stream

NUM_BLOCKS, NUM_HOST_BLOCKS = 10, 12
Pairs = list[tuple[int, int]]


@dataclass(slots=True)
class Planned:
    """A step, and the blocks that its batch reads and writes."""

    admitted: AdmittedStep
    reads: list[int]
    writes: list[int]


@dataclass(slots=True)
class Planner:
    """Plans random steps as a scheduler may: blocks are free for the next step as soon as their sequence has left."""

    rng: random.Random
    free: list[int] = field(default_factory=lambda: list(range(NUM_BLOCKS)))
    free_host: list[int] = field(default_factory=lambda: list(range(NUM_HOST_BLOCKS)))
    running: dict[int, list[int]] = field(default_factory=dict)
    swapped: list[list[int]] = field(default_factory=list)
    num_rows: int = 0

    def plan(self) -> Planned:
        released: list[int] = []
        swap_out: Pairs = []
        for row in list(self.running):
            choice = self.rng.random()
            if choice < 0.15:
                released.append(row)
                self.free += self.running.pop(row)
            elif choice < 0.35 and len(self.free_host) >= len(self.running[row]):
                released.append(row)
                swap_out += self._leave(row)
        # The scheduler may next hand out the block that was freed first, or last.
        self.rng.shuffle(self.free)
        swap_in, assigned = self._come_back()
        copies = self._copy_a_shared_block()
        self._grow()
        self._begin(assigned)
        reads = [block for blocks in self.running.values() for block in blocks]
        writes = [blocks[-1] for blocks in self.running.values()]
        changes = make_changes(release=released, assign=[make_assign(row, [1], [0]) for row in assigned])
        step = make_step(changes, operations=make_operations(swap_out, swap_in, copies))
        return Planned(AdmittedStep(step, int32(writes)), reads, writes)

    def _leave(self, row: int) -> Pairs:
        blocks = self.running.pop(row)
        host = [self.free_host.pop() for _ in blocks]
        self.swapped.append(host)
        self.free += blocks
        return list(zip(blocks, host, strict=True))

    def _come_back(self) -> tuple[Pairs, list[int]]:
        swap_in: Pairs = []
        rows = []
        for host in list(self.swapped):
            if len(host) <= len(self.free) and self.rng.random() < 0.5:
                self.swapped.remove(host)
                blocks = [self.free.pop() for _ in host]
                swap_in += zip(host, blocks, strict=True)
                self.free_host += host
                rows.append(self._enter(blocks))
        return swap_in, rows

    def _enter(self, blocks: list[int]) -> int:
        self.num_rows += 1
        self.running[self.num_rows] = blocks
        return self.num_rows

    def _copy_a_shared_block(self) -> Pairs:
        """Copies a block as if another sequence shared it, which keeps the source."""
        if not self.running or not self.free or self.rng.random() < 0.8:
            return []
        blocks = self.rng.choice(list(self.running.values()))
        source, blocks[-1] = blocks[-1], self.free.pop()
        self.free.append(source)
        return [(source, blocks[-1])]

    def _grow(self) -> None:
        for blocks in self.running.values():
            if self.free and self.rng.random() < 0.3:
                blocks.append(self.free.pop())

    def _begin(self, assigned: list[int]) -> None:
        if self.free and self.rng.random() < 0.5:
            assigned.append(self._enter([self.free.pop()]))


def make_pool() -> KvPool:
    geometry = PoolGeometry(1, NUM_BLOCKS, NUM_HOST_BLOCKS, 1, 1, 1, "float32", 8)
    gpu, host = (torch.zeros(2, count, 1, 1, 1) for count in (NUM_BLOCKS, NUM_HOST_BLOCKS))
    return KvPool(geometry, (gpu,), (host,))


def contents(tensors: Sequence[torch.Tensor]) -> list[float]:
    return tensors[0][0, :, 0, 0, 0].tolist()


class Model:
    """Reads and writes the blocks of a batch; every written value is new."""

    def __init__(self, pool: KvPool) -> None:
        self._blocks = pool.gpu[0][0, :, 0, 0, 0]
        self.seen: list[list[float]] = []

    def run(self, planned: Planned) -> None:
        self.seen.append(self._blocks[planned.reads].tolist())
        for place, block in enumerate(planned.writes):
            self._blocks[block] = len(self.seen) * 100 + place


def run_steps(
    steps: Sequence[Planned], compute: Stream, swaps: Stream, queue: Callable[[Callable[[], None]], None]
) -> tuple[list[list[float]], KvPool]:
    """The values that each step saw, and the pool as it is once all that is queued has run."""
    pool = make_pool()
    model, moves = Model(pool), BlockMoves(pool, compute, swaps)
    for planned in steps:
        moves.run(planned.admitted)
        queue(lambda planned=planned: model.run(planned))
    return model.seen, pool


@pytest.mark.parametrize("seed", range(20))
def test_swaps_beside_steps_give_what_one_after_the_other_gives(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    planner = Planner(rng)
    steps = [planner.plan() for _ in range(60)]
    expected, expected_pool = run_steps(steps, Stream(), Stream(), lambda work: work())
    device = FakeDevice(rng)

    def queued(operation: Callable[..., None]) -> Callable[..., None]:
        return lambda *arguments: device.queue(lambda: operation(*arguments))

    monkeypatch.setattr(block_moves.ops, "swap_blocks", queued(ops.swap_blocks))
    monkeypatch.setattr(block_moves.ops, "copy_blocks", queued(ops.copy_blocks))

    def queue(work: Callable[[], None]) -> None:
        device.queue(work)
        device.advance_some(8)

    actual, pool = run_steps(steps, device.compute, device.swaps, queue)
    device.finish()
    assert actual == expected
    assert contents(pool.gpu) == contents(expected_pool.gpu)
    assert contents(pool.host) == contents(expected_pool.host)
