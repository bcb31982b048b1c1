"""Selects the implementation of the operations for a device: the CPU library, the CUDA kernels, or the reference."""

import functools
import hashlib
import importlib.util
import logging
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

import torch

from quire_kernels import reference
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import DTYPES, LIBRARY, Library, LibraryUnavailableError
from quire_kernels.cpu.texts import TextKernels
from quire_kernels.packed_weight import CodedWeight, PackedWeight, Quantization
from quire_kernels.reference import ScoreRule
from quire_kernels.states import StatePages, StateUnits

logger = logging.getLogger(__name__)
_recording_kernels: ContextVar[CpuKernels | None] = ContextVar("recording_kernels", default=None)


class Implementation(Protocol):
    """The operations that `quire_kernels.ops` calls after its checks, with the same arguments. Norms with a `residual`
    are of its sum with x, which they write into it; it is contiguous."""

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scores: ScoreRule,
        max_query_len: int,
        max_seq_len: int,
    ) -> torch.Tensor: ...

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None: ...

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rotary_and_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor: ...

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor: ...


class StateOperations(Protocol):
    """The operations on states that a layer keeps for each sequence."""

    def causal_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        pages: StatePages,
        units: StateUnits,
        *,
        activation: str | None,
        before: torch.Tensor | None,
        after: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def linear_recurrence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
        pages: StatePages,
        units: StateUnits,
        *,
        delta: bool,
        unit_norm: bool,
        scale: float,
        skip: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        pages: StatePages,
        units: StateUnits,
        *,
        skip: torch.Tensor | None,
    ) -> torch.Tensor: ...

    def gates(
        self,
        a: torch.Tensor,
        b: torch.Tensor | None,
        a_log: torch.Tensor,
        dt_bias: torch.Tensor,
        *,
        dt_min: float,
        dt_max: float,
        beta_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def gated_norm(
        self,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        group_size: int,
        *,
        norm_first: bool,
        activation: str,
    ) -> torch.Tensor: ...


class Products(Protocol):
    """Products with packed weights."""

    def product(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str,
        output_dtype: torch.dtype,
    ) -> torch.Tensor: ...


class PlainProducts(Products, Protocol):
    """Products with weights that are not coded."""

    def pack_weight(self, weight: torch.Tensor, gated: bool, quantization: Quantization) -> PackedWeight: ...


class CodedProducts(Products, Protocol):
    """Products with weights as files store them."""

    def pack_coded(
        self, weight: CodedWeight, gated: bool, quantization: Quantization, dtype: torch.dtype
    ) -> PackedWeight: ...

    def products(
        self,
        x: torch.Tensor,
        weights: Sequence[PackedWeight],
        bias: torch.Tensor | None,
        output_dtype: torch.dtype,
    ) -> torch.Tensor: ...

    def look_up(self, weight: CodedWeight, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class BlockMoves(Protocol):
    """Moves of blocks on a GPU, and between it and the host."""

    def copy_blocks(self, kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None: ...

    def swap_blocks(
        self, source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], pairs: torch.Tensor
    ) -> None: ...


class GpuOperations(Implementation, BlockMoves, Protocol):
    """All operations that have a kernel for GPUs."""


def implementation_for(device: torch.device) -> Implementation:
    """The implementation for such a device: the fastest that this machine has, or the one that is recording."""
    return _recording_kernels.get() or fastest_for(device)


@contextmanager
def recording_with(kernels: CpuKernels) -> Iterator[None]:
    """Within it, operations of this thread run on these kernels, which record them."""
    token = _recording_kernels.set(kernels)
    try:
        yield
    finally:
        _recording_kernels.reset(token)


@functools.cache
def fastest_for(device: torch.device) -> Implementation:
    """The fastest implementation that this machine has for tensors on such a device.

    If the CPU library is missing, the first call logs a warning, and the reference takes its place.
    """
    if device.type == "cuda":
        return _gpu_operations()
    if device.type != "cpu":
        return reference
    try:
        return CpuKernels(Library())
    except LibraryUnavailableError as error:
        logger.warning("no CPU kernels, the operations run in plain torch: %s", error)
        return reference


@functools.cache
def block_moves_for(device: torch.device) -> BlockMoves:
    """The fastest moves of blocks if one of the pools is on such a device."""
    return _gpu_operations() if device.type == "cuda" else reference


def _gpu_operations() -> GpuOperations:
    """The Triton kernels; the reference, with a warning in the log, if Triton is missing or does not work."""
    if importlib.util.find_spec("triton") is None:
        logger.warning("no Triton, the operations on the GPU run in plain torch")
        return reference
    if torch.cuda.is_available() and (reason := _why_triton_does_not_work()):
        logger.warning("Triton does not work here, the operations on the GPU run in plain torch: %s", reason)
        return reference
    # Imported here: a machine without a GPU needs no Triton.
    from quire_kernels import cuda

    return cuda


def _why_triton_does_not_work() -> str | None:
    """Triton compiles a launcher before its first launch, which needs a C compiler, Python's headers, and a folder from
    which libraries can be loaded."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def reads_int8_pools(implementation: Implementation) -> bool:
    """Whether it reads and writes pools of int8 itself."""
    return isinstance(implementation, CpuKernels)


def name_of(device: torch.device) -> str:
    """For people: a GPU by its name; a processor with the instruction set that the operations on it use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    implementation = fastest_for(device)
    isa = implementation.isa if isinstance(implementation, CpuKernels) else "plain torch"
    return f"{_processor_name()}, {isa}"


def numerics_of(device: torch.device) -> tuple[str, ...]:
    """The device's name and the build of the kernels: equal for two processes whose operations on it round alike."""
    sources = LIBRARY if device.type == "cpu" and isinstance(fastest_for(device), CpuKernels) else Path(__file__)
    return name_of(device), hashlib.sha256(sources.read_bytes()).hexdigest()


def _processor_name() -> str:
    """As Linux and Python know it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def largest_head_dim(device: torch.device) -> int | None:
    """The largest head size that `ops.paged_attention` takes on such a device; None if it takes any."""
    if device.type != "cuda" or fastest_for(device) is reference:
        return None
    # Imported here: a machine without a GPU needs no Triton.
    from quire_kernels.cuda.attention import MAX_HEAD_DIM

    return MAX_HEAD_DIM


def coded_products_for(device: torch.device, dtype: torch.dtype) -> CodedProducts | None:
    """Products of tokens of this dtype with coded weights, if such a device has them."""
    implementation = implementation_for(device)
    dtypes = (torch.bfloat16, torch.float16) if device.type == "cuda" else (torch.bfloat16,)
    if dtype not in dtypes or implementation is reference:
        return None
    if device.type == "cuda":
        # Imported here: a machine without a GPU needs no Triton.
        from quire_kernels.cuda import coded

        return coded
    return implementation if isinstance(implementation, CpuKernels) else None


def has_fp8_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether tokens of this dtype are rounded to FP8 on such a device if the format of a weight does so: products then
    differ from `pack_coded`'s."""
    if device.type != "cuda" or coded_products_for(device, dtype) is None:
        return False
    from quire_kernels.cuda import fp8

    return fp8.has_products(device, dtype)


def draws_for(device: torch.device) -> CpuKernels | None:
    """The implementation that draws tokens on such a device, if there is one."""
    implementation = fastest_for(device) if device.type == "cpu" else reference
    return implementation if isinstance(implementation, CpuKernels) else None


def text_kernels_for(device: torch.device, dtype: torch.dtype) -> TextKernels | None:
    """The kernels for texts of this dtype, if there are any."""
    implementation = implementation_for(device) if device.type == "cpu" and dtype in DTYPES else reference
    return implementation.texts if isinstance(implementation, CpuKernels) else None


def packed_products_for(device: torch.device, dtype: torch.dtype, quantization: Quantization) -> PlainProducts | None:
    """Products with packed weights of this dtype, if such a device has a kernel for them."""
    implementation = implementation_for(device) if device.type == "cpu" else reference
    if not isinstance(implementation, CpuKernels) or not implementation.has_products(dtype, quantization):
        return None
    return implementation
