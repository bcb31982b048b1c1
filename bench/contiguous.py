"""Compares the paged kernel with attention over a virtually contiguous view of scattered blocks, as vTensor has it.

Keys and values of one layer lie in two files in memory. For each sequence they are mapped into one range of addresses,
piece by piece, so that torch's scaled_dot_product_attention, which has no notion of blocks, reads them. A piece is
a block, in small pages, or 2 MiB, in huge pages. Reports the time of a decode step of all sequences, the cost of
mapping, and the numbers of mappings and page tables.
"""

import argparse
import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kernels import ops
from kernels.host_memory import HUGE_PAGE, collapse, lazy_zeros, map_file, populate

_HEADS, _HEAD_DIM, _BLOCK_SIZE = 12, 64, 16
_TOKEN_BYTES = _HEADS * _HEAD_DIM * 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FIXED = mmap.MAP_SHARED | 0x10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=64, help="sequences")
    parser.add_argument("--context", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--repeats", type=int, default=20)


def main(arguments: argparse.Namespace) -> None:
    rows, context = arguments.rows, arguments.context
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((rows, _HEADS, _HEAD_DIM), generator=generator).to(torch.bfloat16)
    keys, values = (
        torch.randn((rows, context, _HEADS, _HEAD_DIM), generator=generator).to(torch.bfloat16) for _ in range(2)
    )
    expected, paged = _paged(query, keys, values, generator)
    works = {"paged kernel, huge pages": paged}
    works["SDPA, contiguous tensors"] = lambda: _sdpa(query, keys, values)
    for name, piece in (("blocks", _BLOCK_SIZE * _TOKEN_BYTES), ("2 MiB", HUGE_PAGE)):
        before, started = _page_tables_kib(), time.perf_counter()
        views = _Views(keys, values, piece, generator)
        print(
            f"views of {name}: {views.num_maps} mappings in {views.map_s * 1e3:.1f} ms "
            f"({views.map_s / views.num_maps * 1e6:.1f} us each), first reads {views.touch_s * 1e3:.1f} ms, "
            f"page tables {_page_tables_kib() - before} KiB, {views.num_bytes / (2 * keys.nbytes):.2f} of the memory, "
            f"sharing by {piece // _TOKEN_BYTES} tokens ({time.perf_counter() - started:.1f} s to prepare)"
        )
        works[f"SDPA, views of {name}"] = lambda views=views: _sdpa(query, *views.halves)
    for name, work in works.items():
        error = float((work().float() - expected.float()).abs().max())
        assert error < 0.02, f"{name}: differs by {error}"
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(arguments.repeats):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    print(f"{rows} sequences of {context} tokens, {_HEADS} heads of {_HEAD_DIM}, bfloat16, one layer")
    base = statistics.median(seconds["paged kernel, huge pages"])
    for name, times in seconds.items():
        print(f"{name}: {1e3 * statistics.median(times):.2f} ms, {statistics.median(times) / base:.2f}")


def _paged(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, generator: torch.Generator
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    rows, context = keys.shape[:2]
    columns = context // _BLOCK_SIZE
    table = torch.randperm(rows * columns, generator=generator).view(rows, columns)
    pool = lazy_zeros((2, rows * columns, _HEADS, _BLOCK_SIZE, _HEAD_DIM), torch.bfloat16)
    for index, tensor in enumerate((keys, values)):
        blocks = tensor.view(rows * columns, _BLOCK_SIZE, _HEADS, _HEAD_DIM).transpose(1, 2)
        pool[index, table.flatten()] = blocks
    starts = torch.arange(rows + 1, dtype=torch.int32)
    lengths, order = torch.full((rows,), context, dtype=torch.int32), table.to(torch.int32)

    def run() -> torch.Tensor:
        return ops.paged_attention(
            query, pool, order, starts, lengths, scale=_HEAD_DIM**-0.5, max_query_len=1, max_seq_len=context
        )

    return run(), run


def _sdpa(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One call for all sequences, since all have the same length here; [rows, tokens, heads, head size] is viewed as
    [rows, heads, tokens, head size]."""
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query[:, :, None], keys.transpose(1, 2), values.transpose(1, 2)).squeeze(2)


class _Views:
    """Keys and values of each sequence in one range of addresses, over pieces in any order of a file."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, piece: int, generator: torch.Generator) -> None:
        rows, context = keys.shape[:2]
        row_bytes = context * _TOKEN_BYTES
        pieces_of_row = -(-row_bytes // piece)
        self.num_bytes = 2 * rows * pieces_of_row * piece
        self._file = os.memfd_create("views")
        whole = -(-self.num_bytes // HUGE_PAGE) * HUGE_PAGE
        os.ftruncate(self._file, whole)
        memory = map_file(self._file, whole)
        assert populate(memory, 0, whole)
        if piece == HUGE_PAGE:
            assert collapse(memory, 0, whole)
        order = torch.randperm(2 * rows * pieces_of_row, generator=generator).view(2, rows, pieces_of_row).tolist()
        started = time.perf_counter()
        starts = [self._map([place for row in rows_ for place in row], piece) for rows_ in order]
        self.map_s = time.perf_counter() - started
        self.num_maps = 2 * rows * pieces_of_row
        started = time.perf_counter()
        row_elements = pieces_of_row * piece // 2
        self.halves = tuple(_at(start, rows, row_elements, context) for start in starts)
        for view, tensor in zip(self.halves, (keys, values), strict=True):
            view.copy_(tensor)
        self.touch_s = time.perf_counter() - started

    def _map(self, places: list[int], piece: int) -> int:
        reserved = _libc.mmap(None, len(places) * piece + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        start = -(-reserved // HUGE_PAGE) * HUGE_PAGE
        for index, place in enumerate(places):
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            at = _libc.mmap(start + index * piece, piece, protection, _FIXED, self._file, place * piece)
            assert at == start + index * piece, f"mapping failed: {os.strerror(ctypes.get_errno())}"
        return start


def _at(start: int, rows: int, row_elements: int, context: int) -> torch.Tensor:
    array = (ctypes.c_uint8 * (2 * rows * row_elements)).from_address(start)
    whole = torch.frombuffer(array, dtype=torch.uint8).view(torch.bfloat16)
    strides = (row_elements, _HEADS * _HEAD_DIM, _HEAD_DIM, 1)
    return whole.as_strided((rows, context, _HEADS, _HEAD_DIM), strides)


def _page_tables_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmPTE"))
