import numpy as np

from worker_svc.device.sealed_blocks import SealInventory
from worker_svc.steps import SealedBlocks


def make_seals(**hashes: int) -> SealedBlocks:
    """Block ids (as "b3") and the byte that fills the hash of each."""
    block_ids = np.array([int(name[1:]) for name in hashes], np.int32)
    return SealedBlocks(block_ids, np.array([[byte] * 32 for byte in hashes.values()], np.uint8))


def found(inventory: SealInventory) -> dict[int, int]:
    sealed = inventory.snapshot()
    return {int(block): int(line[0]) for block, line in zip(sealed.block_ids, sealed.hashes, strict=True)}


def test_seals_are_listed_by_block() -> None:
    inventory = SealInventory(8)
    inventory.add(make_seals(b5=1, b2=2), 1)
    assert found(inventory) == {2: 2, 5: 1}


def test_a_block_that_is_sealed_again_gets_the_new_hash() -> None:
    inventory = SealInventory(8)
    inventory.add(make_seals(b5=1), 1)
    inventory.add(make_seals(b5=9), 2)
    assert found(inventory) == {5: 9}


def test_a_block_that_is_written_loses_its_seal() -> None:
    inventory = SealInventory(8)
    inventory.add(make_seals(b5=1, b6=2), 1)
    inventory.begin_write(np.array([5]), 2)
    assert found(inventory) == {6: 2}


def test_a_step_seals_the_blocks_that_it_has_written_itself() -> None:
    inventory = SealInventory(8)
    inventory.begin_write(np.array([5]), 3)
    inventory.add(make_seals(b5=1), 3)
    assert found(inventory) == {5: 1}


def test_a_seal_is_not_taken_where_a_later_step_has_begun_to_write() -> None:
    inventory = SealInventory(8)
    inventory.begin_write(np.array([5, 6]), 3)
    inventory.begin_write(np.array([6]), 4)
    inventory.add(make_seals(b5=1, b6=2), 3)
    assert found(inventory) == {5: 1}
