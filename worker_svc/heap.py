"""Memory that was freed and not given back."""

import ctypes


def release_freed_memory() -> None:
    """Gives the system back what the C library keeps of freed memory, where it can be asked to.

    Loading takes and frees every matrix once before it is packed. Measured with a 160M model: 45 MB of holes stay
    behind in bfloat16, 117 MB in float32.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
