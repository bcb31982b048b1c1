"""Where layers keep states of a fixed size for each sequence: in blocks of the memory that also has keys and values.

A state is floats in tiles of 16 columns. A layer's state is a range of units of `unit_bytes` bytes, a number that all
layers of a model share: unit u of a sequence is in the block `tables[row][u // units_per_block]`, at byte
`(u % units_per_block) * unit_bytes`, where units_per_block is `block_bytes // unit_bytes`. Tiles follow each other in
units, as many in each as fit whole.
"""

from dataclasses import dataclass

import torch

from quire_kernels.checks import check_device, check_dtype, check_shape

COLUMNS = 16
"""Columns of a tile."""
_LINE_BYTES = COLUMNS * 4


@dataclass(frozen=True, slots=True)
class StatePages:
    """The states of a batch of R rows with T new tokens. All tensors are on one device.

    A row whose new tokens begin at position 0 starts from a state of zeros, and what the pages hold is not read.
    Consecutive rows whose tables begin with the same block are one sequence in several parts, in order.

    Attributes:
        pages: [num_blocks, block_bytes] uint8; blocks may lie apart.
        tables: [R, S] int32, the blocks of the running state of each row.
        query_start_loc: [R + 1] int32, from 0 to T, rising: the first new token of each row, and T.
        seq_lens: [R] int32, the tokens of each row: computed ones plus new ones.
        checkpoints: [T] int32: -1, or the line of `checkpoint_tables` to which the state after this token is written
            too.
        checkpoint_tables: [C, S] int32; C may be 0.
        num_kept: [R] int32, at least 0: the number of new tokens of each row, its first ones, that change the pages,
            checkpoints too. Outputs are computed as if all tokens did. If a part of a sequence is not kept whole, the
            parts behind it change nothing. None keeps all tokens.
    """

    pages: torch.Tensor
    tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    checkpoints: torch.Tensor
    checkpoint_tables: torch.Tensor
    num_kept: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class StateUnits:
    """The units of one layer's state.

    Attributes:
        first: the first of them.
        unit_bytes: bytes of a unit, the same for all layers of a model; a multiple of 4.
    """

    first: int
    unit_bytes: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """The shape of one layer's state, [heads, lines, columns] float32.

    A tile has all lines of up to 16 columns of a head. The tiles of a head follow each other.
    """

    heads: int
    lines: int
    columns: int

    @classmethod
    def of_recurrence(cls, num_heads: int, key_dim: int, value_dim: int) -> "StateShape":
        """The state of `ops.linear_recurrence`."""
        return cls(num_heads, key_dim, value_dim)

    @classmethod
    def of_conv(cls, num_channels: int, num_taps: int) -> "StateShape":
        """The state of `ops.causal_conv`: [1, taps - 1, channels], the oldest token first.

        Raises:
            ValueError: there are fewer than 2 taps, which need no state.
        """
        if num_taps < 2:
            raise ValueError(f"weight has {num_taps} taps; expected at least 2")
        return cls(1, num_taps - 1, num_channels)

    @classmethod
    def of_scan(cls, num_channels: int, num_states: int) -> "StateShape":
        """The state of `ops.selective_scan`: [1, states, channels]."""
        return cls(1, num_states, num_channels)

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile: the least size of a unit."""
        return self.lines * _LINE_BYTES

    @property
    def num_tiles(self) -> int:
        return self.heads * -(-self.columns // COLUMNS)

    def num_units(self, unit_bytes: int) -> int:
        """Units that the state takes.

        Raises:
            ValueError: a tile does not fit into a unit.
        """
        return -(-self.num_tiles // self._tiles_per_unit(unit_bytes))

    def _tiles_per_unit(self, unit_bytes: int) -> int:
        if unit_bytes < self.tile_bytes or unit_bytes % 4:
            raise ValueError(
                f"unit_bytes is {unit_bytes}; expected a multiple of 4, at least the {self.tile_bytes} of a tile"
            )
        return unit_bytes // self.tile_bytes

    def places(self, pages: torch.Tensor, table: torch.Tensor, units: StateUnits) -> tuple[torch.Tensor, torch.Tensor]:
        """The block of each tile, and the floats of the tile in it: [tiles, 1] and [tiles, lines * 16] int64."""
        per_unit = self._tiles_per_unit(units.unit_bytes)
        tiles = torch.arange(self.num_tiles, device=pages.device)
        unit = units.first + tiles // per_unit
        per_block = pages.shape[1] // units.unit_bytes
        starts = unit % per_block * (units.unit_bytes // 4) + tiles % per_unit * (self.tile_bytes // 4)
        floats = starts[:, None] + torch.arange(self.tile_bytes // 4, device=pages.device)
        return table.long()[unit // per_block][:, None], floats


def read_state(pages: torch.Tensor, table: torch.Tensor, units: StateUnits, shape: StateShape) -> torch.Tensor:
    """One layer's state of a sequence.

    Args:
        pages: [num_blocks, block_bytes] uint8.
        table: [S], the blocks of the state.

    Returns:
        [heads, lines, columns] float32, a copy.
    """
    tiles = pages.view(torch.float32)[shape.places(pages, table, units)]
    whole = tiles.view(shape.heads, -1, shape.lines, COLUMNS).transpose(1, 2)
    return whole.reshape(shape.heads, shape.lines, -1)[:, :, : shape.columns]


def write_state(
    pages: torch.Tensor, table: torch.Tensor, units: StateUnits, shape: StateShape, state: torch.Tensor
) -> None:
    """Writes what `read_state` reads; columns of tiles behind the last one become zeros."""
    padded = torch.nn.functional.pad(state.float(), (0, -shape.columns % COLUMNS))
    tiles = padded.view(shape.heads, shape.lines, -1, COLUMNS).transpose(1, 2)
    pages.view(torch.float32)[shape.places(pages, table, units)] = tiles.reshape(shape.num_tiles, -1)


def check_pages(pages: StatePages, units: StateUnits, shape: StateShape, tokens: torch.Tensor) -> None:
    """Checks everything but the content of index tensors; `tokens` has a line for each new token.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or the tables have no place for the units.
    """
    check_shape("pages", pages.pages, (None, None))
    check_dtype("pages", pages.pages, torch.uint8)
    num_rows, width = pages.seq_lens.shape[0], pages.tables.shape[-1]
    expected = {
        "tables": (num_rows, width),
        "query_start_loc": (num_rows + 1,),
        "seq_lens": (num_rows,),
        "checkpoints": (tokens.shape[0],),
        "checkpoint_tables": (None, width),
        "num_kept": (num_rows,),
    }
    for name, wanted in expected.items():
        tensor = getattr(pages, name)
        if tensor is not None:
            check_shape(name, tensor, wanted)
            check_dtype(name, tensor, torch.int32)
            check_device(name, tensor, tokens.device)
    check_device("pages", pages.pages, tokens.device)
    if pages.pages.stride(1) != 1 or pages.pages.stride(0) % 4:
        raise ValueError("pages has blocks that are not contiguous, or do not begin at multiples of 4 bytes")
    num_units, per_block = shape.num_units(units.unit_bytes), pages.pages.shape[1] // units.unit_bytes
    if units.first < 0 or units.first + num_units > width * per_block:
        raise ValueError(
            f"units {units.first} to {units.first + num_units - 1} are not in tables of {width} blocks of {per_block}"
        )
