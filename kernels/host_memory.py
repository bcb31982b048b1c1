"""Memory of the host that is zero, lies in pages of 2 MB where the system has them, and is taken page by page.

Huge pages: at the end of each page of 4 kB the processor stops to look up the next, and so does its prefetcher:
attention of 64 sequences over blocks in any order took 1.06 to 1.08 of the time.

Lazily: the system clears a page when it is first touched, which takes 0.1 s a GiB at best and more than a second where
a virtual machine has to get the page from its host first. `populate` does that ahead of use, beside threads that use
the memory already.
"""

import ctypes
import math
import mmap
import os

import torch
from torch import Tensor

_HUGE = 1 << 21
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros whose memory the system gives as it is touched.

    Raises:
        MemoryError: the address space cannot be had.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot map {num_bytes} bytes: {error}") from error
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    start = -(-tensor.data_ptr() // _HUGE) * _HUGE
    end = (tensor.data_ptr() + num_bytes) // _HUGE * _HUGE
    if start < end:
        # The system may have none; nothing changes then.
        _madvise(start, end - start, _MADV_HUGEPAGE)
    return tensor.view(dtype).view(shape)


def populate(tensor: Tensor, start: int, num_bytes: int) -> bool:
    """Makes the system give the pages of bytes [start, start + num_bytes) of a `lazy_zeros` tensor. What is in them
    stays as it is, and others may write to them meanwhile. Releases the interpreter's lock.

    Returns:
        Whether they are there now. Systems before Linux 5.14 cannot do it.
    """
    page = mmap.PAGESIZE
    first = (tensor.data_ptr() + start) // page * page
    last = min(tensor.data_ptr() + start + num_bytes, tensor.data_ptr() + tensor.nbytes)
    return first >= last or _madvise(first, -(-(last - first) // page) * page, _MADV_POPULATE_WRITE)


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    return os.name == "posix" and _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0
