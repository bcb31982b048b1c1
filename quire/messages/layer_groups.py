"""Groups of layers: the layers of a group share a block table, and a block holds tokens of the layers of one group."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How a model's layers are cut into groups whose blocks have equal bytes. The full groups come first.

    A row has a block of each group for `block_size` tokens: block `i` of group `g` is entry `i * num_groups + g` of its
    block table.
    """

    num_full: int = 1
    """Groups whose layers read all tokens."""
    num_windowed: int = 0
    """Groups whose layers read the last `window` tokens at most."""
    window: int = 0
    """Tokens, including the token that reads them; 0 without windowed groups."""

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    def max_blocks(self, num_tokens: int, block_size: int) -> int:
        """Maximum blocks that a sequence of `num_tokens` tokens must have for its next token."""
        num_blocks = -(-num_tokens // block_size)
        in_window = min(num_blocks, -(-(self.window - 1) // block_size) + 1)
        return self.num_full * num_blocks + self.num_windowed * in_window

    def first_read(self, position: int) -> int:
        """The first position that a windowed layer reads for a token at `position`."""
        return max(position + 1 - self.window, 0)


ONE_GROUP = LayerGroups()
"""The layers of a model that are not cut."""
