"""Block tables, the prefix cache and swapping (the paper's sections 4.2 to 4.5).

This is bookkeeping only; workers move tensors before they run the step whose plan names the pairs.
"""

import itertools
import sys
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Self

from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group
from scheduler_svc.core.cache_log import CachedTokens, CacheLog
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.moves import MoveCounts
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.block_tables import BlockTables
from scheduler_svc.core.prefix_index import BlockNames, CachedStart, HostMemory, PrefixIndex
from scheduler_svc.core.request import max_blocks_apart, num_shared
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.states import Checkpoint, States
from scheduler_svc.core.windows import Windows

_HASHES_AT_FIRST = 16
"""Blocks at the start of a sequence that are hashed for the first lookup; more if all of these are cached."""

_MAX_HASHES_AT_ARRIVAL = 5000
"""Blocks of a sequence that are hashed when it arrives; later ones when it is admitted. Bounds both calls."""

_MAX_RECLAIMED, _MAX_RECLAIMED_BLOCKS = 256, 4096
"""Finished sequences, and blocks of them, that one call frees at most: all rows may end in one step."""


class BlockManager(BlockTables[Sequence]):
    """Block tables whose sequences share cached blocks, of the pool and of the host.

    A sequence that is computed by itself has blocks of windowed groups only for the window and for the tokens that the
    next steps compute; other entries of its table are in `blank`, a block that stands for blocks that no layer reads.
    Sequences of one request that are computed together may share any block, and have all of them at first.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        pool, host = PrefixIndex(config.num_blocks), HostMemory(0, MoveCounts())
        super().__init__(pool, host, config.layout, config.watermark)
        self.pool: PrefixIndex = pool
        self.host: HostMemory = host
        """Keeps blocks that the pool evicts."""
        self.names = BlockNames(config.layout, config.state_blocks)
        self.config = config
        self.windows = Windows(config, pool)
        self.blank = self.windows.blank
        self.states = States(config, pool, self.names)
        self.blank_on_host = frozenset[BlockId]()
        """The host block that stands for `blank`."""
        self._retired: deque[Sequence] = deque()
        self._num_versions = 0
        self.num_looked_up = 0
        """Blocks that were found here or on the host so far. Each may have cost a hash."""
        self.sealed_by_step: list[tuple[BlockId, BlockHash]] = []
        """Blocks that the next step copies from the host."""

    @classmethod
    def of(cls, config: SchedulerConfig) -> Self:
        """An empty pool of this size."""
        return cls(config)

    def set_host(self, host: HostMemory) -> None:
        """Exchanges the memory below the pool, before anything is swapped."""
        self.host = host
        if host.pool.num_blocks:
            self._unread = {host.pool.take_blank(): block for block in self.blank}
            self.blank_on_host = frozenset(self._unread)

    def blocks_for(self, num_tokens: int) -> int:
        return self.config.blocks_for(num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        super().fork(parent, child)
        child.windows_end = parent.windows_end
        self.pool.touch(parent.state_blocks)
        child.state_blocks = list(parent.state_blocks)

    def cached(self, sequence: Sequence) -> list[BlockId]:
        """Sequences that are computed together share all blocks that they have in common only if each has the windows
        of the others."""
        is_alone = sequence.request.num_sequences == 1
        return self.cached_start(sequence).blocks if is_alone or self.states.size or not self.blank else []

    def reuse(self, sequence: Sequence, blocks: list[BlockId]) -> None:
        super().reuse(sequence, blocks)
        groups, end = range(self.num_groups), len(blocks) // self.num_groups
        log_blocks(self.pool.log, groups, sequence, 0, end)
        if self.states.size and (start := sequence.cached_start) is not None:
            # Noted here, not at each lookup: a lookup changes nothing that a replay would have to repeat.
            sequence.partings.add(start.num_found * self.block_size)
            self.states.begin(sequence, start.checkpoint, self.take)
            log_blocks(self.pool.log, self.names.of_state, sequence, max(end - 1, 0), end)
        sequence.cached_start = None

    def save(self, block: BlockId) -> BlockId:
        return self.host.save(block, self.pool.hash_of(block))

    def allocate_slots(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, int]]:
        """Gives sequences blocks for all their tokens. Blocks that a sequence before it computes count as cached.

        Raises OutOfBlocksError.
        """
        if len(sequences) == 1:
            return [self._allocate_one(each, self.cached_start(each).blocks) for each in sequences]
        if (leader := _leader(self, sequences)) is not None:
            return _allocate_behind(self, leader, sequences)
        if self.states.size:
            # Each sequence continues from a checkpoint of its own, which no other one may evict before.
            kept = [self.cached_start(each).all_blocks for each in sequences]
            for table in kept:
                self.pool.touch(table)
            starts = list[tuple[int, int]]()
            for each, table in zip(sequences, kept, strict=True):
                self.pool.free(table)
                starts.append(self._allocate_one(each, self.cached_start(each).blocks))
            return starts
        before: dict[PrefixHash, SequenceOf[BlockId | None]] = {}
        starts = list[tuple[int, int]]()
        for sequence in sequences:
            shared = [block for block in self._shared(sequence, before) if block is not None]
            self.reuse(sequence, shared)
            # The host may have only the windows that one of the sequences reads.
            table = shared if self.blank else self.more_cached(sequence, shared)
            sequence.block_table = self.extended(table, sequence)
            starts.append((len(table) // self.num_groups * self.block_size, len(table) // self.num_groups))
            _add_full_blocks(sequence, sequence.block_table, self.num_groups, before)
        return starts

    def free(self, *sequences: Sequence) -> None:
        if self.states.size:
            for sequence in sequences:
                sequence.block_table = self.states.with_checkpoints(sequence, self.num_groups)
                self.states.lasting += sequence.newest_checkpoint
        super().free(*sequences)
        if self.states.size:
            self.pool.free(*(sequence.state_blocks for sequence in sequences))
            for sequence in sequences:
                sequence.state_blocks, sequence.leader = [], None

    def num_new(self, num_entries: int, sequence: Sequence) -> int:
        if not self.blank:
            return super().num_new(num_entries, sequence)
        first, end = num_entries // self.num_groups, -(-sequence.num_tokens // self.block_size)
        num_windowed = self.windows.first_end(first, end, sequence) - first
        return self.layout.num_full * (end - first) + self.layout.num_windowed * num_windowed

    def extended(self, table: list[BlockId], sequence: Sequence) -> list[BlockId]:
        if not self.blank:
            return super().extended(table, sequence)
        blocks = self.take(self.num_new(len(table), sequence))
        first, end = len(table) // self.num_groups, -(-sequence.num_tokens // self.block_size)
        sequence.windows_end = near = self.windows.first_end(first, end, sequence)
        num_near, num_full = (near - first) * self.num_groups, self.layout.num_full
        table = [*table, *blocks[:num_near]]
        for index in range(end - near):
            place = num_near + index * num_full
            table += [*blocks[place : place + num_full], *self.windows.blanks]
        self.pool.touch(self.windows.blanks * (end - near))
        return table

    def swap_out(self, sequences: SequenceOf[Sequence]) -> None:
        if self.blank:
            for each in sequences:
                self.windows.free_before(each.block_table, 0, self.layout.first_block_read(each.num_swapped_tokens))
        super().swap_out(sequences)

    def take(self, count: int) -> list[BlockId]:
        """Takes blocks that the next step, or a later one, writes. Cached content in them is kept on the host. Raises
        OutOfBlocksError."""
        return self.pool.allocate(count, self.host.evicted if self.host.caches else None)

    def more_cached(self, sequence: Sequence, shared: list[BlockId], max_blocks: int = sys.maxsize) -> list[BlockId]:
        """The shared blocks, and the blocks of the sequence behind them that the host has, in blocks of the pool that
        the next step fills. Includes blocks between them that the pool has, and ends before the first block that is in
        neither, or before `max_blocks` of each group."""
        if not self.host.caches:
            return shared
        start = len(shared) // self.num_groups
        hashes = _find(self, sequence, start, lambda name: _is_here(self, name), max_blocks)
        end = len(hashes)
        self.num_looked_up += max(end - start, 0)
        if end <= start:
            return shared
        if self.states.size:
            self.states.begin_further(sequence, self.names.state(hashes[-1]), self.host)
        blocks: list[BlockId | None] = []
        found: list[tuple[int, BlockId, BlockHash]] = []
        for name in self.names.needed(hashes[start:], start):
            hit = [] if name is None else self.pool.hits((name,))
            if name is None or hit:
                hit = [*self.blank] if name is None else hit
                self.pool.touch(hit)
                blocks += hit
            elif (host := self.host.find(name)) is not None:
                self.host.pool.touch((host,))
                found.append((len(blocks), host, name))
                blocks.append(None)
        sealed: list[tuple[BlockId, BlockHash]] = []
        for (place, host, name), block in zip(found, self.take(len(found)), strict=True):
            self.host.load(host, block)
            blocks[place] = block
            self.pool.seal(block, name)
            sealed.append((block, name))
        self.sealed_by_step += sealed
        log_blocks(self.pool.log, range(self.num_groups), sequence, start, end, sealed)
        self.host.pool.free([host for _, host, _ in found])
        self.host.counts.from_host += len(found)
        return [*shared, *(block for block in blocks if block is not None)]

    def _shared(
        self, sequence: Sequence, before: Mapping[PrefixHash, SequenceOf[BlockId | None]]
    ) -> list[BlockId | None]:
        """The blocks at the start of a sequence that it takes from the sequences `before` it (None for a block that is
        not allocated yet), or else from the cache. The former win: a sequence that may take few cached blocks has its
        own blocks of the same content, and the cached ones have no holder then."""
        size, cached = self.num_groups, self.cached(sequence)
        shared: list[BlockId | None] = []
        for index, content in enumerate(sequence.shareable_hashes):
            place = index * size
            if content in before:
                shared += before[content]
            elif place < len(cached):
                shared += cached[place : place + size]
            else:
                break
        num_blocks = self.layout.hit_length(
            len(shared) // size, lambda index: self.blank.isdisjoint(shared[index * size : index * size + size])
        )
        return shared[: num_blocks * size]

    def blocks_to_allocate(self, sequences: SequenceOf[Sequence]) -> int:
        """Free blocks that `allocate_slots` takes, including cached ones. Depends only on the sequences and on the part
        of the cache that `versions` names."""
        if (leader := _leader(self, sequences)) is not None:
            start, end = self.cached_start(leader), num_shared(leader.request, self.config) * self.num_groups
            num_new = self.num_new(len(start.blocks), leader)
            num_new += sum(self.num_new(end, each) for each in sequences if each is not leader)
            return num_new + _num_held(self, [start]) + self.states.size * len(sequences)
        if len(sequences) == 1 or self.states.size:
            starts = [self.cached_start(each) for each in sequences]
            num_new = sum(
                _max_new(self, len(start.blocks), each) for start, each in zip(starts, sequences, strict=True)
            )
            return num_new + _num_held(self, starts) + self.states.size * len(sequences)
        before: dict[PrefixHash, SequenceOf[BlockId | None]] = {}
        hits, needed = set[BlockId](), 0
        for sequence in sequences:
            shared = self._shared(sequence, before)
            hits.update(block for block in shared if block is not None)
            num_new = self.num_new(len(shared), sequence)
            needed += num_new
            _add_full_blocks(sequence, [*shared, *[None] * num_new], self.num_groups, before)
        return needed + self.pool.num_free_of([*hits])

    def cache_full_blocks(self, sequence: Sequence, first: int, end: int) -> list[tuple[BlockId, BlockHash]]:
        """Seals the blocks with logical indices from `first` to before `end`, all of them full. Returns the blocks that
        became available for hits."""
        names = sequence.prefix_hashes.between(first, end, sequence.token_ids)
        if (size := self.num_groups) > 1:
            names = [name for content in names for name in (*self.names.full(content), *self.names.windowed(content))]
        pairs = zip(sequence.block_table[first * size : end * size], names, strict=True)
        pairs = [(block, name) for block, name in pairs if block not in self.blank] if self.blank else pairs
        # A sequence that continues from a checkpoint computes blocks behind it again.
        sealed = [(block, name) for block, name in pairs if self.pool.seal(block, name, takes_over=True)]
        log_blocks(self.pool.log, range(self.num_groups), sequence, first, end, sealed)
        return sealed

    def seal_checkpoint(self, checkpoint: Checkpoint) -> list[tuple[BlockId, BlockHash]]:
        """`States.seal`, which is logged."""
        sealed, end = self.states.seal(checkpoint), checkpoint.num_tokens // self.block_size
        log_blocks(self.pool.log, self.names.of_state, checkpoint.sequence, end - 1, end, sealed)
        return sealed

    def missing_hashes(
        self, sequences: SequenceOf[Sequence], tier: Container[BlockHash] | None = None
    ) -> tuple[list[BlockId], list[BlockHash]]:
        """The cached blocks of waiting sequences, and the hashes, each once, of the blocks that they may take from
        others and that neither pool nor host have. With a tier, up to the first block that it does not have either."""
        cached, missing = dict[BlockId, None](), dict[BlockHash, None]()

        def is_somewhere(name: BlockHash) -> bool:
            return tier is None or name in tier or _is_here(self, name)

        for sequence in sequences:
            start = self.cached_start(sequence)
            cached.update(dict.fromkeys(start.all_blocks))
            num_cached = len(start.blocks) // self.num_groups
            hashes = _find(self, sequence, num_cached, is_somewhere)
            # The newest block of a request that moves may not come.
            names = self.names.needed(hashes[num_cached:], num_cached, num_spare=tier is None)
            for name in filter(
                None, itertools.chain(names, self.states.to_fetch(sequence, hashes, is_moved=tier is None))
            ):
                if hits := self.pool.hits([name]):
                    cached.update(dict.fromkeys(hits))
                elif name not in self.host:
                    missing[name] = None
        return [block for block in cached if block not in self.blank], list(missing)

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """`free` for finished sequences. Many may come at once: frees some now, and the others in `reclaim`."""
        self._retired.extend(sequences)
        self.reclaim()

    def reclaim(self) -> bool:
        """Frees the blocks of some retired sequences, oldest first: at least one sequence, and no more than a short
        call can free. Returns whether there were any."""
        sequences: list[Sequence] = []
        num_blocks = 0
        while self._retired and num_blocks < _MAX_RECLAIMED_BLOCKS and len(sequences) < _MAX_RECLAIMED:
            sequences.append(self._retired.popleft())
            num_blocks += len(sequences[-1].block_table)
        if sequences:
            self.free(*sequences)
        return bool(sequences)

    @property
    def retired(self) -> tuple[Sequence, ...]:
        """Finished sequences whose blocks will be free soon."""
        return tuple(self._retired)

    def cached_start(self, sequence: Sequence, max_blocks: int = sys.maxsize) -> CachedStart:
        """The cached blocks at the start of a waiting or swapped sequence, looked up to `max_blocks` or further. Hashes
        only few blocks beyond the cached ones. Earlier results are looked up again only if they changed."""
        start = sequence.cached_start
        if start is None or not self.pool.is_current(start):
            self._num_versions += 1
            start = sequence.cached_start = CachedStart(self.pool, self._num_versions, self.pool.num_changes)
        max_blocks = min(max_blocks, self.states.num_shareable(sequence))
        if self.blank or self.states.size:
            self._find_all_groups(sequence, start, self._find_start(sequence, start, start.full, max_blocks))
        else:
            self._find_start(sequence, start, start.blocks, max_blocks)
        return start

    def _find_start(self, sequence: Sequence, start: CachedStart, blocks: list[BlockId], max_blocks: int) -> int:
        """Extends the cached `blocks` of the full groups, up to `max_blocks` of each. Returns the number of each."""
        size = self.layout.num_full
        if not size:
            return max_blocks
        first, count = len(blocks) // size, _HASHES_AT_FIRST
        while (num_known := len(blocks) // size) < max_blocks:
            end = min(first + count, max_blocks)
            names = sequence.prefix_hashes.between(num_known, end, sequence.token_ids)
            if size > 1:
                names = list(itertools.chain(*map(self.names.full, names)))
            found = self.pool.hits(names)
            del found[len(found) // size * size :]
            if found:
                self.num_looked_up += len(found) // size
                self._num_versions += 1
                self.pool.extend(start, blocks, found, self._num_versions)
            if len(blocks) // size < end:
                break
            count *= 4
        return len(blocks) // size

    def _find_all_groups(self, sequence: Sequence, start: CachedStart, num_found: int) -> None:
        """Finds the longest start, of the `num_found` blocks that the full groups have, that all groups have."""
        if start.num_seals == self.pool.num_seals and start.num_found == num_found:
            return
        start.num_seals, start.num_found = self.pool.num_seals, num_found
        hashes = sequence.prefix_hashes.first(num_found, sequence.token_ids)
        windowed: dict[int, list[BlockId]] = {}

        def has_windowed(index: int) -> bool:
            windowed[index] = self.pool.hits(self.names.windowed(hashes[index]))
            return len(windowed[index]) == self.layout.num_windowed

        size, end = self.layout.num_full, self.layout.hit_length(num_found, has_windowed)
        checkpoint: list[BlockId] = []
        if self.states.size:
            end, checkpoint = self.states.find(
                hashes,
                end,
                lambda count: _may_continue(sequence, count) and self.layout.hit_length(count, has_windowed) == count,
            )
        first = self.layout.first_block_read(end * self.block_size)
        blocks: list[BlockId] = []
        for index in range(end):
            blocks += start.full[index * size : index * size + size]
            blocks += windowed[index] if index >= first else self.windows.blanks
        if blocks != start.blocks or checkpoint != start.checkpoint:
            self._num_versions += 1
            start.blocks, start.checkpoint, start.num_free = [], [], 0
            self.pool.extend(start, start.blocks, blocks, self._num_versions)
            self.pool.extend(start, start.checkpoint, checkpoint, self._num_versions)

    def versions(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """The state of the cache that `blocks_to_allocate` and `blocks_to_swap_in` depend on."""
        return [self.cached_start(sequence).version for sequence in sequences]

    def next_hashes(self, sequence: Sequence, count: int) -> tuple[int, list[PrefixHash]]:
        """The number of cached blocks at the start of the sequence, and the hashes of blocks after them that the
        sequence may take from others: all blocks that the full groups have, and at most `count` more."""
        start = self.cached_start(sequence)
        first = len(start.blocks) // self.num_groups
        end = min(max(first, start.num_found) + count, self.states.num_shareable(sequence))
        return first, sequence.prefix_hashes.between(first, end, sequence.token_ids)


def _leader(blocks: BlockManager, sequences: SequenceOf[Sequence]) -> Sequence | None:
    """The sequence that has, or computes, the start that all of these share; None if each continues from a
    checkpoint of its own, or if there are no states."""
    if len(sequences) == 1 or not blocks.states.size:
        return None
    end = num_shared(sequences[0].request, blocks.config)
    for each in sequences:
        if len(blocks.cached_start(each).blocks) < end * blocks.num_groups:
            return each
    return sequences[0] if max_blocks_apart(sequences[0].request, blocks.config) is None else None


def _allocate_behind(blocks: BlockManager, leader: Sequence, sequences: SequenceOf[Sequence]) -> list[tuple[int, int]]:
    """`allocate_slots`: all share the blocks of the leader at the start of their prompt. If it has to compute some
    of these, the others wait for its state behind them."""
    end, cached = num_shared(leader.request, blocks.config), blocks.cached_start(leader).blocks
    blocks.reuse(leader, cached)
    cached = blocks.more_cached(leader, cached, end)
    leader.block_table = blocks.extended(cached, leader)
    num_cached, shared = len(cached) // blocks.num_groups, leader.block_table[: end * blocks.num_groups]
    for each in sequences:
        if each is leader:
            continue
        blocks.pool.touch(shared)
        each.block_table, each.cached_start = blocks.extended(shared, each), None
        blocks.states.begin(each, [], blocks.take)
        if num_cached < end:
            each.leader = leader
        elif end:
            (content,) = each.prefix_hashes.between(end - 1, end, each.token_ids)
            blocks.states.begin_further(each, blocks.names.state(content), blocks.host)
    ends = (num_cached if each is leader else end for each in sequences)
    return [(number * blocks.block_size, number) for number in ends]


def taken_from_cache(
    blocks: BlockManager, sequences: SequenceOf[Sequence], *, with_checkpoints: bool = True
) -> list[BlockId]:
    """The cached blocks that `allocate_slots` takes, each once."""
    leader = _leader(blocks, sequences)
    starts = [blocks.cached_start(each) for each in (sequences if leader is None else [leader])]
    tables = (start.all_blocks if with_checkpoints else start.blocks for start in starts)
    return list(dict.fromkeys(itertools.chain(*tables)))


def _max_new(blocks: BlockManager, num_entries: int, sequence: Sequence) -> int:
    """The maximum number of blocks that a sequence takes behind its cached start of `num_entries`, the blocks that come
    from the host included."""
    if not (blocks.blank and blocks.host.caches):
        return blocks.num_new(num_entries, sequence)
    first, end = num_entries // blocks.num_groups, -(-sequence.num_tokens // blocks.block_size)
    num_windowed = blocks.windows.max_at_first(first, end, sequence)
    return blocks.layout.num_full * (end - first) + blocks.layout.num_windowed * num_windowed


def _num_held(blocks: BlockManager, starts: SequenceOf[CachedStart]) -> int:
    """Free blocks that sequences with these cached starts take of the cache, until the step is planned. With blocks of
    the host, each may continue from a further checkpoint, and blocks of that may be in the pool."""
    goes_further = blocks.states.size > 0 and blocks.host.caches
    if len(starts) == 1 and not goes_further:
        return starts[0].num_free
    tables = (start.blocks if goes_further else start.all_blocks for start in starts)
    num_free = blocks.pool.num_free_of(list(dict.fromkeys(itertools.chain(*tables))))
    return num_free + goes_further * blocks.states.size * len(starts)


def _may_continue(sequence: Sequence, num_blocks: int) -> bool:
    """Whether a sequence may continue from a checkpoint after this number of token blocks. One that has output may not
    begin with the last token of its prompt, which would be the only prompt token of its step."""
    return num_blocks * sequence.prefix_hashes.block_size != sequence.num_prompt_tokens - 1


def num_cached(blocks: BlockManager, sequence: Sequence) -> int:
    """Cached blocks at the start of a waiting sequence, among its first _MAX_HASHES_AT_ARRIVAL."""
    return len(blocks.cached_start(sequence, _MAX_HASHES_AT_ARRIVAL).blocks) // blocks.num_groups


def _is_here(blocks: BlockManager, name: BlockHash) -> bool:
    return bool(blocks.pool.hits((name,))) or name in blocks.host


def _find(
    blocks: BlockManager,
    sequence: Sequence,
    first: int,
    is_found: Callable[[BlockHash], bool],
    max_blocks: int = sys.maxsize,
) -> list[PrefixHash]:
    """The hashes of the longest start of the sequence, of at most `max_blocks`, whose needed blocks are all found. The
    blocks of the full groups before the logical index `first` are known to be found."""
    hashes = sequence.prefix_hashes.first(first, sequence.token_ids)
    for index in range(first, min(blocks.states.num_shareable(sequence), max_blocks)):
        (content,) = sequence.prefix_hashes.between(index, index + 1, sequence.token_ids)
        if not all(map(is_found, blocks.names.full(content))):
            break
        hashes.append(content)
    windowed = blocks.names.windowed

    def hit_length(num_blocks: int) -> int:
        return blocks.layout.hit_length(num_blocks, lambda index: all(map(is_found, windowed(hashes[index]))))

    end = hit_length(len(hashes))

    def has_checkpoint(num_blocks: int) -> bool:
        names = blocks.names.state(hashes[num_blocks - 1])
        return _may_continue(sequence, num_blocks) and all(map(is_found, names))

    while blocks.states.size and end and not has_checkpoint(end):
        end = hit_length(end - 1)
    return hashes[:end]


def _add_full_blocks(
    sequence: Sequence,
    table: SequenceOf[BlockId | None],
    num_groups: int,
    before: dict[PrefixHash, SequenceOf[BlockId | None]],
) -> None:
    """Adds the full blocks of a sequence with this table, by the hashes of their tokens."""
    for index, content in enumerate(sequence.full_hashes):
        before[content] = table[index * num_groups : index * num_groups + num_groups]


def sealed_start(blocks: BlockManager, sequence: Sequence, num_blocks: int) -> Iterator[tuple[BlockId, BlockHash]]:
    """The sealed blocks of the pool at the start of the sequence, up to `num_blocks` and to the first that a full group
    lacks: all of the full groups, of the windowed groups the blocks that the tokens from one token block before the end
    on read, and the last checkpoint."""
    first = blocks.layout.first_block_read(max(num_blocks - 1, 0) * blocks.block_size)
    for index, content in enumerate(sequence.prefix_hashes.first(num_blocks, sequence.token_ids)):
        names = blocks.names.full(content)
        found = blocks.pool.hits(names)
        yield from zip(found, names, strict=False)
        if len(found) < len(names):
            return
        for name in blocks.names.windowed(content) if index >= first else ():
            yield from zip(blocks.pool.hits((name,)), (name,), strict=False)
    if blocks.states.size:
        hashes = sequence.prefix_hashes.first(num_blocks, sequence.token_ids)
        end, found = blocks.states.find(hashes, num_blocks, lambda _: True)
        yield from zip(found, blocks.names.state(hashes[end - 1]), strict=True) if end else ()


def log_blocks(
    log: CacheLog | None,
    groups: range,
    sequence: Sequence,
    first: int,
    end: int,
    sealed: SequenceOf[tuple[BlockId, BlockHash]] = (),
) -> None:
    """Logs the full blocks of a sequence in these groups, with logical indices from `first` to before `end`: the
    content of the `sealed` ones, which are new in the cache, and of blocks whose tokens the log does not know."""
    if log is None or not (sealed or log.unread):
        return
    fresh = {name for _, name in sealed}
    for index, content in enumerate(sequence.prefix_hashes.between(first, end, sequence.token_ids), first):
        for group in groups:
            name = in_group(content, group)
            if name in fresh:
                log.stored(name, cached_tokens(sequence, index, group))
            elif name in log.unread:
                log.read(name, cached_tokens(sequence, index, group))


def cached_tokens(sequence: Sequence, index: int, group: int) -> CachedTokens:
    """The content of the sequence's block of a group with this logical index."""
    parent = sequence.prefix_hashes.between(index - 1, index, sequence.token_ids)[0] if index else None
    size = sequence.prefix_hashes.block_size
    token_ids = sequence.token_ids[index * size : index * size + size]
    if (adapter := sequence.request.adapter) is None:
        return CachedTokens(parent, token_ids, group=group)
    return CachedTokens(parent, token_ids, adapter.digest, adapter.name, group)


class VictimTables:
    """Counts the blocks that become free if block tables are freed in turn. `taken` blocks do not become free."""

    def __init__(self, pool: PrefixIndex, taken: Iterable[BlockId]) -> None:
        self._pool = pool
        self._taken = set(taken)
        self._num_freed: Counter[BlockId] = Counter()
        """For each block with several holders, the number of its holders that were freed."""

    def free(self, table: SequenceOf[BlockId]) -> int:
        """Blocks that become free with this table, after the earlier ones."""
        counts = self._pool.ref_counts_of(table)
        freed = num_unshared = counts.count(1)
        if self._taken:
            freed -= sum(count == 1 and block in self._taken for block, count in zip(table, counts, strict=True))
        if num_unshared < len(table):
            for block, count in zip(table, counts, strict=True):
                if count > 1:
                    self._num_freed[block] += 1
                    freed += self._num_freed[block] == count and block not in self._taken
        return freed
