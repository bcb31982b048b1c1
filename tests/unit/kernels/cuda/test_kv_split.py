"""Contexts are split into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.cuda.attention import DecodeTiling, split_length

TILING = DecodeTiling(tile=64, programs_per_sm=2, shortest_split=256, longest_split=2048)


@given(num_programs=st.integers(1, 100_000), max_seq_len=st.integers(1, 131_072))
def test_pieces_are_whole_tiles_within_their_bounds(num_programs: int, max_seq_len: int) -> None:
    length = split_length(TILING, num_programs, max_seq_len, 132)
    assert length % TILING.tile == 0
    assert length <= TILING.longest_split
    assert length >= TILING.shortest_split // 2 or length >= max_seq_len


@pytest.mark.parametrize(("num_programs", "max_seq_len"), [(1, 1024), (8, 8192), (256, 100_000), (300, 1024)])
def test_few_rows_keep_the_device_busy(num_programs: int, max_seq_len: int) -> None:
    length = split_length(TILING, num_programs, max_seq_len, 132)
    programs = num_programs * -(-max_seq_len // length)
    assert programs >= 0.8 * 2 * 132 or length <= 1.5 * TILING.shortest_split
