"""Compiles Triton kernels for an H100 or H200 without one: they fit, and steps of other sizes compile nothing new."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire_kernels.cuda import attention, blocks, coded, fp8
from quire_kernels.cuda.attention import paged_attention
from quire_kernels.cuda.blocks import reshape_and_cache, rotary_and_cache
from quire_kernels.cuda.pointwise import layer_norm, rms_norm, silu_and_mul
from quire_kernels.packed_weight import Coding, Quantization
from quire_kernels.reference import ScoreRule
from tests.support.coded_weights import make_coded
from tests.support.tiers import is_third_tier
from tests.unit.kernels.test_paged_attention import make_batch

pytestmark = pytest.mark.extended

# Codings with blocks within blocks, and codings with scales next to the codes.
SOME = [
    Coding.Q5_K,
    pytest.param(Coding.INT4, marks=pytest.mark.long),
    pytest.param(Coding.FP8, marks=pytest.mark.long),
]
DTYPES = [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.long) for each in (torch.float32, torch.float16))]
# Maximum shared memory of one program on compute capability 9.0.
SHARED_MEMORY = 227 * 1024
# Maximum programs of one launch along each dimension.
LARGEST_GRID = (2**31 - 1, 65535, 65535)


class Hopper:
    """The driver of an absent GPU: enough of it to compile for it."""

    def get_current_device(self) -> str:
        # Separates these compiled kernels from kernels of a real device.
        return "hopper"

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> set[Any]:
    """The kernels of all launches, which are compiled and not run."""
    kernels: set[Any] = set()
    run = JITFunction.run

    def compile_only(self: JITFunction[Any], *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        assert all(0 < size <= most for size, most in zip(grid, LARGEST_GRID, strict=False)), grid
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        kernels.add(kernel)
        return kernel

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(attention, "_num_sms", lambda device: 132)
    monkeypatch.setattr(triton.runtime.driver, "_active", Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return kernels


def attend(rows: list[tuple[int, int]], *, scores: ScoreRule | None = None, **shape: Any) -> None:
    batch = make_batch(rows, **shape)
    paged_attention(*batch.tensors, scores=scores or ScoreRule(0.1), **batch.limits)


def assert_fit(kernels: set[Any], names: set[str]) -> None:
    assert {kernel.name for kernel in kernels} == names
    for kernel in kernels:
        assert kernel.metadata.shared <= SHARED_MEMORY, f"{kernel.name} takes {kernel.metadata.shared} bytes"


@pytest.mark.long
@pytest.mark.parametrize(
    ("head_dim", "block_size", "dtype"),
    [
        (256, 16, torch.float32),
        *([(32, 5, torch.bfloat16), (32, 64, torch.float16)] if is_third_tier() else []),
    ],
)
def test_attention_with_every_score_option_fits_a_multiprocessor(
    compiled: set[Any], head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    scores = ScoreRule(0.1, sliding_window=600, soft_cap=20.0, alibi_slopes=torch.ones(6), sinks=torch.ones(6))
    attend([(1, 5), (9, 900)], scores=scores, heads=(6, 2), head_dim=head_dim, block_size=block_size, dtype=dtype)
    assert_fit(compiled, {"_decode_kernel", "_join_kernel", "_prefill_kernel"})


def stack_bytes(kernel: Any, folder: Path) -> int:
    """Bytes that a thread keeps in memory for want of registers."""
    (cubin := folder / "kernel.cubin").write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(re.findall(r"STACK:(\d+)", usage.stdout + usage.stderr)[-1])


@pytest.mark.parametrize(
    ("heads", "head_dim", "sliding_window", "has_sinks"),
    [
        pytest.param((32, 8), 128, None, False, marks=pytest.mark.long),
        # Without sinks it does less of the same work.
        pytest.param((16, 8), 256, 600, True, marks=pytest.mark.long),
        *([((16, 16), 64, None, True), ((32, 1), 128, None, True)] if is_third_tier() else []),
    ],
)
def test_attention_keeps_everything_in_registers(
    compiled: set[Any],
    tmp_path: Path,
    heads: tuple[int, int],
    head_dim: int,
    sliding_window: int | None,
    has_sinks: bool,
) -> None:
    soft_cap, sinks = None if sliding_window is None else 20.0, torch.zeros(heads[0]) if has_sinks else None
    scores = ScoreRule(0.1, sliding_window, soft_cap, sinks=sinks)
    attend([(1, 5), (9, 900)], scores=scores, heads=heads, head_dim=head_dim, block_size=16, dtype=torch.bfloat16)
    names = {"_decode_kernel", "_join_kernel", "_prefill_kernel"}
    assert_fit(compiled, names)
    assert {kernel.name: stack_bytes(kernel, tmp_path) for kernel in compiled} == dict.fromkeys(names, 0)


@pytest.mark.long
def test_the_grid_holds_more_rows_and_tiles_than_one_dimension_of_cuda_s_small_ones(compiled: set[Any]) -> None:
    num_rows, num_heads, head_dim = 70_000, 2, 16
    query = torch.zeros(num_rows, num_heads, head_dim)
    tables, seq_lens = torch.zeros(num_rows, 1, dtype=torch.int32), torch.ones(num_rows, dtype=torch.int32)
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    pool = torch.zeros(2, 1, 1, 16, head_dim)
    paged_attention(query, pool, tables, starts, seq_lens, scores=ScoreRule(0.1), max_query_len=2, max_seq_len=5000)
    assert_fit(compiled, {"_decode_kernel", "_join_kernel", "_prefill_kernel"})


def pointwise_step(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> None:
    x, weight = torch.zeros(num_tokens, 4096, dtype=dtype), torch.ones(4096, dtype=dtype)
    rms_norm(x, weight, 1e-5, residual=rms_norm(x, weight, 1e-5))
    layer_norm(x, weight, weight, 1e-5)
    silu_and_mul(x)
    # Indexes are parts of one buffer, as in a step.
    buffer = torch.zeros(4 * num_tokens + 1, dtype=torch.int64)
    positions, slots = buffer[num_tokens : 2 * num_tokens], buffer[1 + 2 * num_tokens :][:num_tokens]
    query, key, value = torch.zeros(num_tokens, 24, 128, dtype=dtype).split((16, 4, 4), dim=1)
    pool = torch.zeros(2, 8, 4, 16, 128, dtype=dtype)
    rotary_and_cache(query, key, value, positions, torch.zeros(8, 128), pool, slots)
    reshape_and_cache(key, value, pool, slots)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pointwise_kernels_compile(compiled: set[Any], dtype: torch.dtype) -> None:
    pointwise_step(7, dtype)
    names = {"_rms_norm_kernel", "_layer_norm_kernel", "_silu_and_mul_kernel", "_rotary_kernel"}
    assert_fit(compiled, names | {"_rotary_key_and_cache_kernel", "_reshape_and_cache_kernel"})


def coded_step(num_tokens: int, coding: Coding = Coding.Q4_K) -> None:
    x = torch.zeros(num_tokens, 2048, dtype=torch.bfloat16)
    weight = coded.pack_coded(make_coded(coding, 128, 2048 // coding.group[0]), False, Quantization.NONE)
    coded.product(x[:, : weight.in_features], weight, x[0, :128], "identity", torch.bfloat16)


@pytest.mark.parametrize("coding", Coding if is_third_tier() else SOME)
def test_coded_products_run_on_tensor_cores_without_a_stack(compiled: set[Any], tmp_path: Path, coding: Coding) -> None:
    for num_tokens in (1, 100):
        coded_step(num_tokens, coding)
    assert len(compiled) == 2
    for kernel in compiled:
        assert "mma" in kernel.asm["ptx"]
        assert stack_bytes(kernel, tmp_path) == 0
        # A thread makes 64 numbers a turn; at least 8 share two scales, two steps and a zero.
        assert kernel.asm["sass"].count("LDG.E") <= 48
    assert_fit(compiled, {"_product_kernel"})


def test_tokens_are_rounded_to_fp8_by_one_instruction_for_two(compiled: set[Any]) -> None:
    for num_tokens in (1, 16, 33):
        fp8.rounded(torch.zeros(num_tokens, 2048, dtype=torch.bfloat16))
    (kernel,) = compiled
    assert "cvt.rn.satfinite.e4m3x2.f32" in kernel.asm["ptx"]


def test_blocks_move_sixteen_bytes_at_a_time(compiled: set[Any]) -> None:
    pools = [torch.zeros(2, 8, 4, 16, 64, dtype=torch.bfloat16) for _ in range(2)]
    blocks.copy_blocks(pools, torch.tensor([[0, 7], [1, 5]]))
    (kernel,) = compiled
    assert "ld.global.v4.b32" in kernel.asm["ptx"]
    assert "st.global.v4.b32" in kernel.asm["ptx"]


def test_decode_reads_the_pool_sixteen_bytes_at_a_time(compiled: set[Any]) -> None:
    attend([(1, 900), (1, 3)], heads=(32, 8), head_dim=128, block_size=16, dtype=torch.bfloat16)
    (kernel,) = (each for each in compiled if each.name == "_decode_kernel")
    sizes = re.findall(r"cp\.async\.(c[ag])\.shared\.global \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+)", kernel.asm["ptx"])
    # Block ids, four bytes each, are sent the same way.
    assert set(sizes) == {("cg", "0x10"), ("ca", "0x4")}


def test_what_is_stored_is_stored_sixteen_bytes_at_a_time(compiled: set[Any]) -> None:
    pointwise_step(7)
    assert len(compiled) == 7
    for kernel in compiled:
        assert set(re.findall(r"st\.global\.\S+", kernel.asm["ptx"])) == {"st.global.v4.b32"}, kernel.name


def decode_step(num_rows: int, longest: int) -> None:
    attend([(1, longest)] + [(1, 3)] * (num_rows - 1), heads=(8, 2), block_size=16)


def mixed_step(num_rows: int, longest: int) -> None:
    attend([(longest // 2, longest)] + [(1, longest)] * num_rows, heads=(8, 2), block_size=16)


@pytest.mark.parametrize(
    ("step", "first", "later"),
    [
        (decode_step, [(2, 17), (3, 5000)], [(1, 1), (1, 16), (16, 256), (5, 4096), (64, 700), (1, 4100), (32, 3)]),
        pytest.param(
            mixed_step,
            [(2, 17), (2, 5000)],
            [(1, 16), (16, 256), (5, 4096), (15, 700), (16, 33)],
            marks=pytest.mark.long,
        ),
        (pointwise_step, [(7,)], [(1,), (16,), (33,), (160,)]),
        pytest.param(coded_step, [(7,), (70,)], [(1,), (16,), (33,), (160,)], marks=pytest.mark.long),
    ],
)
def test_steps_of_other_sizes_compile_nothing_new(
    compiled: set[Any], step: Callable[..., None], first: list[tuple[int, ...]], later: list[tuple[int, ...]]
) -> None:
    for sizes in first:
        step(*sizes)
    known = set(compiled)
    for sizes in later:
        step(*sizes)
        assert compiled == known, f"a step of {sizes} compiled again"
