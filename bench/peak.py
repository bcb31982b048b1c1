"""Peaks of the processor: products whose operands stay in registers, and reads of memory."""

import ctypes
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from quire_kernels.cpu.library import available_isas

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
_READ_BYTES = 256 << 20


class Peak:
    """Products of bfloat16 or int8, or of float32 if the instruction set has neither, on all threads at once."""

    def __init__(self, directory: Path, num_threads: int, *, is_int8: bool = False) -> None:
        """Compiles them into `directory` with the machine's C compiler, for the instruction set of the kernels."""
        library = directory / "peak.so"
        isa = available_isas()[0]
        flags = _FLAGS[isa] + (["-DPEAK_INT8"] if is_int8 and isa in _OF_INT8 else [])
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", *flags, "-o", library, _SOURCE], check=True)
        loaded = ctypes.CDLL(str(library))
        self._run, self._read = loaded.quire_peak, loaded.quire_read
        self._run.argtypes, self._run.restype = [ctypes.c_long], ctypes.c_long
        self._read.argtypes, self._read.restype = [ctypes.c_void_p, ctypes.c_long], ctypes.c_long
        self._memory = np.ones(_READ_BYTES + 64, np.uint8)
        self._num_threads = num_threads
        self._rounds = 1 << 10
        while self._seconds(self._compute) < _SECONDS:
            self._rounds *= 2

    def gigaflops(self) -> float:
        """Gigaflops a second, the best of some measurements of a few milliseconds."""
        flops: int = self._run(0)
        return flops * self._rounds * self._num_threads / self._best(self._compute) / 1e9

    def gigabytes(self) -> float:
        """Gigabytes a second that all threads read, the best of some passes over 256 MB."""
        return _READ_BYTES / self._best(self._read_part) / 1e9

    def _compute(self, _: int) -> None:
        self._run(self._rounds)

    def _read_part(self, thread: int) -> None:
        part = _READ_BYTES // self._num_threads // 512 * 512
        start = -(-self._memory.ctypes.data // 64) * 64
        self._read(start + thread * part, part)

    def _best(self, work: Callable[[int], None]) -> float:
        return min(self._seconds(work) for _ in range(_TRIES))

    def _seconds(self, work: Callable[[int], None]) -> float:
        """Seconds of the slowest thread."""

        def time_one(thread: int) -> float:
            began = time.perf_counter()
            work(thread)
            return time.perf_counter() - began

        with ThreadPoolExecutor(self._num_threads) as threads:
            return max(threads.map(time_one, range(self._num_threads)))
