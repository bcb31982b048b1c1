"""Full blocks that are being computed right now, and who waits for them instead of computing them too.

A block is underway from the moment that a row enters the batch which will compute it, until it is sealed or the row is
released. A request whose next blocks are underway is held back (see `admission`): once they are sealed it takes them
from the prefix cache. It never waits for a block that cannot come, since a row that is released, for whatever reason,
lets go of all that wait for it, and so does one that computed something that is not finite.
"""

from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.block import BlockHash
from scheduler_svc.core.request import RequestKey

_MIN_TOKENS, _MIN_SHARE = 256, 1 / 8
"""Blocks are worth waiting for if they have so many tokens, or so much of a step's token budget: fewer are computed
sooner than the results of the steps in flight come back. ADR 0022 has what it saves."""

_STEPS_AHEAD = 2
"""Of a long prompt only the blocks of so many full steps behind the last one that is sealed are known here: each costs
a hash, and hashes are to be computed as the prompt is, not all at once."""


class BlocksUnderway:
    """Which rows compute which blocks. Each block counts for the first row that began it."""

    def __init__(self, block_size: int, token_budget: int) -> None:
        self.window = max(1, _STEPS_AHEAD * token_budget // block_size)
        """Blocks ahead of the last sealed one that a row has here at the most."""
        self._min_run = max(1, min(_MIN_TOKENS, int(_MIN_SHARE * token_budget)) // block_size)
        self._row_of: dict[BlockHash, int] = {}
        self._of_row: dict[int, dict[BlockHash, None]] = {}
        self._held: dict[BlockHash, list[RequestKey]] = {}
        self._let_go: list[RequestKey] = []
        self._unnamed: dict[int, None] = {}

    @property
    def has_any(self) -> bool:
        """Whether there is a row whose blocks others might wait for."""
        return bool(self._row_of or self._unnamed)

    def expect(self, row: int) -> None:
        """The row computes blocks, whose hashes are not needed before somebody comes who might wait for them."""
        self._unnamed[row] = None

    def take_expected(self) -> list[int]:
        """The rows whose blocks are to `begin` now."""
        rows, self._unnamed = list(self._unnamed), {}
        return rows

    def items(self) -> list[tuple[BlockHash, int]]:
        """All blocks that are underway, and their rows."""
        return list(self._row_of.items())

    def awaited(self) -> list[BlockHash]:
        """The blocks that somebody waits for, or waited for and is gone."""
        return list(self._held)

    def is_known(self, key: RequestKey) -> bool:
        """Whether the request waits for a block, or `take_let_go` is about to name it."""
        return key in self._let_go or any(key in keys for keys in self._held.values())

    def is_worth_it(self, num_blocks: int) -> bool:
        """Whether others might wait for so many blocks."""
        return num_blocks >= self._min_run

    def computes(self, row: int) -> bool:
        """Whether the row has blocks underway."""
        return row in self._of_row

    def begin(self, row: int, hashes: SequenceOf[BlockHash]) -> None:
        """The row will compute these blocks, too."""
        own = {content: None for content in hashes if content not in self._row_of}
        if own:
            self._of_row.setdefault(row, {}).update(own)
            self._row_of.update(dict.fromkeys(own, row))

    def sealed(self, row: int, hashes: SequenceOf[BlockHash]) -> None:
        """The row computed these blocks, and they can be hit."""
        own = self._of_row.get(row, {})
        for content in hashes:
            if content in own:
                del own[content]
                self._end(content)
        if not own:
            self._of_row.pop(row, None)

    def stop(self, row: int) -> None:
        """Nobody may wait for this row any more."""
        self._unnamed.pop(row, None)
        for content in self._of_row.pop(row, ()):
            self._end(content)

    def last_of(self, hashes: SequenceOf[BlockHash]) -> BlockHash | None:
        """The last of the blocks at the start of these that are underway; None where there are too few of them to wait
        for."""
        count = 0
        while count < len(hashes) and hashes[count] in self._row_of:
            count += 1
        return hashes[count - 1] if self.is_worth_it(count) else None

    def row_of(self, content: BlockHash) -> int:
        """Who computes a block that is underway."""
        return self._row_of[content]

    def hold(self, key: RequestKey, content: BlockHash) -> None:
        """The request waits until this block is no longer underway."""
        self._held.setdefault(content, []).append(key)

    def take_let_go(self) -> list[RequestKey]:
        """Requests that need not wait any more, since this was last called."""
        keys, self._let_go = self._let_go, []
        return keys

    def _end(self, content: BlockHash) -> None:
        del self._row_of[content]
        self._let_go += self._held.pop(content, ())
