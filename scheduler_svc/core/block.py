"""What a physical block is called, and what its content is called."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in its pool."""

BlockHash = NewType("BlockHash", bytes)
"""Name of a block's content and of all that comes before it, 32 bytes; see `prefix_cache`."""
