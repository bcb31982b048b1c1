"""The CPU library with emulated matrix units (tests/emulation/amx.h), so that AMX code runs on any processor
with AVX-512.

It is built when it is first needed, which takes about half a minute of one processor, and again only after changes to
the sources.
"""

import ctypes
import fcntl
import functools
import os
import subprocess
import sys
from pathlib import Path

EMULATED_AMX = "amx_emulated"
"""The name of the instruction set."""

_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build" / "emulated-amx"
# Vector instructions run on this processor.
_FLAGS = f"-march=native -mprefer-vector-width=512 -include {_ROOT}/tests/emulation/amx.h"


class Counts(ctypes.Structure):
    """Instructions that a thread has executed. The first four are counted by the tile that is loaded, stored, cleared
    or added to. Products have C in tiles 0 to 3, A in 4 and 5, B in 6 and 7."""

    _fields_ = (
        *((name, ctypes.c_int64 * 8) for name in ("loads", "stores", "zeros", "products")),
        ("configurations", ctypes.c_int64),
    )


@functools.cache
def emulated_library() -> Path:
    """Builds the library, unless there is another build to test, one with sanitizers."""
    if "QUIRE_TEST_CPU_LIBRARY" in os.environ:
        return Path(os.environ["QUIRE_TEST_CPU_LIBRARY"])
    _BUILD.mkdir(parents=True, exist_ok=True)
    with (_BUILD / "lock").open("w") as lock:  # other test processes build it too
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = (
            *("cmake", "-S", str(_ROOT), "-B", str(_BUILD), "-DCMAKE_BUILD_TYPE=None"),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-DQUIRE_ISAS={EMULATED_AMX}"),
            f"-DCMAKE_CXX_FLAGS={_FLAGS}",
        )
        for command in (configure, ("cmake", "--build", str(_BUILD), "--target", "quire_cpu", "--parallel", "2")):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return _BUILD / "quire_kernels" / "cpu" / "libquire_cpu.so"


def counts_of_this_thread() -> Counts:
    """Counters of this thread, which change as it executes more, and may be set."""
    function = ctypes.CDLL(str(emulated_library())).emulated_amx_counts
    function.restype = ctypes.POINTER(Counts)
    return function().contents
