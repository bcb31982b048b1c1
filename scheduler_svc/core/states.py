"""States: what layers keep of a sequence instead of keys and values, in blocks of the pool.

A state has one size, however long the sequence is. The layers of a model keep it in `SchedulerConfig.state_blocks`
blocks, which the sequence holds while it is in the batch, and which each step changes. So the state of an earlier token
is gone, unless it was copied: a **checkpoint** is a copy of the state after a whole number of token blocks. Its blocks
are sealed under names of that place, found there by later sequences, and handed out anew when they are the least
recently used, as all blocks are.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import BlockNames, HostMemory, PrefixIndex
from scheduler_svc.core.request import max_blocks_apart, num_shared
from scheduler_svc.core.sequence import Sequence

OUTPUT_INTERVAL = 64
"""Tokens between checkpoints of output, rounded up to whole blocks. All but the newest of a sequence are evicted before
other blocks."""

PROMPT_INTERVAL = 1024
"""Tokens between checkpoints of a prompt, rounded up to whole blocks, in addition to the one at its end. After a loss
of the worker no more than these are computed again. If states are large, most of these checkpoints give way to the
next (`States.gives_way`)."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A copy of a row's state that a step in flight makes.

    Attributes:
        incarnation: The row's, as in `RowTable`.
        num_tokens: The state is the one after this number of tokens of the sequence.
        is_certain: The step computes them in any case. Otherwise only if the row's tokens all come.
        blocks: Hold the copy, with a reference until the step's result came.
    """

    row: int
    incarnation: int
    sequence: Sequence
    num_tokens: int
    is_certain: bool
    blocks: list[BlockId]


class States:
    """Gives sequences blocks for their states, and plans and finds checkpoints.

    Attributes:
        size: Blocks of a state; 0 if no layer keeps one.
        copies: Pairs (source block, destination block) that the next step copies before it computes.
        lasting: Newest checkpoints, which would have given way to the next ones, of sequences that left the batch: no
            later one takes their place. The next step seals them again.
    """

    def __init__(self, config: SchedulerConfig, pool: PrefixIndex, names: BlockNames) -> None:
        self.size, self._config = config.state_blocks, config
        self._block_size, self._pool, self._names = config.block_size, pool, names
        self._has_output = config.output_checkpoints
        # Whole blocks, which a checkpoint is named by.
        self._output_interval, self._prompt_interval = (
            -(-interval // self._block_size) * self._block_size for interval in (OUTPUT_INTERVAL, PROMPT_INTERVAL)
        )
        # Checkpoints that stay take no more memory than the tokens before them, however large a state is.
        self._lasting_interval = self._prompt_interval
        while self._lasting_interval < self.size * self._block_size:
            self._lasting_interval *= 2
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.lasting: list[tuple[BlockId, BlockHash]] = []
        self._sources: list[BlockId] = []

    @property
    def held(self) -> list[BlockId]:
        """Checkpoints that the next step copies, each with a reference."""
        return self._sources

    def begin(self, sequence: Sequence, checkpoint: list[BlockId], take: Callable[[int], list[BlockId]]) -> None:
        """Gives a sequence, which enters the batch, blocks for its state: a copy of the checkpoint that it continues
        from, or zeros if that is empty. Raises what `take` raises."""
        self._pool.touch(checkpoint)
        sequence.state_blocks = take(self.size)
        self._sources += checkpoint
        self.copies += zip(checkpoint, sequence.state_blocks, strict=False)

    def begin_further(self, sequence: Sequence, names: SequenceOf[BlockHash], host: HostMemory) -> None:
        """Makes a sequence begin with the checkpoint of these names, instead of the one that it was given. Some of
        its blocks are here, and the others on the host."""
        own = set(sequence.state_blocks)
        given_up = [source for source, block in self.copies if block in own]
        self.copies = [(source, block) for source, block in self.copies if block not in own]
        self._pool.free(given_up)
        for source in given_up:
            self._sources.remove(source)
        for name, block in zip(names, sequence.state_blocks, strict=True):
            if hits := self._pool.hits((name,)):
                self._pool.touch(hits)
                self._sources += hits
                self.copies.append((hits[0], block))
            elif (saved := host.find(name)) is not None:
                host.pool.touch((saved,))
                host.load(saved, block)
                host.pool.free((saved,))
                host.counts.from_host += 1

    def separate(self, sequence: Sequence, take: Callable[[int], list[BlockId]]) -> bool:
        """Gives a sequence that is about to change its state its own copy, if another one shares it. Returns whether it
        did. The last holder changes it in place."""
        shared = sequence.state_blocks
        if self._pool.ref_count(shared[0]) == 1:
            return False
        sequence.state_blocks = take(self.size)
        self.copies += zip(shared, sequence.state_blocks, strict=True)
        self._pool.free(shared)
        return True

    def take_copies(self) -> list[tuple[BlockId, BlockId]]:
        """The copies of a finished step."""
        copies, self.copies = self.copies, []
        self._pool.free(self._sources)
        self._sources = []
        return copies

    def find(
        self, hashes: SequenceOf[PrefixHash], num_blocks: int, is_whole: Callable[[int], bool]
    ) -> tuple[int, list[BlockId]]:
        """The longest start of a sequence, of at most `num_blocks` token blocks with these hashes, at whose end there
        is a checkpoint, and the blocks of that; 0 and none if there is none. `is_whole` says whether the other layers
        have all that they need of a start of this number of blocks."""
        for end in range(num_blocks, 0, -1):
            content = hashes[end - 1]
            # Most places have no checkpoint.
            if self._pool.hits((in_group(content, self._names.of_state.start),)) and is_whole(end):
                found = self._pool.hits(self._names.state(content))
                if len(found) == self.size:
                    return end, found
        return 0, []

    def wanted(self, sequence: Sequence, start: int, end: int, certain_end: int | None = None) -> Iterator[int]:
        """The numbers of tokens, above `start` and up to `end`, after which there should be a checkpoint: before the
        end of the prompt, which the next prompt of a conversation begins with, where another sequence went another
        way, and at intervals. If the sequence may come only to `certain_end`, there are several of output, and
        the last one that it comes to is kept."""
        size, num_prompt = self._block_size, sequence.num_prompt_tokens
        places = {(num_prompt - 2) // size * size, *sequence.partings}
        prompt_end = min(end, num_prompt)
        interval = self._prompt_interval
        places.update(range(start // interval * interval, prompt_end + 1, interval))
        if self._has_output:
            interval = self._output_interval
            first, last = (end if certain_end is None else certain_end) // interval, end // interval
            ends = (number * interval for number in range(first, last + 1))
            places.update(each for each in ends if each > num_prompt)
        return (place for place in sorted(places) if start < place <= end)

    def num_shareable(self, sequence: Sequence) -> int:
        """Blocks of tokens that a sequence may take from others. If layers keep states, a prompt token is never
        computed as the only one of a step: its keys would be rounded otherwise. Sequences of a request that may not
        continue apart take what they share."""
        if not self.size:
            return sequence.num_shareable
        most, request = max(sequence.max_cached_tokens - 1, 0) // self._block_size, sequence.request
        if request.num_sequences > 1 and max_blocks_apart(request, self._config) is None:
            return min(most, num_shared(request, self._config))
        return most

    def to_fetch(self, sequence: Sequence, hashes: SequenceOf[PrefixHash], *, is_moved: bool) -> Iterator[BlockHash]:
        """The names of the checkpoint at the end of a start with these hashes. Another replica, from which a sequence
        moves, has one of the last two that it was to make."""
        if self.size and hashes:
            for end in self.last_places(sequence, len(hashes)) if is_moved else [len(hashes)]:
                yield from self._names.state(hashes[end - 1])

    def last_places(self, sequence: Sequence, num_blocks: int) -> list[int]:
        """The last two of the places, up to `num_blocks` blocks, at which a sequence that ran elsewhere had
        checkpoints, in blocks."""
        places, end = list[int](), num_blocks * self._block_size
        while end and len(places) < 2:
            places.append(max(self.wanted(sequence, 0, end), default=0))
            end = max(places[-1] - self._block_size, 0)
        return [place // self._block_size for place in places if place]

    def with_checkpoints(self, sequence: Sequence, num_groups: int) -> list[BlockId]:
        """The block table of a sequence, and in it some of its checkpoints behind their tokens, with a further
        reference. If all of that is freed, these are evicted after the tokens behind them and before the tokens that
        they need; other checkpoints are older. Their distances from the end about double, so that a sequence which
        loses some of its end computes about as many other tokens again."""
        table, start, gap, places = list[BlockId](), 0, 0, list[int]()
        for place in reversed([*self.wanted(sequence, 0, sequence.num_tokens)]):
            if (distance := sequence.num_tokens - place) >= gap:
                places.append(place)
                gap = 2 * distance
        for place in reversed(places):
            index = place // self._block_size
            (content,) = sequence.prefix_hashes.between(index - 1, index, sequence.token_ids)
            found = self._pool.hits(self._names.state(content))
            self._pool.touch(found)
            table += [*sequence.block_table[start : index * num_groups], *found]
            start = index * num_groups
        return [*table, *sequence.block_table[start:]]

    def gives_way(self, checkpoint: Checkpoint) -> bool:
        """Whether the sequence's next checkpoint takes the place of this one: it is one of output, or it is within a
        prompt, where no sequence parts, and a state takes the memory of more tokens than are between two of these."""
        sequence, place = checkpoint.sequence, checkpoint.num_tokens
        if place > sequence.num_prompt_tokens:
            return True
        is_last = place == (sequence.num_prompt_tokens - 2) // self._block_size * self._block_size
        return not is_last and bool(place % self._lasting_interval) and place not in sequence.partings

    def seal(self, checkpoint: Checkpoint) -> list[tuple[BlockId, BlockHash]]:
        """Makes a checkpoint, whose step is done, available. If the one before gives way to it, that is the next that
        is evicted. Returns the blocks that became available. Blocks of an earlier sequence with the same tokens, which
        keep the names, are as recent as new ones: they were perhaps the next to give way."""
        sequence, index = checkpoint.sequence, checkpoint.num_tokens // self._block_size
        (content,) = sequence.prefix_hashes.between(index - 1, index, sequence.token_ids)
        names = self._names.state(content)
        pairs = zip(checkpoint.blocks, names, strict=True)
        sealed = [(block, name) for block, name in pairs if self._pool.seal(block, name)]
        if len(sealed) < len(names):
            found = self._pool.hits(names)
            self._pool.touch(found)
            self._pool.free(found)
        self._pool.evict_first(self._pool.still_sealed(sequence.newest_checkpoint))
        sequence.newest_checkpoint = sealed if self.gives_way(checkpoint) else []
        return sealed
