"""Peak arithmetic of the processor: products whose operands stay in registers."""

import ctypes
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.cpu.library import available_isas

_SOURCE = Path(__file__).with_name("peak.c")
_FLAGS = {
    "amx": ["-DPEAK_AMX", "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    "avx512_bf16": ["-DPEAK_BF16", "-mavx512f", "-mavx512bf16", "-mavx512vnni"],
    "avx512_vnni": ["-DPEAK_AVX512", "-mavx512f", "-mavx512vnni"],
    "avx512": ["-DPEAK_AVX512", "-mavx512f"],
    "avx2": ["-mavx2", "-mfma"],
}
_OF_INT8 = ("amx", "avx512_bf16", "avx512_vnni")
_SECONDS, _TRIES = 0.005, 4


class Peak:
    """Products of bfloat16 or int8, or of float32 if the instruction set has neither, on all threads at once."""

    def __init__(self, directory: Path, num_threads: int, *, is_int8: bool = False) -> None:
        """Compiles them into `directory` with the machine's C compiler, for the instruction set of the kernels."""
        library = directory / "peak.so"
        isa = available_isas()[0]
        flags = _FLAGS[isa] + (["-DPEAK_INT8"] if is_int8 and isa in _OF_INT8 else [])
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", library, _SOURCE], check=True)
        self._run = ctypes.CDLL(str(library)).quire_peak
        self._run.argtypes, self._run.restype = [ctypes.c_long], ctypes.c_long
        self._num_threads = num_threads
        self._rounds = 1 << 10
        while self._seconds() < _SECONDS:
            self._rounds *= 2

    def gigaflops(self) -> float:
        """Gigaflops a second, the best of some measurements of a few milliseconds."""
        flops: int = self._run(0)
        return flops * self._rounds * self._num_threads / min(self._seconds() for _ in range(_TRIES)) / 1e9

    def _seconds(self) -> float:
        """Seconds of the slowest thread."""

        def time_one(_: int) -> float:
            began = time.perf_counter()
            self._run(self._rounds)
            return time.perf_counter() - began

        with ThreadPoolExecutor(self._num_threads) as threads:
            return max(threads.map(time_one, range(self._num_threads)))
