"""Changes of a prefix cache since they were last read. The log is optional: without one nothing is recorded. A log
holds the net changes of the content, not a history, so its size is at most twice the number of blocks in the pool and
in the tiers below it."""

from collections.abc import Container
from dataclasses import dataclass, field

from quire.messages.prefix_hashes import BlockHash, PrefixHash


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """The content of a block: its tokens, the block `parent` before it (None at the start of a prompt), the digest and
    name of the adapter that computed them (both None for the base model), and its group of layers."""

    parent: PrefixHash | None
    token_ids: list[int]
    adapter_digest: bytes | None = None
    adapter_name: str | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes of a prefix cache, in the order in which a reader applies them: all cleared, then removed, then stored.

    A block in `stored` has None if its tokens are not known: an earlier scheduler sealed it, or it came from elsewhere.
    It is stored again, with its tokens, when a request uses or computes it. A parent comes before the blocks that
    follow it.

    `tier_stored` and `tier_removed` are changes of the tier below the pool. A block may be in both at once. Its tokens
    are the tokens of the pool's block of the same name, and it is stored again when its tokens become known.
    `host_stored` and `host_removed` are the same for host memory.
    """

    is_cleared: bool
    removed: list[BlockHash]
    stored: dict[BlockHash, CachedTokens | None]
    tier_stored: list[BlockHash] = field(default_factory=list[BlockHash])
    tier_removed: list[BlockHash] = field(default_factory=list[BlockHash])
    host_stored: list[BlockHash] = field(default_factory=list[BlockHash])
    host_removed: list[BlockHash] = field(default_factory=list[BlockHash])


class CacheLog:
    """Changes of one prefix cache. A block that came and left between two calls of `take` is in neither result.

    A new log reports that all was cleared; it does not know which blocks the cache holds already.

    Attributes:
        tier: Which blocks are in the tier below the pool.
        host: Which blocks are in host memory.
    """

    def __init__(self) -> None:
        self.tier: Container[BlockHash] = ()
        self.host: Container[BlockHash] = ()
        self._is_cleared = True
        self._removed: dict[BlockHash, None] = {}
        self._stored: dict[BlockHash, CachedTokens | None] = {}
        # Whether each block entered the tier or left it, and the same for host memory. None for a block that was there
        # before and whose tokens became known.
        self._in_tier: dict[BlockHash, bool | None] = {}
        self._in_host: dict[BlockHash, bool | None] = {}
        self.unread: set[BlockHash] = set()
        """Blocks whose tokens are not known."""
        # Blocks of `_stored` that `take` has returned before.
        self._retold: set[BlockHash] = set()

    def stored(self, content: BlockHash, tokens: CachedTokens) -> None:
        """A block was sealed."""
        if content in self._removed:
            # For the reader it never left, but its tokens may have been unknown.
            del self._removed[content]
            self._retold.add(content)
        self._stored[content] = tokens

    def restored(self, content: BlockHash) -> None:
        """A block that an earlier scheduler sealed, or that came from elsewhere, is in the cache."""
        self._stored[content] = None
        self.unread.add(content)

    def removed(self, content: BlockHash) -> None:
        """A block was handed out for other content."""
        self.unread.discard(content)
        is_new = content in self._stored and content not in self._retold
        self._stored.pop(content, None)
        self._retold.discard(content)
        if not is_new:
            self._removed[content] = None

    def cleared(self) -> None:
        """The pool is gone, and so is the knowledge about the tiers."""
        self._is_cleared = True
        self._removed, self._stored, self._retold, self._in_tier, self._in_host = {}, {}, set(), {}, {}
        self.unread.clear()

    def tier_changed(self, content: BlockHash, *, is_stored: bool) -> None:
        _note(self._in_tier, content, is_stored=is_stored)

    def host_changed(self, content: BlockHash, *, is_stored: bool) -> None:
        _note(self._in_host, content, is_stored=is_stored)

    def read(self, content: BlockHash, tokens: CachedTokens) -> None:
        """A block's tokens are known now."""
        self.unread.discard(content)
        if content in self.tier:
            self._in_tier.setdefault(content, None)
        if content in self.host:
            self._in_host.setdefault(content, None)
        if content not in self._stored:
            self._retold.add(content)
        self._stored[content] = tokens

    def take(self) -> CacheChanges | None:
        """The changes since the last call; None if there are none."""
        in_tier, in_host = self._in_tier, self._in_host
        if not (self._is_cleared or self._removed or self._stored or in_tier or in_host):
            return None
        changes = CacheChanges(
            self._is_cleared,
            list(self._removed),
            _parents_first(self._stored),
            *_parted(in_tier),
            *_parted(in_host),
        )
        self._is_cleared = False
        self._removed, self._stored, self._retold, self._in_tier, self._in_host = {}, {}, set(), {}, {}
        return changes


def _note(changes: dict[BlockHash, bool | None], content: BlockHash, *, is_stored: bool) -> None:
    before = changes.pop(content, is_stored)
    if before is None:
        changes[content] = None if is_stored else False
    elif before is is_stored:
        changes[content] = is_stored


def _parted(changes: dict[BlockHash, bool | None]) -> tuple[list[BlockHash], list[BlockHash]]:
    """The blocks to report as stored, and the blocks that left."""
    left = [content for content, is_stored in changes.items() if is_stored is False]
    return [content for content in changes if changes[content] is not False], left


def _parents_first(stored: dict[BlockHash, CachedTokens | None]) -> dict[BlockHash, CachedTokens | None]:
    """The same blocks, each after its parent, which may have come or become known later."""
    ordered: dict[BlockHash, CachedTokens | None] = {}
    for content in stored:
        chain: list[BlockHash] = []
        place: BlockHash | None = content
        while place is not None and place in stored and place not in ordered:
            chain.append(place)
            place = None if (tokens := stored[place]) is None else tokens.parent
        ordered.update((each, stored[each]) for each in reversed(chain))
    return ordered
