"""Host memory below the pool: its blocks, and the copies that the next step makes between it and the pool.

Swapped groups have their blocks here. If the workers support it, blocks that the pool evicts are first copied here and
found here by their hashes until others need the room, least recently used first. Both kinds are blocks of one
`PrefixIndex`: a sealed block of a swapped group can be hit, and a block that is here already is not copied again.

A step first copies blocks to the host, then from the host, and then writes other blocks. So a block that the next step
copies to the pool is held until that step is planned: nothing may be copied to its place before.
"""

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.moves import MoveCounts
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.block_tables import HostBlocks
from scheduler_svc.core.prefix_index import PrefixIndex


class HostMemory(HostBlocks):
    """The blocks of the host.

    Attributes:
        caches: Whether it also keeps blocks that the pool evicts. Otherwise it holds only swapped groups.
        log: Records which blocks come and leave; None if no process reads it.
        counts: Counts blocks that were evicted and copied here, and blocks that were hit here.
    """

    def __init__(self, num_blocks: int, counts: MoveCounts, *, caches: bool = False) -> None:
        pool = PrefixIndex(num_blocks)
        super().__init__(pool)
        self.pool = pool
        self.caches = caches and num_blocks > 0
        self.log: CacheLog | None = None
        self.counts = counts

    def __contains__(self, content: BlockHash) -> bool:
        return self.find(content) is not None

    def find(self, content: BlockHash) -> BlockId | None:
        """The host block with this content."""
        return next(iter(self.pool.hits((content,))), None)

    def save(self, block: BlockId, content: BlockHash | None) -> BlockId:
        """Copies a block of the pool, unless its content is here already. The content of a sealed block is final.
        Returns the host block, with a reference. Raises OutOfBlocksError."""
        name = content if self.caches else None
        if name is not None and (known := self.find(name)) is not None:
            self.pool.touch((known,))
            return known
        (host,) = self.pool.allocate(1, self._forgotten)
        self.saving[host] = block
        if name is not None:
            self.pool.seal(host, name)
            if self.log is not None:
                self.log.host_changed(name, is_stored=True)
        return host

    def evicted(self, block: BlockId, content: BlockHash) -> None:
        """A sealed block of the pool was handed out; the next step or a later one writes it. Its content stays here as
        the most recently used."""
        if self.pool.num_free or content in self:
            num_out = len(self.saving)
            self.pool.free((self.save(block, content),))
            self.counts.to_host += len(self.saving) - num_out

    def forget_cached(self) -> None:
        """Forgets the blocks that no group holds."""
        self.pool.free(self.pool.allocate(self.pool.num_free, self._forgotten))

    def _forgotten(self, _: BlockId, content: BlockHash) -> None:
        if self.log is not None:
            self.log.host_changed(content, is_stored=False)
