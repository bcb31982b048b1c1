"""The buddy allocator."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from simulator.baselines.buddy import BuddyAllocator, next_power_of_two


@pytest.mark.parametrize(("count", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (25, 32), (1024, 1024)])
def test_next_power_of_two(count: int, power: int) -> None:
    assert next_power_of_two(count) == power


def test_a_piece_is_rounded_up_and_the_lowest_is_taken() -> None:
    pool = BuddyAllocator(16)
    assert pool.allocate(3) == (0, 4)
    assert pool.allocate(5) == (8, 8)
    assert pool.allocate(1) == (4, 1)
    assert pool.num_free == 3


def test_a_pool_of_any_size_is_used_to_its_last_slot() -> None:
    pool = BuddyAllocator(15_700)
    assert sum(1 for _ in iter(lambda: pool.allocate(2048), None)) == 7
    assert pool.num_free == 15_700 - 7 * 2048
    assert sum(1 for _ in iter(lambda: pool.allocate(1), None)) == 15_700 - 7 * 2048


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 slot, got 0"):
        BuddyAllocator(0)


class BuddyMachine(RuleBasedStateMachine):
    """Allocates and frees at random, beside a set of the slots that are held."""

    pieces: Bundle[tuple[int, int]] = Bundle("pieces")

    @initialize(num_slots=st.integers(1, 100))
    def make(self, num_slots: int) -> None:
        self.pool = BuddyAllocator(num_slots)
        self.held: set[int] = set()

    @rule(target=pieces, wanted=st.integers(1, 80))
    def allocate(self, wanted: int) -> MultipleResults[tuple[int, int]] | tuple[int, int]:
        piece = self.pool.allocate(wanted)
        if piece is None:
            return multiple()
        start, size = piece
        assert wanted <= size < 2 * wanted
        assert start % size == 0 or self.pool.num_slots % size
        slots = set(range(start, start + size))
        assert not slots & self.held
        assert max(slots) < self.pool.num_slots
        self.held |= slots
        return piece

    @rule(piece=consumes(pieces))
    def free(self, piece: tuple[int, int]) -> None:
        start, size = piece
        self.held -= set(range(start, start + size))
        self.pool.free(start, size)

    @invariant()
    def slots_are_held_or_free(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_slots - len(self.held)

    @invariant()
    def all_pieces_join_when_nothing_is_held(self) -> None:
        if hasattr(self, "pool") and not self.held:
            largest = 1 << (self.pool.num_slots.bit_length() - 1)
            piece = self.pool.allocate(largest)
            assert piece == (0, largest)
            self.pool.free(*piece)


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=30)
