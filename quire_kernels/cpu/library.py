"""Finds, loads and opens the library that was built from the C++ files here, and declares its interface.

The structs mirror runtime/api.h. The library reports the offsets of its fields and the values of its constants, and a
library that was built from another api.h is refused when it is loaded.
"""

import ctypes
import re
import weakref
from collections.abc import Iterable, Mapping
from ctypes import POINTER, Structure, c_char_p, c_double, c_int64, c_void_p
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch

from quire_kernels.packed_weight import Coding

LIBRARY = Path(__file__).with_name("libquire_cpu.so")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The enum Dtype."""
STORED_PLAIN, STORED_INT8, STORED_BF12 = range(3)
"""The enum StoredAs."""
_CODED = {
    "kQ4K": Coding.Q4_K,
    "kQ5K": Coding.Q5_K,
    "kQ6K": Coding.Q6_K,
    "kQ80": Coding.Q8_0,
    "kQ40": Coding.Q4_0,
    "kIq4Xs": Coding.IQ4_XS,
    "kQ41": Coding.Q4_1,
    "kQ50": Coding.Q5_0,
    "kQ51": Coding.Q5_1,
    "kIq4Nl": Coding.IQ4_NL,
    "kScaledInt4": Coding.INT4,
    "kScaledInt8": Coding.INT8,
    "kScaledFp8": Coding.FP8,
    "kMxfp4": Coding.MXFP4,
    "kNvfp4": Coding.NVFP4,
    "kTable4": Coding.TABLE4,
}
STORED_CODED = {coding: number for number, coding in enumerate(_CODED.values(), start=3)}
"""The numbers of coded weights in the enum StoredAs."""
SCORES_SOFTMAX, SCORES_SIGMOID = range(2)
"""The enum Scoring."""
PANEL, WORDS_OF_BLOCK = 32, 16
"""Columns of a panel of a packed weight, and words of a column in a block of it."""
BF12_GROUP, BF12_GROUP_BYTES, BF12_HEAD_BYTES, BF12_EXCEPTION_BYTES = 128, 192, 64, 8
"""Numbers of a group of a weight in 12 bits, and sizes of such a group, of a panel's head, and of an exception."""
MAX_RANKS = 64
SLOT_BYTES = 2 << 20
"""Bytes that each process of a shared group can copy into its slot at once."""

_CONSTANTS = {
    "kFloat32": DTYPES[torch.float32],
    "kBFloat16": DTYPES[torch.bfloat16],
    "kFloat16": DTYPES[torch.float16],
    "kPlain": STORED_PLAIN,
    "kInt8": STORED_INT8,
    "kBf12": STORED_BF12,
    **{name: STORED_CODED[coding] for name, coding in _CODED.items()},
    "kSoftmax": SCORES_SOFTMAX,
    "kSigmoid": SCORES_SIGMOID,
    "kPanel": PANEL,
    "kWordsOfBlock": WORDS_OF_BLOCK,
    "Bf12Group::kNumbers": BF12_GROUP,
    "sizeof(Bf12Group)": BF12_GROUP_BYTES,
    "sizeof(Bf12Head)": BF12_HEAD_BYTES,
    "sizeof(Bf12Exception)": BF12_EXCEPTION_BYTES,
    "kMaxRanks": MAX_RANKS,
}


def _fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


_pointers, _integers, _doubles = (partial(_fields, kind) for kind in (c_void_p, c_int64, c_double))


STRUCTS: list[type[Structure]] = []
"""The structs of api.h."""


class _Mirrored(Structure):
    """A struct of api.h, or a base of some."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "_fields_" in vars(cls):
            STRUCTS.append(cls)


class Arguments(_Mirrored):
    """The arguments of one operation."""

    threads: int


class AttentionArgs(Arguments):
    _fields_ = (
        *_pointers("output query kv_cache block_tables query_start_loc seq_lens alibi_slopes sinks"),
        *_integers("dtype threads num_tokens num_rows num_heads num_kv_heads head_dim block_size num_blocks"),
        *_integers(
            "block_stride value_offset query_token_stride query_head_stride table_stride table_width int8_line_bytes"
        ),
        *_integers("sliding_window"),
        *_doubles("scale soft_cap"),
    )


class TextHeads(_Mirrored):
    _fields_ = (*_pointers("at"), *_integers("token_stride head_stride"))


class TextAttentionArgs(Arguments):
    _fields_ = (
        *_pointers("output"),
        *(("query", TextHeads), ("key", TextHeads), ("value", TextHeads)),
        *_pointers("lengths bias"),
        *_integers("dtype threads num_tokens num_texts num_heads num_kv_heads head_dim bias_stride window"),
        *_doubles("scale"),
    )


class NormArgs(Arguments):
    _fields_ = (
        *_pointers("output x residual weight bias"),
        *_integers("dtype threads rows hidden x_stride x_group x_group_stride residual_stride output_stride"),
        *_doubles("eps offset"),
    )


class SiluArgs(Arguments):
    _fields_ = (*_pointers("output x"), *_integers("dtype threads rows n x_stride"))


class MultiplyArgs(Arguments):
    _fields_ = (*_pointers("output x y"), *_integers("dtype threads rows n x_stride y_stride"))


class Grouping(_Mirrored):
    _fields_ = (*_integers("pieces scale_dtype has_zeros"),)


class PackArgs(Arguments):
    _fields_ = (
        *_pointers("packed weight"),
        *_integers("threads out_features in_bytes row_bytes gated word_bytes stored"),
        *_pointers("scales zeros parts table"),
        ("grouping", Grouping),
    )


class LookUpArgs(Arguments):
    _fields_ = (
        *_pointers("output rows ids"),
        *_integers("threads num_ids num_rows row_bytes row_stride stored"),
    )


class CompressArgs(Arguments):
    _fields_ = (
        *_pointers("compressed packed num_exceptions"),
        *_integers("threads panels numbers max_exceptions"),
    )


class QuantizeArgs(Arguments):
    _fields_ = (*_pointers("values scales x"), *_integers("dtype threads rows n x_stride value_stride"))


class LowRankPart(_Mirrored):
    _fields_ = (*_pointers("a b"), *_doubles("scale"), *_integers("rank first_tile last_tile column"))


class ShrinkArgs(Arguments):
    _fields_ = (
        *_pointers("shrunk x parts slots"),
        *_integers("dtype threads num_tokens num_slots num_parts max_rank in_features x_stride shrunk_stride"),
    )


class ProductArgs(Arguments):
    _fields_ = (
        *_pointers("output x weight bias scales x_scales shrunk parts slots"),
        *_integers("dtype stored output_dtype activation threads num_tokens out_features in_features"),
        *_integers("x_stride output_stride"),
        ("grouping", Grouping),
        *_integers("shrunk_stride num_slots num_parts"),
    )


class ChooseArgs(Arguments):
    _fields_ = (
        *_pointers("chosen weights outputs correction factors"),
        *_integers("dtype threads num_tokens num_experts num_chosen output_stride scoring normalized"),
        *_integers("num_groups num_chosen_groups group_members"),
        *_doubles("scale"),
    )


class ExpertsArgs(Arguments):
    _fields_ = (
        *_pointers("output x x_scales chosen weights shared shared_gate inner down"),
        *_integers("dtype threads num_tokens num_chosen num_experts x_stride"),
    )


class DrawArgs(Arguments):
    _fields_ = (
        *_pointers("token_ids highest logits temperature top_k top_p min_score numbers"),
        *_integers("threads rows vocab_size row_stride"),
    )


class Heads(_Mirrored):
    _fields_ = (
        *_pointers("source target"),
        *_integers("count source_token_stride source_head_stride target_token_stride target_head_stride"),
    )


class CacheSlots(_Mirrored):
    _fields_ = (
        *_pointers("kv_cache slot_mapping"),
        *_integers("num_blocks block_stride value_offset block_size int8_line_bytes"),
    )


class RotaryArgs(Arguments):
    _fields_ = (
        *(("query", Heads), ("key", Heads), ("value", Heads), ("cache", CacheSlots)),
        *_pointers("positions cos_sin"),
        *_integers("max_position dtype threads num_tokens head_dim"),
    )


class SharedGroup(_Mirrored):
    _fields_ = (*_pointers("memory"), *_integers("rank size slot_bytes"))


class AllReduceArgs(Arguments):
    _fields_ = (*_pointers("x"), ("group", SharedGroup), *_integers("dtype threads rows n"))


class AllGatherArgs(Arguments):
    _fields_ = (*_pointers("output x"), ("group", SharedGroup), *_integers("threads rows part total x_stride"))


class StatePages(_Mirrored):
    _fields_ = (
        *_pointers("pages tables query_start_loc seq_lens checkpoints checkpoint_tables num_kept"),
        *_integers("num_rows num_blocks block_stride table_stride table_width checkpoint_stride"),
        *_integers("num_checkpoints unit_bytes units_per_block first_unit"),
    )


class ConvArgs(Arguments):
    _fields_ = (
        *_pointers("output x weight bias before after"),
        ("pages", StatePages),
        *_integers("dtype weight_dtype threads num_tokens channels taps x_stride before_stride after_stride"),
        *_integers("weight_channel_stride weight_tap_stride is_silu"),
    )


class RecurrenceArgs(Arguments):
    _fields_ = (
        *_pointers("output query key value decay beta skip"),
        ("pages", StatePages),
        *_integers("dtype threads num_tokens num_key_heads num_heads key_dim value_dim query_token_stride"),
        *_integers("query_head_stride key_token_stride key_head_stride value_token_stride value_head_stride"),
        *_integers("decay_token_stride decay_head_stride beta_token_stride is_per_channel is_delta"),
        *_integers("is_unit_norm"),
        *_doubles("scale"),
    )


class ScanArgs(Arguments):
    _fields_ = (
        *_pointers("output x dt a b c skip"),
        ("pages", StatePages),
        *_integers("dtype threads num_tokens channels num_states x_stride dt_stride b_stride c_stride"),
    )


class GatesArgs(Arguments):
    _fields_ = (
        *_pointers("decay beta a b a_log dt_bias"),
        *_integers("dtype threads num_tokens num_heads head_channels a_stride b_stride"),
        *_doubles("dt_min dt_max beta_scale"),
    )


class GatedNormArgs(Arguments):
    _fields_ = (
        *_pointers("output x gate weight"),
        *_integers("dtype weight_dtype threads num_tokens hidden group_size weight_size x_stride gate_stride"),
        *_integers("is_norm_first is_sigmoid"),
        *_doubles("eps"),
    )


class RecordedOperation(_Mirrored):
    _fields_ = (*_integers("operation"), *_pointers("args"), *_integers("lines_per_token"))


class RunArgs(Arguments):
    _fields_ = (*_pointers("operations"), *_integers("num_operations threads num_tokens num_rows"))


class _Layout(Structure):
    _fields_ = (("name", c_char_p), ("value", c_int64), ("kind", c_int64))


_OPEN_MP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
_OPEN_MP_FILE = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")

# The errors of the enum Status of api.h.
_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "block_tables names a block that is not in kv_cache"),
    2: (IndexError, "query_start_loc and seq_lens, or lengths, contradict each other or the shapes"),
    3: (IndexError, "slot_mapping names a slot that is not in kv_cache"),
    4: (IndexError, "positions names a position that is not in cos_sin_cache"),
    6: (IndexError, "ids names a row that is not in the weight"),
    7: (IndexError, "slots names a slot that is not in the table of low-rank parts"),
    8: (IndexError, "chosen names an expert that there is not"),
    9: (IndexError, "checkpoints names a line that is not in checkpoint_tables"),
    5: (MemoryError, "there is not enough memory for the intermediate results of the operation"),
}


class Operation(Enum):
    """A function of the library, with the field of its arguments that counts tokens or lines of tokens."""

    PAGED_ATTENTION = ("paged_attention", 0, "num_tokens")
    RMS_NORM = ("rms_norm", 1, "rows")
    LAYER_NORM = ("layer_norm", 2, "rows")
    SILU_AND_MUL = ("silu_and_mul", 3, "rows")
    ROTARY = ("rotary", 4, "num_tokens")
    PRODUCT = ("product", 5, "num_tokens")
    QUANTIZE = ("quantize", 6, "rows")
    ALL_REDUCE = ("all_reduce", 7, "rows")
    ALL_GATHER = ("all_gather", 8, "rows")
    SHRINK = ("shrink", 9, "num_tokens")
    CHOOSE = ("choose", 10, "num_tokens")
    EXPERTS = ("experts", 11, "num_tokens")
    MULTIPLY = ("multiply", 12, "rows")
    CAUSAL_CONV = ("causal_conv", 13, "num_tokens")
    LINEAR_RECURRENCE = ("linear_recurrence", 14, "num_tokens")
    SELECTIVE_SCAN = ("selective_scan", 15, "num_tokens")
    GATES = ("gates", 16, "num_tokens")
    GATED_NORM = ("gated_norm", 17, "num_tokens")
    TEXT_ATTENTION = ("text_attention", 18, "num_tokens")
    PACK_WEIGHT = ("pack_weight", None, None)
    LOOK_UP = ("look_up", None, None)
    COMPRESS_WEIGHT = ("compress_weight", None, None)
    DRAW = ("draw", None, None)
    RUN = ("run", None, None)

    def __init__(self, function: str, number: int | None, lines_field: str | None) -> None:
        self.function = f"quire_{function}"
        self.number = number
        """In the enum Operation of api.h; None if it cannot be recorded."""
        self.lines_field = lines_field


class Operations(Protocol):
    """The interface of `Library`, which a recorder implements too."""

    isa: str

    def call(self, operation: Operation, arguments: Arguments) -> None: ...


class LibraryUnavailableError(Exception):
    """There is no usable library. The message says why."""


class Library:
    """The loaded library for one instruction set. Calls run without the interpreter lock.

    Args:
        path: None is `LIBRARY`.
        isa: one of `available_isas`; None is the best of them.

    Raises:
        LibraryUnavailableError: it was not built, is of another version, or lacks the instruction set.
    """

    def __init__(self, path: Path | None = None, isa: str | None = None) -> None:
        library = _load(path)
        isas = _available_isas(library)
        if not isas:
            raise LibraryUnavailableError("this processor has none of the instruction sets of the library (x86: AVX2)")
        self.isa = isas[0] if isa is None else isa
        context = library.quire_open(self.isa.encode(), _open_mp())
        if context is None:
            raise LibraryUnavailableError(f"instruction set {isa!r} is not among {', '.join(isas)}")
        self._context: int = context
        self._functions = {operation: _function(library, operation) for operation in Operation}
        weakref.finalize(self, library.quire_close, context)

    def call(self, operation: Operation, arguments: Arguments) -> None:
        """Runs an operation with the struct that belongs to it, on as many threads as torch uses.

        Raises:
            IndexError: an index tensor is out of range. Nothing was written.
            MemoryError: there is no memory for intermediate results.
        """
        arguments.threads = torch.get_num_threads()
        status = self._functions[operation](self._context, ctypes.byref(arguments))
        if status:
            error, message = _ERRORS[status]
            raise error(message)


# These functions raise LibraryUnavailableError as `Library` does.


def available_isas() -> tuple[str, ...]:
    """The instruction sets that were built and that this processor has, best first."""
    return _available_isas(_load())


def group_bytes(size: int, slot_bytes: int) -> int:
    """Bytes of memory that a group of `size` processes takes, with slots of `slot_bytes` bytes."""
    return _load().quire_group_bytes(size, slot_bytes)


def coded_panel_bytes(coding: Coding, in_features: int, grouping: Grouping) -> int:
    """Bytes of a panel of a coded weight; in_features are whole blocks of 32."""
    return _load().quire_coded_panel_bytes(STORED_CODED[coding], in_features, ctypes.byref(grouping))


def expected_layout(structs: Iterable[type[Structure]], constants: Mapping[str, int]) -> dict[str, tuple[int, str]]:
    """The layout that the library must report, by name: sizes of structs, offsets and kinds of fields, constants."""
    layout = {name: (value, "") for name, value in constants.items()}
    kinds: dict[object, str] = {c_void_p: "p", c_int64: "q", c_double: "d"}
    for struct in structs:
        layout[struct.__name__] = (ctypes.sizeof(struct), "")
        for name, kind, *_ in struct._fields_:
            layout[f"{struct.__name__}.{name}"] = (getattr(struct, name).offset, kinds.get(kind, "s"))
    return layout


def _available_isas(library: ctypes.CDLL) -> tuple[str, ...]:
    return tuple(library.quire_isas().decode().split())


def _load(path: Path | None = None) -> ctypes.CDLL:
    path = path or LIBRARY
    if not path.exists():
        raise LibraryUnavailableError(f"{path.name} was not built (it takes a C++20 compiler at installation)")
    return _opened(path, path.stat().st_mtime_ns)


@cache
def _opened(path: Path, changed_at_ns: int) -> ctypes.CDLL:
    """The library that the file holds since that time, whose layout is compared once."""
    try:
        library = ctypes.CDLL(str(path))
        library.quire_isas.restype = c_char_p
        library.quire_open.argtypes = (c_char_p, c_void_p)
        library.quire_open.restype = c_void_p
        library.quire_close.argtypes = (c_void_p,)
        library.quire_close.restype = None
        library.quire_group_bytes.argtypes = (c_int64, c_int64)
        library.quire_group_bytes.restype = c_int64
        library.quire_coded_panel_bytes.argtypes = (c_int64, c_int64, c_void_p)
        library.quire_coded_panel_bytes.restype = c_int64
        library.quire_layout.restype = POINTER(_Layout)
        difference = _layout_difference(library)
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path.name} cannot be loaded: {error}") from error
    if difference is not None:
        raise LibraryUnavailableError(f"{path.name} was built from other sources ({difference}); install again")
    return library


def _layout_difference(library: ctypes.CDLL) -> str | None:
    """The first name whose value differs between the library and this module."""
    found: dict[str, tuple[int, str]] = {}
    for entry in library.quire_layout():
        if entry.name is None:
            break
        found[entry.name.decode()] = (entry.value, chr(entry.kind) if entry.kind else "")
    expected = expected_layout(STRUCTS, _CONSTANTS)
    return next((name for name in {**expected, **found} if expected.get(name) != found.get(name)), None)


def _function(library: ctypes.CDLL, operation: Operation) -> "ctypes._NamedFuncPointer":
    function = library[operation.function]
    function.argtypes = (c_void_p, c_void_p)
    function.restype = ctypes.c_int32
    return function


def _open_mp() -> ctypes.Array[c_void_p]:
    """The struct OpenMp: functions of the runtime that torch uses."""
    path = find_open_mp()
    try:
        runtime = ctypes.CDLL(str(path))
        addresses = [ctypes.cast(runtime[name], c_void_p) for name in _OPEN_MP_FUNCTIONS]
    except (OSError, AttributeError) as error:
        raise LibraryUnavailableError(f"{path} is not a usable OpenMP runtime: {error}") from error
    return (c_void_p * len(addresses))(*addresses)


def find_open_mp() -> Path:
    """The OpenMP runtime in this process; if there are several, the one that came with torch.

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
