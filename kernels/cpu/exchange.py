"""Calls the CPU library for what processes bring together in memory that they share."""

import torch

from kernels.cpu.arguments import DTYPES, Empty, as_lines, check_status, dense
from kernels.cpu.library import ALL_GATHER_ARGS, ALL_REDUCE_ARGS, SLOT_BYTES, Operations


class CpuExchange:
    """The operations of `kernels.exchange`.

    Args:
        make_empty: makes the tensors that are returned.
    """

    def __init__(self, library: Operations, make_empty: Empty) -> None:
        self._library = library
        self._context = library.context
        self._empty = make_empty

    def all_reduce(self, x: torch.Tensor, memory: torch.Tensor, rank: int, size: int) -> None:
        lines = as_lines(x)
        arguments = ALL_REDUCE_ARGS.pack(
            lines.data_ptr(),
            *(memory.data_ptr(), rank, size, SLOT_BYTES),
            DTYPES[x.dtype],
            torch.get_num_threads(),
            *lines.shape,
        )
        check_status(self._library.all_reduce(self._context, arguments))

    def all_gather(self, x: torch.Tensor, memory: torch.Tensor, rank: int, size: int, total: int) -> torch.Tensor:
        x, element = dense(x), x.element_size()
        output = self._empty((x.shape[0], total), x.dtype)
        arguments = ALL_GATHER_ARGS.pack(
            output.data_ptr(),
            x.data_ptr(),
            *(memory.data_ptr(), rank, size, SLOT_BYTES),
            torch.get_num_threads(),
            x.shape[0],
            -(-total // size) * element,
            total * element,
            x.stride(0) * element,
        )
        check_status(self._library.all_gather(self._context, arguments))
        return output
