"""Host memory below the pool: what it holds, and the copies that the next step makes between both.

Groups that were swapped out have blocks here. If the workers say so, blocks that the pool hands out for other content
are copied here before, and found here by their hashes until others need the room, least recently used first. Both are
blocks of one `BlockPool`: a sealed block of a group that is swapped can be hit, and a block that is here already is not
copied again.

A step copies to the host before it copies from there, and both before it writes anything else. So a block that the next
step copies to the pool is held until that step is finished: nothing may be copied to its place before.
"""

from scheduler_svc.core.block_pool import BlockHash, BlockId, BlockPool
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.moves import MoveCounts


class HostMemory:
    """The blocks of the host.

    Attributes:
        caches: Whether it keeps blocks that the pool evicts. Without that it is for groups that are swapped.
        log: What is told which blocks come and leave; None if nobody asks.
        counts: Counts the blocks that were evicted and copied here, and those that were hit here.
    """

    def __init__(self, num_blocks: int, counts: MoveCounts, *, caches: bool = False) -> None:
        self.pool = BlockPool(num_blocks)
        self.caches = caches and num_blocks > 0
        self.log: CacheLog | None = None
        self.counts = counts
        # Pool block by host block, and the other way round.
        self._out: dict[BlockId, BlockId] = {}
        self._in: dict[BlockId, BlockId] = {}

    @property
    def has_copies(self) -> bool:
        """Whether the next step copies blocks."""
        return bool(self._out or self._in)

    @property
    def loading(self) -> list[BlockId]:
        """The host blocks that the next step copies to the pool, each with a reference for that."""
        return list(self._in.values())

    def __contains__(self, content: BlockHash) -> bool:
        return self.find(content) is not None

    def find(self, content: BlockHash) -> BlockId | None:
        """The host block with this content."""
        return next(iter(self.pool.hits((content,))), None)

    def save(self, block: BlockId, content: BlockHash | None) -> BlockId:
        """Copies a block of the pool, whose content is final where it is sealed, unless that is here. Returns the host
        block, with a reference. Raises OutOfBlocksError."""
        name = content if self.caches else None
        if name is not None and (known := self.find(name)) is not None:
            self.pool.touch((known,))
            return known
        (host,) = self.pool.allocate(1, self._forgotten)
        # A host block that was freed since it was to be written, before any plan, gets this content instead.
        self._out[host] = block
        if name is not None:
            self.pool.seal(host, name)
            if self.log is not None:
                self.log.host_changed(name, is_stored=True)
        return host

    def evicted(self, block: BlockId, content: BlockHash) -> None:
        """A sealed block of the pool is handed out, and will be written by the next step or later. It stays here as the
        one that was used last."""
        if self.pool.num_free or content in self:
            num_out = len(self._out)
            self.pool.free((self.save(block, content),))
            self.counts.to_host += len(self._out) - num_out

    def load(self, host: BlockId, block: BlockId) -> None:
        """Copies a block to the pool. It may be freed here from now on."""
        self.pool.touch((host,))
        self._in[block] = host

    def take_copies(self) -> tuple[list[tuple[BlockId, BlockId]], list[tuple[BlockId, BlockId]]]:
        """The copies of a step that is finished: pairs (pool block, host block), and pairs the other way round."""
        if not self.has_copies:
            return [], []
        copies = (
            [(block, host) for host, block in self._out.items()],
            [(host, block) for block, host in self._in.items()],
        )
        # The first ones of a prefix are used last.
        self.pool.free(self.loading)
        self._out, self._in = {}, {}
        return copies

    def forget_cached(self) -> None:
        """Forgets what no group holds."""
        self.pool.free(self.pool.allocate(self.pool.num_free, self._forgotten))

    def _forgotten(self, _: BlockId, content: BlockHash) -> None:
        if self.log is not None:
            self.log.host_changed(content, is_stored=False)
