"""The buddy allocator."""

import random

import pytest

from bench.buddy import BuddyAllocator, next_power_of_two


@pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (25, 32), (1024, 1024)])
def test_next_power_of_two(count: int, power: int) -> None:
    assert next_power_of_two(count) == power


def test_a_piece_is_rounded_up_and_the_lowest_is_taken() -> None:
    pool = BuddyAllocator(16)
    assert pool.allocate(3) == (0, 4)
    assert pool.allocate(5) == (8, 8)
    assert pool.allocate(1) == (4, 1)
    assert pool.num_free == 3


def test_nothing_is_given_where_the_free_slots_lie_apart() -> None:
    pool = BuddyAllocator(16)
    pieces = [pool.allocate(4) for _ in range(4)]
    for piece in (pieces[0], pieces[2]):
        assert piece is not None
        pool.free(*piece)
    assert pool.num_free == 8
    assert pool.allocate(8) is None


def test_buddies_join_when_both_are_free() -> None:
    pool = BuddyAllocator(16)
    pieces = [pool.allocate(1) for _ in range(16)]
    assert pool.allocate(1) is None
    for piece in pieces:
        assert piece is not None
        pool.free(*piece)
    assert pool.allocate(16) == (0, 16)


def test_a_pool_of_any_size_is_used_to_its_last_slot() -> None:
    pool = BuddyAllocator(15_700)
    assert sum(1 for _ in iter(lambda: pool.allocate(2048), None)) == 7
    assert pool.num_free == 15_700 - 7 * 2048
    assert sum(1 for _ in iter(lambda: pool.allocate(1), None)) == 15_700 - 7 * 2048


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        BuddyAllocator(0)


@pytest.mark.parametrize("num_slots", [1, 7, 64, 100])
def test_pieces_never_overlap_and_all_come_back(num_slots: int) -> None:
    rng = random.Random(num_slots)
    pool, held = BuddyAllocator(num_slots), []
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.free(*held.pop(rng.randrange(len(held))))
        elif (piece := pool.allocate(rng.randint(1, max(1, num_slots // 3)))) is not None:
            held.append(piece)
        slots = [slot for start, size in held for slot in range(start, start + size)]
        assert len(set(slots)) == len(slots)
        assert pool.num_free + len(slots) == num_slots
        assert all(0 <= slot < num_slots for slot in slots)
    for piece in held:
        pool.free(*piece)
    largest = 1 << (num_slots.bit_length() - 1)
    assert pool.allocate(largest) == (0, largest)
