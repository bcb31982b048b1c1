"""What entered a prefix cache and what left it since somebody last asked. Nobody has to ask: without a log nothing is
noted, and a log holds changes of the content, not a history, so it is bounded by twice the blocks of the pool and of
the tiers below it."""

from collections.abc import Container
from dataclasses import dataclass, field

from quire.prefix_hashes import BlockHash


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """What a block holds: the tokens of one block behind the block `parent`, which is None at the start of a prompt, as
    a model with the adapter of this digest and name computed them; both are None for the model as it is."""

    parent: BlockHash | None
    token_ids: list[int]
    adapter_digest: bytes | None = None
    adapter_name: str | None = None


@dataclass(frozen=True, slots=True)
class CacheChanges:
    """Changes of a prefix cache, in the order in which they are to be applied: all cleared, then removed, then stored.

    A block in `stored` has None if its tokens are not known: an earlier scheduler sealed it, or it came from elsewhere.
    It is stored again, with its tokens, when a request uses or computes it. Of stored blocks that follow each other,
    the parent comes first.

    `tier_stored` and `tier_removed` are changes of the tier below the pool, where a block may be beside the pool. Their
    tokens are those of the pool's block of the same name. A block is stored again when its tokens become known.
    `host_stored` and `host_removed` are the same of host memory.
    """

    is_cleared: bool
    removed: list[BlockHash]
    stored: dict[BlockHash, CachedTokens | None]
    tier_stored: list[BlockHash] = field(default_factory=list[BlockHash])
    tier_removed: list[BlockHash] = field(default_factory=list[BlockHash])
    host_stored: list[BlockHash] = field(default_factory=list[BlockHash])
    host_removed: list[BlockHash] = field(default_factory=list[BlockHash])


class CacheLog:
    """Changes of one prefix cache. What came and left between two calls of `take` is in neither of them.

    A new log says that all was cleared; it does not have what the cache holds already.

    Attributes:
        tier: Which blocks are in the tier below the pool.
        host: Which are in host memory.
    """

    def __init__(self) -> None:
        self.tier: Container[BlockHash] = ()
        self.host: Container[BlockHash] = ()
        self._is_cleared = True
        self._removed: dict[BlockHash, None] = {}
        self._stored: dict[BlockHash, CachedTokens | None] = {}
        # Whether each block came into the tier or left it, and the same of host memory. None of one that was there
        # before, and whose tokens are known now.
        self._in_tier: dict[BlockHash, bool | None] = {}
        self._in_host: dict[BlockHash, bool | None] = {}
        # Blocks whose tokens are not known, and those of `_stored` that `take` has handed out before.
        self._unread: set[BlockHash] = set()
        self._retold: set[BlockHash] = set()

    def stored(self, content: BlockHash, tokens: CachedTokens) -> None:
        """A block was sealed."""
        if content in self._removed:
            # For who asks it never left, but maybe its tokens were not known.
            del self._removed[content]
            self._retold.add(content)
        self._stored[content] = tokens

    def restored(self, content: BlockHash) -> None:
        """A block that an earlier scheduler sealed is in the cache, or one that came from elsewhere."""
        self._stored[content] = None
        self._unread.add(content)

    def removed(self, content: BlockHash) -> None:
        """A block was handed out for other content."""
        self._unread.discard(content)
        is_new = content in self._stored and content not in self._retold
        self._stored.pop(content, None)
        self._retold.discard(content)
        if not is_new:
            self._removed[content] = None

    def cleared(self) -> None:
        """The pool is gone, and what was known of the tiers."""
        self._is_cleared = True
        self._removed, self._stored, self._retold, self._in_tier, self._in_host = {}, {}, set(), {}, {}
        self._unread.clear()

    def tier_changed(self, content: BlockHash, *, is_stored: bool) -> None:
        """A block came into the tier or left it."""
        _note(self._in_tier, content, is_stored=is_stored)

    def host_changed(self, content: BlockHash, *, is_stored: bool) -> None:
        """A block came into host memory or left it."""
        _note(self._in_host, content, is_stored=is_stored)

    @property
    def has_unread(self) -> bool:
        """Whether there are blocks whose tokens are not known."""
        return bool(self._unread)

    def is_unread(self, content: BlockHash) -> bool:
        """Whether the block's tokens are not known."""
        return content in self._unread

    def read(self, content: BlockHash, tokens: CachedTokens) -> None:
        """A block's tokens are known now."""
        self._unread.discard(content)
        if content in self.tier:
            self._in_tier.setdefault(content, None)
        if content in self.host:
            self._in_host.setdefault(content, None)
        if content not in self._stored:
            self._retold.add(content)
        self._stored[content] = tokens

    def take(self) -> CacheChanges | None:
        """What changed since the last call; None if nothing did."""
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
    """The blocks that are to be told as stored, and those that left."""
    left = [content for content, is_stored in changes.items() if is_stored is False]
    return [content for content in changes if changes[content] is not False], left


def _parents_first(stored: dict[BlockHash, CachedTokens | None]) -> dict[BlockHash, CachedTokens | None]:
    """The same, each behind its parent: that may have come, or become known, after it."""
    ordered: dict[BlockHash, CachedTokens | None] = {}
    for content in stored:
        chain: list[BlockHash] = []
        place: BlockHash | None = content
        while place is not None and place in stored and place not in ordered:
            chain.append(place)
            place = None if (tokens := stored[place]) is None else tokens.parent
        ordered.update((each, stored[each]) for each in reversed(chain))
    return ordered
