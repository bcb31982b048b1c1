"""Memory of the host: zeroed, in pages of 2 MB if the system has them, allocated page by page; and copies within it.

Huge pages: at the end of each page of 4 kB the processor and its prefetcher have to look up the next one.
Attention of 64 sequences over blocks in random order took 1.06 to 1.08 of the time with small pages.

Lazily: the system clears a page when it is first touched, which takes at least 0.1 s a GiB, and more than a second
where a virtual machine has to get the page from its host first. `populate` does that in advance, while other threads
already use the memory.
"""

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

HUGE_PAGE = 1 << 21
"""Bytes."""
_SHARED_BYTES, _ALIGNMENT = 64 << 20, 64
_MADV_DONTNEED = 4
_MADV_REMOVE = 9
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
_MADV_COLLAPSE = 25
_MAP_FIXED = 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros whose memory the system allocates when it is touched.

    Raises:
        MemoryError: there is not enough address space.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(_map_zeros(num_bytes), dtype=torch.uint8).view(dtype).view(shape)


class SharedPages:
    """Memory for tensors that live long, such as weights: side by side, so that small ones are in huge pages too, which
    a tensor of less than two such pages rarely has by itself. A tensor keeps its neighbours' memory.
    """

    def __init__(self) -> None:
        self._memory: Callable[[], mmap.mmap | None] = lambda: None
        """The mapping of the next tensors; gone when the last tensor in it is."""
        self._used = 0
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor with any content.

        Raises:
            MemoryError: there is not enough address space.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0 or num_bytes > _SHARED_BYTES // 2:
            return lazy_zeros(shape, dtype)
        with self._lock:
            memory = self._memory()
            if memory is None or self._used + num_bytes > len(memory):
                memory, self._used = _map_zeros(_SHARED_BYTES), 0
                self._memory = weakref.ref(memory)
            tensor = torch.frombuffer(memory, dtype=torch.uint8, offset=self._used, count=num_bytes)
            self._used += _aligned(num_bytes)
        return tensor.view(dtype).view(shape)

    def cut(self, tensor: Tensor, num_bytes: int) -> Tensor:
        """The first bytes of a uint8 tensor of `empty`; the next tensor gets the rest if this one was the last."""
        with self._lock:
            if (memory := self._memory()) is not None:
                start = tensor.data_ptr() - torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
                if 0 <= start == self._used - _aligned(tensor.nbytes):
                    self._used = start + _aligned(num_bytes)
        return tensor[:num_bytes]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _map_zeros(num_bytes: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"cannot map {num_bytes} bytes: {error}") from error
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    start, end = -(-address // HUGE_PAGE) * HUGE_PAGE, (address + num_bytes) // HUGE_PAGE * HUGE_PAGE
    if start < end:
        # A system without huge pages refuses. Then small pages are used.
        _madvise(start, end - start, _MADV_HUGEPAGE)
    return memory


def map_file(file: int, num_bytes: int) -> Tensor:
    """The first bytes of an open file in memory, uint8, shared with all that map it, at an address that huge pages can
    have. They stay mapped as long as a tensor over them lives.

    Raises:
        MemoryError: they cannot be mapped.
    """
    protection, shared = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
    reserved = _libc.mmap(None, num_bytes + HUGE_PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if reserved == _MAP_FAILED:
        raise MemoryError(f"cannot map {num_bytes} bytes: {os.strerror(ctypes.get_errno())}")
    start = -(-reserved // HUGE_PAGE) * HUGE_PAGE
    if _libc.mmap(start, num_bytes, protection, shared | _MAP_FIXED, file, 0) == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        _unmap(reserved, num_bytes + HUGE_PAGE)
        raise MemoryError(f"cannot map {num_bytes} bytes of a file: {reason}")
    _madvise(start, num_bytes, _MADV_HUGEPAGE)
    array = (ctypes.c_uint8 * num_bytes).from_address(start)
    weakref.finalize(array, _unmap, reserved, num_bytes + HUGE_PAGE)
    return torch.frombuffer(array, dtype=torch.uint8)


def _unmap(start: int, num_bytes: int) -> None:
    _libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes))


def collapse(tensor: Tensor, start: int, num_bytes: int) -> bool:
    """Puts the whole huge pages in bytes [start, start + num_bytes) of a tensor over a file into huge pages, which the
    system does not make for a file in memory by itself. The content stays, and other threads may write to it meanwhile.

    Returns:
        Whether they are in huge pages now. Systems before Linux 6.1 cannot do it.
    """
    first = (tensor.data_ptr() + start) // HUGE_PAGE * HUGE_PAGE
    last = (tensor.data_ptr() + start + num_bytes) // HUGE_PAGE * HUGE_PAGE
    return first >= last or _madvise(first, last - first, _MADV_COLLAPSE)


def populate(tensor: Tensor, start: int, num_bytes: int) -> bool:
    """Makes the system allocate the pages of bytes [start, start + num_bytes) of a tensor of `lazy_zeros` or
    `map_file`. The content stays, and other threads may write to them meanwhile. Releases the interpreter's lock.

    Returns:
        Whether the pages are there now. Systems before Linux 5.14 cannot do it.
    """
    page = mmap.PAGESIZE
    first = (tensor.data_ptr() + start) // page * page
    last = min(tensor.data_ptr() + start + num_bytes, tensor.data_ptr() + tensor.nbytes)
    return first >= last or _madvise(first, -(-(last - first) // page) * page, _MADV_POPULATE_WRITE)


def release(tensor: Tensor, *, is_over_file: bool) -> bool:
    """Gives the whole pages of a tensor, in private memory or in memory of `map_file`, back to the system. Their
    content is zero then, and the system allocates them again when they are touched.

    Returns:
        Whether the system did it.
    """
    page = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // page) * page
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    return first >= last or _madvise(first, last - first, _MADV_REMOVE if is_over_file else _MADV_DONTNEED)


def swap_blocks(source: Sequence[Tensor], destination: Sequence[Tensor], pairs: Tensor) -> None:
    """`ops.swap_blocks` between pools in host memory: each byte is read once and written once.

    Measured on one core, 64 scattered blocks of 12 layers with 12 heads of 64 in bfloat16 (38 MB): one plain copy takes
    2.6 ms, `index_select` and `index_copy_` take 9.9, a torch copy for each block 5.6, and this 3.3; 2.8 if
    neighbouring blocks move together.
    """
    runs = _runs(pairs.numpy())
    for from_cache, to_cache in zip(source, destination, strict=True):
        # As bytes, since numpy has no bfloat16.
        from_array, to_array = from_cache.view(torch.uint8).numpy(), to_cache.view(torch.uint8).numpy()
        for first, to_first, count in runs:
            to_array[:, to_first : to_first + count] = from_array[:, first : first + count]


def _runs(pairs: np.ndarray) -> list[tuple[int, int, int]]:
    """(first source, first destination, count) of blocks that lie side by side in both pools."""
    if not len(pairs):
        return []
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    starts = np.flatnonzero((np.diff(ordered, axis=0, prepend=ordered[:1] - 2) != 1).any(axis=1))
    counts = np.diff(starts, append=len(ordered))
    return [(*first, count) for first, count in zip(ordered[starts].tolist(), counts.tolist(), strict=True)]


def _madvise(address: int, num_bytes: int, advice: int) -> bool:
    return os.name == "posix" and _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), advice) == 0
