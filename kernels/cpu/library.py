"""Finds, loads and opens the library that the build made of the C++ files here."""

import ctypes
import re
import struct
import weakref
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Protocol

import torch

SLOT_BYTES = 2 << 20
"""Bytes that each process of a shared group puts in at once."""
MAX_RANKS = 64

LIBRARY = Path(__file__).with_name("libquire_cpu.so")

# Fields of 8 bytes each: q is an address or a whole number, d a double. The structs of api.h, in the order of
# `quire_argument_sizes`.
ATTENTION_ARGS = struct.Struct("24q2d")
NORM_ARGS = struct.Struct("13qd")
SILU_ARGS = struct.Struct("7q")
ROTARY_ARGS = struct.Struct("34q")
PACK_ARGS = struct.Struct("8q")
QUANTIZE_ARGS = struct.Struct("9q")
PRODUCT_ARGS = struct.Struct("16q")
RECORDED_OPERATION = struct.Struct("3q")
RUN_ARGS = struct.Struct("5q")
ALL_REDUCE_ARGS = struct.Struct("9q")
ALL_GATHER_ARGS = struct.Struct("11q")
SHORTEN_ARGS = struct.Struct("7q")
_ARGS = (
    ATTENTION_ARGS,
    NORM_ARGS,
    SILU_ARGS,
    ROTARY_ARGS,
    PACK_ARGS,
    QUANTIZE_ARGS,
    PRODUCT_ARGS,
    RECORDED_OPERATION,
    RUN_ARGS,
    ALL_REDUCE_ARGS,
    ALL_GATHER_ARGS,
    SHORTEN_ARGS,
)

_OPEN_MP = struct.Struct("3q")
_OPEN_MP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_OPEN_MP_FILE = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")

# Takes a context and packed arguments; returns a status of api.h.
Operation = Callable[[int, bytes], int]


class OperationKind(Enum):
    """The enum Operation of api.h, with the arguments of each and which of their fields counts lines."""

    PAGED_ATTENTION = (0, ATTENTION_ARGS, 10)
    RMS_NORM = (1, NORM_ARGS, 7)
    LAYER_NORM = (2, NORM_ARGS, 7)
    SILU_AND_MUL = (3, SILU_ARGS, 4)
    ROTARY = (4, ROTARY_ARGS, 32)
    PRODUCT = (5, PRODUCT_ARGS, 11)
    QUANTIZE = (6, QUANTIZE_ARGS, 5)
    ALL_REDUCE = (7, ALL_REDUCE_ARGS, 7)
    ALL_GATHER = (8, ALL_GATHER_ARGS, 7)

    def __init__(self, number: int, arguments: struct.Struct, lines_field: int) -> None:
        self.number = number
        self._arguments = arguments
        self._lines_field = lines_field

    def lines(self, arguments: bytes) -> int:
        """Tokens, or lines of tokens, in packed arguments of this kind."""
        return self._arguments.unpack(arguments)[self._lines_field]


class Operations(Protocol):
    """What `Library` offers, or something that stands for it."""

    isa: str
    context: int
    paged_attention: Operation
    rms_norm: Operation
    layer_norm: Operation
    silu_and_mul: Operation
    rotary: Operation
    quantize: Operation
    product: Operation
    pack_weight: Operation
    shorten_weight: Operation
    all_reduce: Operation
    all_gather: Operation


class LibraryUnavailableError(Exception):
    """There is no library, or it cannot run here. The message says why."""


class Library:
    """The loaded library for one instruction set.

    Its operations take its context, and run without the interpreter lock.

    Args:
        isa: one of `available_isas`; None is the best of them.

    Raises:
        LibraryUnavailableError: it was not built, is of another version, or lacks the instruction set.
    """

    def __init__(self, path: Path = LIBRARY, isa: str | None = None) -> None:
        library = _load(path)
        isas = _available_isas(library)
        if not isas:
            raise LibraryUnavailableError("this processor has no AVX2")
        self.isa = isas[0] if isa is None else isa
        context = library.quire_open(self.isa.encode(), _open_mp())
        if context is None:
            raise LibraryUnavailableError(f"instruction set {isa!r} is not among {', '.join(isas)}")
        self.context: int = context
        self.paged_attention = _operation(library, "quire_paged_attention")
        self.rms_norm = _operation(library, "quire_rms_norm")
        self.layer_norm = _operation(library, "quire_layer_norm")
        self.silu_and_mul = _operation(library, "quire_silu_and_mul")
        self.rotary = _operation(library, "quire_rotary")
        self.pack_weight = _operation(library, "quire_pack_weight")
        self.shorten_weight = _operation(library, "quire_shorten_weight")
        self.quantize = _operation(library, "quire_quantize")
        self.product = _operation(library, "quire_product")
        self.all_reduce = _operation(library, "quire_all_reduce")
        self.all_gather = _operation(library, "quire_all_gather")
        self.run = _operation(library, "quire_run")
        weakref.finalize(self, library.quire_close, context)


def available_isas(path: Path = LIBRARY) -> tuple[str, ...]:
    """The instruction sets that were built and that this processor has, best first.

    Raises:
        LibraryUnavailableError: as above.
    """
    return _available_isas(_load(path))


def group_bytes(size: int, slot_bytes: int, path: Path = LIBRARY) -> int:
    """Bytes of memory that a group of `size` processes takes, with slots of so many bytes.

    Raises:
        LibraryUnavailableError: as above.
    """
    return _load(path).quire_group_bytes(size, slot_bytes)


def _available_isas(library: ctypes.CDLL) -> tuple[str, ...]:
    return tuple(library.quire_isas().decode().split())


def _load(path: Path) -> ctypes.CDLL:
    if not path.exists():
        raise LibraryUnavailableError(f"{path.name} was not built (it takes a C++20 compiler at installation)")
    try:
        library = ctypes.CDLL(str(path))
        library.quire_isas.restype = ctypes.c_char_p
        library.quire_open.argtypes = (ctypes.c_char_p, ctypes.c_char_p)
        library.quire_open.restype = ctypes.c_void_p
        library.quire_close.argtypes = (ctypes.c_void_p,)
        library.quire_close.restype = None
        library.quire_group_bytes.argtypes = (ctypes.c_int64, ctypes.c_int64)
        library.quire_group_bytes.restype = ctypes.c_int64
        sizes = (ctypes.c_int64 * len(_ARGS))()
        library.quire_argument_sizes(sizes)
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path.name} cannot be loaded: {error}") from error
    if list(sizes) != [arguments.size for arguments in _ARGS]:
        raise LibraryUnavailableError(f"{path.name} was built from other sources; install again")
    return library


def _operation(library: ctypes.CDLL, name: str) -> Operation:
    function = library[name]
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    function.restype = ctypes.c_int32
    return function


def _open_mp() -> bytes:
    """The addresses that `quire_open` wants, from the runtime that torch itself runs on."""
    path = find_open_mp()
    try:
        runtime = ctypes.CDLL(str(path))
        addresses = [ctypes.cast(runtime[name], ctypes.c_void_p).value for name in _OPEN_MP_FUNCTIONS]
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path} is no OpenMP runtime to share: {error}") from error
    return _OPEN_MP.pack(*addresses)


def find_open_mp() -> Path:
    """The OpenMP runtime in this process; where there are several, the one that came with torch.

    Raises:
        LibraryUnavailableError: there is none.
    """
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    found = sorted({Path(file) for file in files if _OPEN_MP_FILE.search(file)})
    if not found:
        raise LibraryUnavailableError("torch has loaded no OpenMP runtime")
    site = Path(torch.__file__).resolve().parents[1]
    return next((path for path in found if path.is_relative_to(site)), found[0])
