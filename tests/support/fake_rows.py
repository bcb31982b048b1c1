"""The persistent batch of a worker without a model: contents of each row, and holders of each block."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from tests.support.fake_pool import BlockError, FakePool, ForeignBlockError, Prefixes
from worker_svc.step import Batch, Int32Array, RowChanges, RowSampling


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
    state_blocks: list[int] = field(default_factory=list[int])
    checkpoints: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    """The step that runs has these: numbers of tokens, and the blocks to which the state after these is written."""
    has_begun: bool = False

    def copy(self) -> "FakeRow":
        return replace(
            self,
            blocks=self.blocks[:],
            prefixes=self.prefixes.copy(),
            state_blocks=self.state_blocks[:],
            checkpoints={},
        )


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
            known, states = len(prefixes.token_ids) - 1, assign.state_blocks.tolist()
            content = FakeRow(assign.sampling, blocks, assign.num_prompt_tokens, prefixes, slot, known, states)
            self._put(assign.row, content)
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
        for row, *blocks in changes.state_tables.tolist():
            self._rows[row].state_blocks = blocks

    def set_checkpoints(self, checkpoints: Int32Array) -> None:
        """Takes the checkpoints of the step that begins."""
        for content in self._rows.values():
            content.checkpoints = {}
        for row, num_tokens, *blocks in checkpoints.tolist():
            self._rows[row].checkpoints[num_tokens] = blocks

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
            ForeignBlockError: a row reads a block that does not hold its own tokens, or a state of other tokens.
            AdapterError: a row's adapter is not in its slot.
        """
        for row in batch.rows.tolist():
            if self._adapter_in(row, self._rows[row].adapter_slot) != self._rows[row].prefixes.adapter:
                raise AdapterError(f"row {row} has another adapter in its slot than it began with")
        for row, start, end in spans(batch):
            for entry in self._entries(start, end):
                begin = entry // self._groups.num_groups * self._block_size
                self._check_sharers(row, entry, slice(max(start, begin), min(end, begin + self._block_size)))
        if any(self._rows[row].state_blocks for row in batch.rows.tolist()):
            self._check_states_apart(batch)
            states = [self._read_state(row, start, pool) for row, start, _ in spans(batch)]
            for state, (row, start, end) in zip(states, spans(batch), strict=True):
                self._write_state(row, state, start, end, pool)
        for row, start, end in spans(batch):
            pool.write(self._rows[row].blocks, self._rows[row].prefixes, start, end)
        for row, start, end in spans(batch):
            pool.check_read(row, self._rows[row].blocks, self._rows[row].prefixes, start)
            self._rows[row].num_computed, self._rows[row].has_begun = end, True
        for row, source in batch.samples.tolist():
            self._rows[row].num_computed = self._rows[source].num_computed

    def _check_states_apart(self, batch: Batch) -> None:
        """Rows write their states and checkpoints where no other row has or writes anything. Rows that sample from
        another row's token share its state until they go on. A row that has not begun may get its state from another
        one."""
        source_of = {row: source for row, source in batch.samples.tolist() if row != source}
        written = set[int]()
        for row in batch.rows.tolist():
            own = self._rows[row]
            copies = [block for blocks in own.checkpoints.values() for block in blocks]
            for block in (*own.state_blocks, *copies):
                if block in written or any(self._readers(block)):
                    raise SharedBlockError(f"row {row} writes a state to block {block}, which has another use")
                written.add(block)
        for row, other in self._rows.items():
            may_get_one = row in batch.rows or row in source_of or not other.has_begun
            if not may_get_one and not written.isdisjoint(other.state_blocks):
                raise SharedBlockError(f"the state of row {row}, which waits, is written by another row")

    def _read_state(self, row: int, start: int, pool: FakePool) -> int:
        """The state that a row begins with, after `start` tokens; below 0 if it is not finite."""
        own = self._rows[row]
        if not start:
            return 0
        (true,) = own.prefixes.hashes(start - 1, start).tolist()
        state = pool.read_state(own.state_blocks, start, own.prefixes)
        if state != true and state >= 0:
            raise ForeignBlockError(
                f"row {row} begins with another state in {own.state_blocks} than that of its first {start} tokens"
            )
        return state

    def _write_state(self, row: int, state: int, start: int, end: int, pool: FakePool) -> None:
        own = self._rows[row]
        copies = [(count, blocks) for count, blocks in own.checkpoints.items() if start < count <= end]
        for count, blocks in ((end, own.state_blocks), *copies):
            (true,) = own.prefixes.hashes(count - 1, count).tolist()
            pool.write_state(blocks, state if state < 0 else true)

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
        """Other entries with the block of this one, as in `_readers`."""
        block = self._rows[writer].blocks[entry]
        if self._holders[block] > 1:
            yield from (each for each in self._readers(block) if (each[0], each[2]) != (writer, entry))

    def _readers(self, block: int) -> Iterator[tuple[int, FakeRow, int]]:
        """Entries with this block that are read in a later step, or may be: (row, its content, entry). No table is
        changed when its row no longer reads a block."""
        if not self._holders[block]:
            return
        num_full, num_groups = self._groups.num_full, self._groups.num_groups
        for row, other in self._rows.items():
            first = self._groups.first_read(other.num_computed) // self._block_size
            for place in (place for place, each in enumerate(other.blocks) if each == block):
                is_read = place % num_groups < num_full or place // num_groups >= first
                if is_read:
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
