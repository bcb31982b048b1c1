"""Blocks that running rows are computing: requests that need the same blocks wait for them (ADR 0022)."""

import heapq
from collections.abc import Sequence

from quire.messages.prefix_hashes import PrefixHash
from scheduler_svc.core.request import RequestKey

_MIN_TOKENS, _MIN_SHARE = 256, 1 / 8
"""Minimum tokens, or share of a step's token budget, in blocks that are worth waiting for. Fewer tokens are computed
sooner than the results of the steps in flight come back. ADR 0022 has the savings."""

_STEPS_AHEAD = 2
"""Number of full steps after the last sealed block for which a long prompt's blocks are underway. Each block costs a
hash, and hashes are computed along with the prompt, not all at once."""


class BlocksUnderway:
    """Full blocks that rows are computing now, and the requests that wait for them instead of computing them too.

    A block is underway from the moment that a row enters the batch to compute it until it is sealed or the row is
    released. A request whose next blocks are underway is held back (`Planner._hold`) until the row sealed the last one
    that both share; then it takes them from the prefix cache. It never waits for a block that cannot come: a row that
    is released for any reason releases all requests that wait for it, and so does a row that computed a value that is
    not finite.

    Each block counts for the first row that began it.
    """

    def __init__(self, block_size: int, token_budget: int) -> None:
        self.window = max(1, _STEPS_AHEAD * token_budget // block_size)
        """The maximum number of a row's blocks, after its last sealed one, that are underway."""
        self.min_run = max(1, min(_MIN_TOKENS, int(_MIN_SHARE * token_budget)) // block_size)
        """Minimum number of blocks that are worth waiting for."""
        self._row_of: dict[PrefixHash, int] = {}
        self._of_row: dict[int, dict[PrefixHash, None]] = {}
        # Heaps of the requests that wait for a row, with the number of its blocks that must be sealed first.
        self._waiters: dict[int, list[tuple[int, RequestKey]]] = {}
        self._released: list[RequestKey] = []
        self._unnamed: dict[int, None] = {}

    @property
    def has_any(self) -> bool:
        """Whether there is a row whose blocks others might wait for."""
        return bool(self._row_of or self._unnamed)

    def expect(self, row: int) -> None:
        """The row computes blocks whose hashes are not needed until a request comes that might wait for them."""
        self._unnamed[row] = None

    def take_expected(self) -> list[int]:
        """The expected rows, whose blocks are to `begin` now."""
        rows, self._unnamed = list(self._unnamed), {}
        return rows

    def items(self) -> list[tuple[PrefixHash, int]]:
        """All blocks that are underway, and their rows."""
        return list(self._row_of.items())

    def awaited(self) -> list[tuple[int, int, RequestKey]]:
        """Rows, the number of blocks of each that a request waits for, and the request, which may be gone by now."""
        return [(row, num_blocks, key) for row, waiters in self._waiters.items() for num_blocks, key in waiters]

    def is_known(self, key: RequestKey) -> bool:
        """Whether the request waits for a row, or is released and not yet taken by `take_released`."""
        waiting = (each for waiters in self._waiters.values() for _, each in waiters)
        return key in self._released or key in waiting

    def is_worth_it(self, num_blocks: int) -> bool:
        """Whether other requests might wait for this number of blocks."""
        return num_blocks >= self.min_run

    def computes(self, row: int) -> bool:
        """Whether the row has blocks underway."""
        return row in self._of_row

    def begin(self, row: int, hashes: Sequence[PrefixHash]) -> None:
        """The row will compute these blocks as well."""
        own = {content: None for content in hashes if content not in self._row_of}
        if own:
            self._of_row.setdefault(row, {}).update(own)
            self._row_of.update(dict.fromkeys(own, row))

    def sealed(self, row: int, hashes: Sequence[PrefixHash]) -> None:
        """The row computed these blocks, and they can be hit."""
        own = self._of_row.get(row, {})
        for content in hashes:
            if content in own:
                del own[content], self._row_of[content]
        if not own:
            self._of_row.pop(row, None)

    def release_waiters(self, row: int, num_sealed: int) -> None:
        """Releases the requests that wait for no more than the first `num_sealed` blocks of the row."""
        waiters = self._waiters.get(row)
        if waiters is None:
            return
        while waiters and waiters[0][0] <= num_sealed:
            self._released.append(heapq.heappop(waiters)[1])
        if not waiters:
            del self._waiters[row]

    def stop(self, row: int) -> None:
        """Ends all waiting for this row."""
        self._unnamed.pop(row, None)
        for content in self._of_row.pop(row, ()):
            del self._row_of[content]
        self._released += [key for _, key in self._waiters.pop(row, ())]

    def row_of(self, hashes: Sequence[PrefixHash]) -> tuple[int | None, int]:
        """The row that computes the last of these blocks that is underway, and their number up to that one; None and 0
        if none is. Such a row has the blocks before it, too."""
        for count in range(len(hashes), 0, -1):
            if (row := self._row_of.get(hashes[count - 1])) is not None:
                return row, count
        return None, 0

    def hold(self, key: RequestKey, row: int, num_blocks: int) -> None:
        """Makes the request wait until the row has sealed its first `num_blocks` blocks or stops."""
        heapq.heappush(self._waiters.setdefault(row, []), (num_blocks, key))

    def take_released(self) -> list[RequestKey]:
        """The requests released since the last call."""
        keys, self._released = self._released, []
        return keys
