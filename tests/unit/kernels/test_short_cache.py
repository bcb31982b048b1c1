"""A pool of int16 beside one of bfloat16: whatever is written, in whatever pieces, attention over both is the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import ops, reference
from kernels.backends import Implementation
from kernels.cpu.bindings import CpuKernels
from kernels.short_cache import SHORT_DTYPE, as_numbers, can_be_short
from tests.support.cpu_kernels import torch_threads

pytestmark = pytest.mark.usefixtures("implementation")

# Block size and head size. Spans of decodes have 32 tokens, groups of numbers 128: tiles that are parts of either or
# have many of them, and groups that end within a token.
TILES = [(16, 64), (8, 16), (16, 128), (8, 80), (128, 32), (4, 32), (1, 128), (48, 48), (32, 256)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@dataclass
class Rows:
    """Sequences that grow in two pools, one of each dtype, whose blocks nobody has written to at first."""

    block_size: int
    head_dim: int
    num_rows: int = 3
    num_kv_heads: int = 2
    num_blocks_of_row: int = field(init=False)
    lengths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_blocks_of_row = max(6, 16 // self.block_size)
        num_blocks = self.num_rows * self.num_blocks_of_row + 1
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))[:-1]
        self.tables = order.view(self.num_rows, -1).int()
        shape = (2, num_blocks, self.num_kv_heads, self.block_size, self.head_dim)
        self.plain = torch.full(shape, float("nan"), dtype=torch.bfloat16)
        self.short = self.plain.clone().view(SHORT_DTYPE)
        self.lengths = [0] * self.num_rows

    def slots(self, row: int, first: int, last: int) -> torch.Tensor:
        positions = torch.arange(first, last)
        return self.tables[row, positions // self.block_size].long() * self.block_size + positions % self.block_size

    def write(self, firsts: Sequence[int], lasts: Sequence[int], key: torch.Tensor, value: torch.Tensor) -> None:
        """The tokens from `firsts` to `lasts` of each row, which are its last ones then."""
        slots = torch.cat([self.slots(row, *ends) for row, ends in enumerate(zip(firsts, lasts, strict=True))])
        for pool in (self.plain, self.short):
            ops.reshape_and_cache(key[: len(slots)], value[: len(slots)], pool, slots)
        self.lengths = list(lasts)

    def append(self, counts: Sequence[int], seed: int = 0, scale: float = 1.0) -> None:
        shape = (sum(counts), self.num_kv_heads, self.head_dim)
        lasts = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self.write(self.lengths, lasts, noise(*shape, seed=seed) * scale, noise(*shape, seed=seed + 1))

    def check(self, num_new: int = 1, sliding_window: int | None = None, group: int = 2) -> None:
        """Attention of the last tokens of each row is bitwise the same from both pools."""
        news = [min(num_new, length) for length in self.lengths]
        starts = torch.tensor([0, *news]).cumsum(0).int()
        query = noise(int(starts[-1]), self.num_kv_heads * group, self.head_dim, seed=9)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        got, expected = (
            ops.paged_attention(
                *(query, pool, self.tables, starts, lengths),
                scale=0.2,
                max_query_len=max(news),
                max_seq_len=max(self.lengths),
                sliding_window=sliding_window,
            )
            for pool in (self.short, self.plain)
        )
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))

    def is_kept_short(self, half: int, block: int) -> bool:
        return not torch.equal(self.short[half, block], self.plain[half, block].view(SHORT_DTYPE))


@pytest.mark.parametrize(("block_size", "head_dim"), TILES)
@pytest.mark.parametrize("threads", [1, 2])
def test_sequences_grow_by_chunks_and_tokens(block_size: int, head_dim: int, threads: int) -> None:
    rows = Rows(block_size, head_dim)
    with torch_threads(threads):
        most = rows.num_blocks_of_row * block_size
        for step, count in enumerate((min(most - 7, 2 * block_size + 3), 1, 1, 1, 3)):
            counts = [min(count + row * (step == 0), most - length) for row, length in enumerate(rows.lengths)]
            rows.append(counts, seed=step)
            for sliding_window in (None, 1, 5, block_size + 3):
                rows.check(1, sliding_window)
                rows.check(max(counts), sliding_window)


def test_full_blocks_are_kept_short_and_others_not(implementation: Implementation) -> None:
    rows = Rows(16, 64, num_rows=1)
    rows.append([40])
    kept = [[rows.is_kept_short(half, int(block)) for block in rows.tables[0]] for half in range(2)]
    is_short = implementation is not reference
    assert kept == [[is_short, is_short, False, False, False, False]] * 2
    rows.append([7])
    assert not rows.is_kept_short(0, int(rows.tables[0, 2]))
    rows.append([1])
    assert rows.is_kept_short(0, int(rows.tables[0, 2])) == is_short


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tile=st.sampled_from(TILES[:5]),
    odd=st.sampled_from([0, 1, 5, 9, 30, 500]),
    exponents=st.sampled_from([(-133, 127), (20, 30), (-40, -30), (0, 1)]),
    special=st.sampled_from([None, 0.0, -0.0, float("inf"), float("nan")]),
    seed=st.integers(0, 1000),
)
def test_every_number_comes_back(
    tile: tuple[int, int], odd: int, exponents: tuple[int, int], special: float | None, seed: int
) -> None:
    rows = Rows(*tile, num_rows=1)
    generator = torch.Generator().manual_seed(seed)
    key, value = (noise(2 * rows.block_size, rows.num_kv_heads, rows.head_dim, seed=seed + i) for i in range(2))
    for numbers in (key, value):
        places = torch.randint(numbers.numel(), (odd,), generator=generator)
        wild = 1.375 * 2.0 ** torch.randint(*exponents, places.shape, generator=generator).double()
        numbers.view(-1)[places] = wild.bfloat16()
        if special is not None:
            numbers.view(-1)[places[: odd // 2]] = special
    rows.write([0], [2 * rows.block_size], key, value)
    # The last token once more, as it was: what is short becomes numbers again for it, and short again.
    rows.write([2 * rows.block_size - 1], [2 * rows.block_size], key[-1:], value[-1:])
    # And another one, so that the numbers of the rest lie there as they are, for all to see.
    at = 2 * rows.block_size - 1
    if rows.block_size > 1:
        rows.write([at - 1], [at], key[-2:-1], value[-2:-1])
        block = rows.tables[0, 1]
        assert torch.equal(as_numbers(rows.short)[:, block].view(torch.int16), rows.plain[:, block].view(torch.int16))


def test_numbers_of_all_sizes_are_kept_as_they_are() -> None:
    rows = Rows(16, 64, num_rows=1)
    exponents = torch.randint(-100, 100, (32, 2, 64), generator=torch.Generator().manual_seed(3)).double()
    numbers = (2.0**exponents).bfloat16()
    rows.write([0], [32], numbers, noise(32, 2, 64))
    blocks = [int(block) for block in rows.tables[0, :2]]
    assert not any(rows.is_kept_short(0, block) for block in blocks)
    rows.check()


def test_some_channels_far_greater_than_the_others_are_no_hindrance(implementation: Implementation) -> None:
    rows = Rows(16, 64, num_rows=1)
    key = noise(32, 2, 64)
    key[:, :, 5] *= 60.0
    key[3, 1, 7] = 1e20
    rows.write([0], [32], key, noise(32, 2, 64, seed=1))
    assert all(rows.is_kept_short(0, int(block)) for block in rows.tables[0, :2]) == (implementation is not reference)
    rows.check()


@pytest.mark.parametrize("offset", [1, 7, 14, 15])
def test_the_last_tokens_of_a_full_block_can_be_written_again(offset: int) -> None:
    rows = Rows(16, 64)
    rows.append([32, 16, 32])
    key, value = noise(3 * 16, 2, 64, seed=5), noise(3 * 16, 2, 64, seed=6)
    firsts = [16 + offset, offset, 16 + offset]
    rows.write(firsts, [32, 16, 32], key, value)
    rows.check(16)


def test_a_block_that_another_sequence_had_is_written_from_its_first_token_on() -> None:
    rows = Rows(16, 64)
    rows.append([32, 16, 40])
    rows.lengths = [0] * 3
    rows.append([5, 1, 20], seed=3)
    rows.check()
    for step in range(12):
        rows.append([1, 1, 1], seed=step)
        rows.check()


def test_blocks_move_as_they_are() -> None:
    rows = Rows(16, 64)
    rows.append([40, 16, 20])
    host = [torch.zeros_like(rows.short[:, :4])], [torch.zeros_like(rows.plain[:, :4])]
    source, partial, free = (int(rows.tables[row, column]) for row, column in ((0, 0), (0, 2), (2, 5)))
    for pool, outside in zip(([rows.short], [rows.plain]), host, strict=True):
        ops.swap_blocks(pool, outside, torch.tensor([[source, 1], [partial, 3]]))
        ops.swap_blocks(outside, pool, torch.tensor([[1, free]]))
        ops.copy_blocks(pool, torch.tensor([[partial, int(rows.tables[1, 1])]]))
    rows.tables[2, 0] = free
    rows.lengths[1] += 8
    rows.check()
    rows.append([1, 8, 1])
    rows.check()


def test_rotated_keys_go_there_too() -> None:
    rows = Rows(16, 64)
    query, key, value = noise(48, 4, 64), noise(48, 2, 64, seed=1), noise(48, 2, 64, seed=2)
    positions, angles = torch.arange(48), torch.arange(48)[:, None] * torch.rand(32)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    slots = torch.cat([rows.slots(row, 0, 16) for row in range(3)])
    queries = [
        ops.rotary_and_cache(query.clone(), key.clone(), value, positions, table, pool, slots)
        for pool in (rows.plain, rows.short)
    ]
    assert torch.equal(*queries)
    rows.lengths = [16] * 3
    rows.check()


@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 8), (3, 64), (16, 100), (1024, 128)])
def test_tiles_that_cannot_be_short_are_refused(block_size: int, head_dim: int) -> None:
    assert not can_be_short(block_size, head_dim)
    pool = torch.zeros(2, 3, 1, block_size, head_dim, dtype=SHORT_DTYPE)
    with pytest.raises(ValueError, match=f"tiles of {block_size} times {head_dim} numbers"):
        ops.reshape_and_cache(noise(1, 1, head_dim), noise(1, 1, head_dim), pool, torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_but_bfloat16_goes_there(dtype: torch.dtype) -> None:
    pool, key = torch.zeros(2, 3, 1, 16, 64, dtype=SHORT_DTYPE), torch.zeros(1, 1, 64, dtype=dtype)
    with pytest.raises(ValueError, match=r"key has dtype .* expected torch.bfloat16"):
        ops.reshape_and_cache(key, key, pool, torch.tensor([0]))


def test_pools_of_bfloat16_are_kept_so_where_the_kernels_know_it(implementation: Implementation) -> None:
    kept = SHORT_DTYPE if isinstance(implementation, CpuKernels) else torch.bfloat16
    cpu = torch.device("cpu")
    assert ops.stored_dtype(cpu, torch.bfloat16, 16, 64) == kept
    assert ops.stored_dtype(cpu, torch.bfloat16, 16, 100) == torch.bfloat16
    assert ops.stored_dtype(torch.device("cuda"), torch.bfloat16, 16, 64) == torch.bfloat16
    for dtype in (torch.float32, torch.float16, torch.int8):
        assert ops.stored_dtype(cpu, dtype, 16, 64) == dtype
