"""The heap moves to huge pages; memory that is not in use stays unused."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from quire.runtime.huge_pages import move_heap_to_huge_pages

_MEMORY = Path("/proc/self/smaps_rollup")
_USED_MB, _UNUSED_MB = 64, 4096


def _megabytes(what: str) -> int:
    return int(re.findall(rf"^{what}: *(\d+) kB", _MEMORY.read_text(), re.MULTILINE)[0]) // 1024


@pytest.mark.skipif(not _MEMORY.exists(), reason="only Linux moves it")
def test_used_memory_moves_with_its_content_and_unused_memory_stays_unused() -> None:
    used, unused = (mmap.mmap(-1, size << 20, flags=mmap.MAP_PRIVATE) for size in (_USED_MB, _UNUSED_MB))
    content = np.frombuffer(used, np.int64)
    content[:] = np.arange(len(content))
    before, huge_before = _megabytes("Rss"), _megabytes("AnonHugePages")
    moved = move_heap_to_huge_pages()
    assert (content == np.arange(len(content))).all()
    # Where three quarters of a huge page are used, it gets the fourth.
    assert _megabytes("Rss") < before * 4 / 3 + 1
    assert not moved or _megabytes("AnonHugePages") >= huge_before + _USED_MB * 3 // 4
    assert len(unused) == _UNUSED_MB << 20
