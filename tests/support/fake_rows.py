"""The persistent batch of a worker without a model: contents of each row, and holders of each block."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from tests.support.fake_pool import BlockError, FakePool, Prefixes
from worker_svc.step import Batch, RowChanges, RowSampling


class SharedBlockError(BlockError):
    """A step writes a token to a block where another row has, or will have, another token."""


class AdapterError(BlockError):
    """A row runs without its adapter."""


@dataclass(slots=True)
class FakeRow:
    """The sequence in a row."""

    sampling: RowSampling
    blocks: list[int]
    num_prompt_tokens: int
    prefixes: Prefixes
    adapter_slot: int | None = None
    num_computed: int = 0

    def copy(self) -> "FakeRow":
        return replace(self, blocks=self.blocks[:], prefixes=self.prefixes.copy())


class FakeRows:
    """The rows of one session. `adapters` are the digests of the adapters that are loaded, by slot."""

    def __init__(
        self, block_size: int, adapters: Mapping[int, bytes] | None = None, groups: LayerGroups = ONE_GROUP
    ) -> None:
        self._adapters = {} if adapters is None else adapters
        self._rows: dict[int, FakeRow] = {}
        self._holders: Counter[int] = Counter()
        self._block_size, self._groups = block_size, groups

    def __getitem__(self, row: int) -> FakeRow:
        return self._rows[row]

    def apply_row_changes(self, changes: RowChanges) -> None:
        for row in changes.release.tolist():
            self._release(row)
        for assign in changes.assign:
            slot = assign.adapter_slot
            prefixes = Prefixes(assign.token_ids.tolist(), self._adapter_in(assign.row, slot))
            blocks = assign.block_table.tolist()
            known = len(prefixes.token_ids) - 1
            self._put(assign.row, FakeRow(assign.sampling, blocks, assign.num_prompt_tokens, prefixes, slot, known))
        # All parents are read before any child is put, which may take the row of another's parent.
        children = [(child, self._rows[parent].copy()) for parent, child in changes.fork.tolist()]
        for row, content in children:
            self._put(row, content)
        for reseed in changes.reseed:
            row = self._rows[reseed.row]
            row.sampling = replace(row.sampling, seed=reseed.seed)
        for change in changes.set_tokens:
            self._rows[change.row].prefixes.replace(change.position, change.token_ids.tolist())
        for row, index, block in sorted(changes.block_table_deltas.tolist()):
            self._set_block(self._rows[row].blocks, index, block)

    def placed(self, batch: Batch) -> Batch:
        """The batch with sampling rows at their real positions, which are later than planned if drafts were right."""
        sources = set(batch.samples[:, 1].tolist())
        columns = zip(
            batch.rows.tolist(), batch.num_new_tokens.tolist(), batch.num_computed_tokens.tolist(), strict=True
        )
        starts = [
            len(self._rows[row].prefixes.token_ids) - new if row in sources else computed
            for row, new, computed in columns
        ]
        return replace(batch, num_computed_tokens=np.array(starts, np.int32))

    def write_wrong(self, row: int, count: int, pool: FakePool) -> None:
        """Writes `count` tokens that a row does not have, from its newest one on: drafts that are wrong."""
        state = self._rows[row]
        wrong, start = state.prefixes.copy(), len(state.prefixes.token_ids) - 1
        wrong.replace(start, [0] * count)
        for entry in self._entries(start, start + count):
            if any(self._others(row, entry)):
                raise SharedBlockError(f"row {row} writes drafts to block {state.blocks[entry]}, which another row has")
        pool.write(state.blocks, wrong, start, start + count)

    def compute(self, batch: Batch, pool: FakePool) -> None:
        """Writes the batch's new tokens, and checks the tokens that they attend to and write over.

        Raises:
            SharedBlockError: a row writes where another holder of the block has other tokens, or at another place.
            ForeignBlockError: a row reads a block that does not hold its own tokens.
            AdapterError: a row's adapter is not in its slot.
        """
        for row in batch.rows.tolist():
            if self._adapter_in(row, self._rows[row].adapter_slot) != self._rows[row].prefixes.adapter:
                raise AdapterError(f"row {row} has another adapter in its slot than it began with")
        for row, start, end in spans(batch):
            for entry in self._entries(start, end):
                begin = entry // self._groups.num_groups * self._block_size
                self._check_sharers(row, entry, slice(max(start, begin), min(end, begin + self._block_size)))
        for row, start, end in spans(batch):
            pool.write(self._rows[row].blocks, self._rows[row].prefixes, start, end)
        for row, start, end in spans(batch):
            pool.check_read(row, self._rows[row].blocks, self._rows[row].prefixes, start)
            self._rows[row].num_computed = end
        for row, source in batch.samples.tolist():
            self._rows[row].num_computed = self._rows[source].num_computed

    def _check_sharers(self, writer: int, entry: int, positions: slice) -> None:
        written = self._rows[writer].prefixes.token_ids[positions]
        for row, other, place in self._others(writer, entry):
            if place != entry or other.prefixes.token_ids[positions] != written:
                block = other.blocks[place]
                raise SharedBlockError(f"row {writer} writes to block {block}, in which row {row} has other tokens")

    def _entries(self, start: int, end: int) -> range:
        """The entries of block tables, in all groups of layers, for the tokens from `start` to `end`."""
        size, num_groups = self._block_size, self._groups.num_groups
        return range(start // size * num_groups, ((end - 1) // size + 1) * num_groups)

    def _others(self, writer: int, entry: int) -> Iterator[tuple[int, FakeRow, int]]:
        """Other entries with the block of this one that are read in a later step, or may be: (row, its content, entry).
        No table is changed when its row no longer reads a block."""
        block = self._rows[writer].blocks[entry]
        if self._holders[block] < 2:
            return
        num_full, num_groups = self._groups.num_full, self._groups.num_groups
        for row, other in self._rows.items():
            first = self._groups.first_read(other.num_computed) // self._block_size
            for place in (place for place, each in enumerate(other.blocks) if each == block):
                is_read = place % num_groups < num_full or place // num_groups >= first
                if is_read and (row, place) != (writer, entry):
                    yield row, other, place

    def _adapter_in(self, row: int, slot: int | None) -> bytes:
        if slot is None:
            return b""
        if slot not in self._adapters:
            raise AdapterError(f"row {row} has slot {slot}, which is empty")
        return self._adapters[slot]

    def _release(self, row: int) -> None:
        # The ledger permits the release of a row that holds nothing.
        if row in self._rows:
            self._holders.subtract(self._rows.pop(row).blocks)

    def _put(self, row: int, content: FakeRow) -> None:
        self._release(row)
        self._rows[row] = content
        self._holders.update(content.blocks)

    def _set_block(self, blocks: list[int], index: int, block: int) -> None:
        """Replaces an entry or adds one; the ledger has checked that no index is left out."""
        self._holders.subtract(blocks[index : index + 1])
        blocks[index : index + 1] = [block]
        self._holders[block] += 1


def spans(batch: Batch) -> Iterator[tuple[int, int, int]]:
    """(row, start, end) of the new tokens of each row."""
    starts = batch.num_computed_tokens.tolist()
    return zip(batch.rows.tolist(), starts, (batch.num_computed_tokens + batch.num_new_tokens).tolist(), strict=True)
