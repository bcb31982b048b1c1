"""The interpreter's own memory in huge pages.

A request runs through megabytes of code and dictionaries, a little of each. In pages of 4 kB the processor first has to
look up where most of them are, in a virtual machine twice. Only the memory of tensors asks for huge pages by itself.
"""

import ctypes
import mmap
import threading
from collections.abc import Iterator
from pathlib import Path

_HUGE_PAGE = 1 << 21
_MADV_COLLAPSE = 25
_MAPS = Path("/proc/self/maps")


def start_moving_heap() -> None:
    """Moves the heap to huge pages in a thread of its own: the system takes milliseconds for each."""
    threading.Thread(target=move_heap_to_huge_pages, name="huge-pages", daemon=True).start()


def move_heap_to_huge_pages() -> int:
    """Puts the parts of this process's private memory that are mostly in use into huge pages. Their content stays, and
    other threads may use it meanwhile; memory grows by a third of them at most.

    Returns:
        Bytes that are in huge pages now; 0 on systems other than Linux 6.1 and later.
    """
    if not _MAPS.exists():
        return 0
    libc = ctypes.CDLL(None)
    moved = 0
    for start in _huge_pages_within(_MAPS.read_text()):
        if _is_mostly_used(libc, start) and not libc.madvise(*_pointer_and_size(start), _MADV_COLLAPSE):
            moved += _HUGE_PAGE
    return moved


def _huge_pages_within(maps: str) -> Iterator[int]:
    """Addresses of whole huge pages in private memory that is no file's, from the text of /proc/self/maps."""
    for line in maps.splitlines():
        span, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in span.split("-"))
            yield from range(-(-begin // _HUGE_PAGE) * _HUGE_PAGE, end - _HUGE_PAGE + 1, _HUGE_PAGE)


def _is_mostly_used(libc: ctypes.CDLL, start: int) -> bool:
    is_resident = (ctypes.c_ubyte * (_HUGE_PAGE // mmap.PAGESIZE))()
    if libc.mincore(*_pointer_and_size(start), is_resident):
        return False
    return bytes(is_resident).count(1) >= len(is_resident) * 3 // 4


def _pointer_and_size(start: int) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(start), ctypes.c_size_t(_HUGE_PAGE)
