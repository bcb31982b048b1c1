"""The buddy allocator, which a system needs that keeps each request's memory contiguous."""


class BuddyAllocator:
    """Pieces of power-of-two sizes out of `num_slots` slots.

    A pool whose size is no power of two starts as one piece for each bit of its size. A freed piece joins its buddy,
    the other half of the piece that both were cut from, if that one is free too.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a pool needs at least 1 slot, got {num_slots}")
        self.num_slots = num_slots
        self._roots: dict[int, int] = {}
        """First slot -> size, of the pieces in the empty pool."""
        self._free: dict[int, set[int]] = {}
        """Size -> first slots of the free pieces."""
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            size = 1 << bit
            self._free[size] = set()
            if num_slots & size:
                self._roots[start] = size
                self._free[size].add(start)
                start += size

    def allocate(self, num_slots: int) -> tuple[int, int] | None:
        """First slot and size of a piece that has room for `num_slots`, or None if no free piece has."""
        wanted = next_power_of_two(num_slots)
        size = min((each for each, starts in self._free.items() if each >= wanted and starts), default=None)
        if size is None:
            return None
        # The lowest piece, so that placement is deterministic.
        start = min(self._free[size])
        self._free[size].remove(start)
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        return start, size

    def free(self, start: int, size: int) -> None:
        """Takes a piece back that `allocate` returned."""
        root = max(each for each in self._roots if each <= start)
        while size < self._roots[root]:
            buddy = root + ((start - root) ^ size)
            if buddy not in self._free[size]:
                break
            self._free[size].remove(buddy)
            start, size = min(start, buddy), size * 2
        self._free[size].add(start)

    @property
    def num_free(self) -> int:
        """Slots of all free pieces."""
        return sum(size * len(starts) for size, starts in self._free.items())


def next_power_of_two(count: int) -> int:
    """The lowest power of two that is at least `count`, which is at least 1."""
    return 1 << (count - 1).bit_length()
