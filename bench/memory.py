"""Measures this process's memory."""

import gc
import resource
from pathlib import Path


def resident_bytes() -> int:
    """Memory of this process that is in RAM, after garbage collection."""
    gc.collect()
    resident_pages = Path("/proc/self/statm").read_text().split()[1]
    return int(resident_pages) * resource.getpagesize()
