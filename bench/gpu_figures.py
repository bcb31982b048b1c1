"""Speed of the Triton kernels, each compared with a ceiling that the same run measured. Times are by the device's
events, with cold caches, the median of many runs."""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.attention_problems import Heads, make_problem
from bench.gpu_checks import make_weights
from quire_kernels import cuda
from quire_kernels.cuda import coded
from quire_kernels.cuda.attention import (
    DecodeTiling,
    PrefillTiling,
    decode_attention,
    decode_tiling,
    prefill_attention,
    prefill_tiling,
)
from quire_kernels.cuda.tiles import PagedBatch
from quire_kernels.packed_weight import Quantization
from quire_kernels.reference import ScoreRule

DTYPE = torch.bfloat16
HEADS = Heads(query=32, kv=8, size=128)
RULE = ScoreRule(HEADS.size**-0.5)
GIGA = 1e9
# More bytes than the L2 of any GPU: written before each run, so that the run's inputs come from memory.
_FLUSH_BYTES = 256 << 20
# Repeated writes take a millisecond, longer than Python takes to queue an operation, so the GPU never waits for it.
_FLUSHES = 16
# Maximum time of one figure.
_BUDGET_S = 0.5


@dataclass(frozen=True, slots=True)
class Figure:
    """`rate` and `ceiling` in GB/s or TFLOP/s; `target` is the required share of the ceiling, if there is one."""

    name: str
    unit: str
    rate: float
    ceiling: float
    microseconds: float
    target: float | None = None

    @property
    def share(self) -> float:
        return self.rate / self.ceiling

    def __str__(self) -> str:
        rates = f"{self.rate:8.1f} of {self.ceiling:7.1f} {self.unit}: {self.share:.0%}"
        wanted = "" if self.target is None else f", wanted {self.target:.0%}"
        return f"{self.name:<62} {self.microseconds:9.1f} us {rates}{wanted}"


def kernel_groups(memory: float) -> Iterator[tuple[str, Iterator[Figure]]]:
    """Groups of figures by name, each measured when it is iterated over; a device copy reaches `memory` GB/s."""
    yield "decode", _decodes(memory)
    yield "prefill", _prefills()
    yield "copy_blocks", _copies(memory)
    yield "swap_blocks", _swaps()
    yield "pointwise", _pointwise(memory)
    yield "coded weights", _coded(memory)


def tiling_groups(memory: float) -> Iterator[tuple[str, Iterator[Figure]]]:
    """Same as `kernel_groups`, for attention kernels with other tilings."""
    yield "tilings of decode", _decode_tilings(memory)
    yield "tilings of prefill", _prefill_tilings()


def device_copy_rate() -> float:
    """GB/s read plus written by a plain copy of 2 GiB."""
    source = torch.randint(0, 100, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / _seconds(target.copy_, source) / GIGA


def _decodes(memory: float) -> Iterator[Figure]:
    batches = [(batch, length, False) for batch in (32, 64, 128) for length in (1024, 4096, 8192)]
    for batch, length, mixed in [*batches, (1, 8192, False), (8, 8192, False), (64, 8192, True)]:
        lengths = torch.randint(128, length + 1, (batch,)).tolist() if mixed else [length] * batch
        problem = make_problem([(1, each) for each in lengths], HEADS, DTYPE, "cuda")
        time = _graph_seconds(cuda.paged_attention, *problem.tensors, scores=RULE, **problem.limits)
        name = f"decode, batch {batch}, context {'128 to ' if mixed else ''}{length}"
        yield bandwidth(name, problem.context_bytes, time, memory, 0.85 if batch >= 32 and not mixed else None)


def _decode_tilings(memory: float) -> Iterator[Figure]:
    """Other tilings of the kernel, for problems that compare them with the chosen one."""
    problem = make_problem([(1, 4096)] * 64, HEADS, DTYPE, "cuda")
    chosen = decode_tiling(HEADS.size, DTYPE)
    others = (
        *(replace(chosen, tile=tile, num_stages=stages) for tile in (32, 64, 128) for stages in (3, 5)),
        *(replace(chosen, programs_per_sm=count) for count in (2, 3, 4, 5)),
        replace(chosen, num_warps=8),
        replace(chosen, longest_split=8192),
        replace(chosen, longest_split=1024),
    )
    # Each tiling once, whichever is chosen.
    for tiling in dict.fromkeys((chosen, *others)):
        output = torch.empty_like(problem.query)
        batch = PagedBatch(*problem.tensors)
        time = _graph_seconds(decode_attention, output, batch, RULE, max_seq_len=4096, tiling=tiling)
        yield bandwidth(f"  {_changes(tiling, chosen)}", problem.context_bytes, time, memory)


def _prefills() -> Iterator[Figure]:
    for batch, length in ((1, 2048), (4, 2048), (1, 8192), (8, 512)):
        problem = make_problem([(length, length)] * batch, HEADS, DTYPE, "cuda")
        tera = _tera_operations(batch, length)
        ceiling = tera / _graph_seconds(_dense(batch, length))
        time = _graph_seconds(cuda.paged_attention, *problem.tensors, scores=RULE, **problem.limits)
        yield Figure(f"prefill, {batch} of {length} (ceiling: SDPA)", "TFLOP/s", tera / time, ceiling, time * 1e6)


def _prefill_tilings() -> Iterator[Figure]:
    """Other tilings of the kernel, for problems that compare them with the chosen one."""
    problem = make_problem([(8192, 8192)], HEADS, DTYPE, "cuda")
    tera, chosen = _tera_operations(1, 8192), prefill_tiling(HEADS.size, DTYPE)
    ceiling = tera / _graph_seconds(_dense(1, 8192))
    others = (
        PrefillTiling(128, 64, 8, 3),
        PrefillTiling(128, 128, 8, 3),
        PrefillTiling(128, 32, 8, 5),
        PrefillTiling(64, 64, 4, 3),
        PrefillTiling(64, 64, 4, 5),
        PrefillTiling(64, 128, 4, 3),
    )
    for tiling in dict.fromkeys((chosen, *others)):
        output, batch = torch.empty_like(problem.query), PagedBatch(*problem.tensors)
        time = _graph_seconds(prefill_attention, output, batch, RULE, tiling=tiling)
        yield Figure(f"  {_changes(tiling, chosen)}", "TFLOP/s", tera / time, ceiling, time * 1e6)


def _changes(tiling: DecodeTiling | PrefillTiling, chosen: DecodeTiling | PrefillTiling) -> str:
    """The fields that differ from the chosen tiling."""
    differing = [each.name for each in fields(tiling) if getattr(tiling, each.name) != getattr(chosen, each.name)]
    return ", ".join(f"{name} {getattr(tiling, name)}" for name in differing) or "as chosen"


def _tera_operations(batch: int, length: int) -> float:
    """Two products, each with two operations an element; only the causal half of them is requested."""
    return 2 * batch * length**2 * HEADS.query * HEADS.size / 1e12


def _dense(batch: int, length: int) -> Callable[[], torch.Tensor]:
    """torch's own attention over contiguous keys and values."""
    query = torch.randn(batch, HEADS.query, length, HEADS.size, dtype=DTYPE, device="cuda")
    key, value = torch.randn(2, batch, HEADS.kv, length, HEADS.size, dtype=DTYPE, device="cuda")
    return lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _copies(memory: float) -> Iterator[Figure]:
    pools = [torch.randn(2, 2048, HEADS.kv, 16, HEADS.size, dtype=DTYPE, device="cuda") for _ in range(32)]
    for count in (16, 256):
        pairs = torch.randperm(2048)[: 2 * count].view(2, -1).T.contiguous()
        moved = 2 * _bytes_of_blocks(pools, count)
        time = _seconds(cuda.copy_blocks, pools, pairs)
        yield bandwidth(f"copy_blocks, {count} blocks of 32 layers", moved, time, memory)


def _swaps() -> Iterator[Figure]:
    count = 512
    gpu = [torch.randn(2, 1024, HEADS.kv, 16, HEADS.size, dtype=DTYPE, device="cuda") for _ in range(32)]
    host = [torch.zeros(2, count, HEADS.kv, 16, HEADS.size, dtype=DTYPE, pin_memory=True) for _ in range(32)]
    pairs = torch.stack((torch.randperm(1024)[:count], torch.randperm(count)), dim=1)
    moved, name = _bytes_of_blocks(gpu, count), f"{count} blocks of 32 layers (ceiling: pinned copy)"
    # The same number of contiguous bytes.
    flat_gpu = torch.zeros(1 << 29, dtype=torch.uint8, device="cuda")
    flat_host = torch.zeros(1 << 29, dtype=torch.uint8, pin_memory=True)
    ceiling = flat_gpu.numel() / _seconds(flat_host.copy_, flat_gpu, non_blocking=True) / GIGA
    yield bandwidth(f"swap out, {name}", moved, _seconds(cuda.swap_blocks, gpu, host, pairs), ceiling)
    ceiling = flat_gpu.numel() / _seconds(flat_gpu.copy_, flat_host, non_blocking=True) / GIGA
    yield bandwidth(f"swap in, {name}", moved, _seconds(cuda.swap_blocks, host, gpu, pairs.flip(1)), ceiling)


def _pointwise(memory: float) -> Iterator[Figure]:
    x, residual = torch.randn(2, 16384, 4096, dtype=DTYPE, device="cuda")
    weight, size = torch.ones(4096, dtype=DTYPE, device="cuda"), x.numel() * x.itemsize
    yield bandwidth("rms_norm", 2 * size, _graph_seconds(cuda.rms_norm, x, weight, 1e-5), memory)
    time = _graph_seconds(cuda.rms_norm, x, weight, 1e-5, 0.0, residual)
    yield bandwidth("add_rms_norm", 4 * size, time, memory)
    yield bandwidth("silu_and_mul", size * 3 // 2, _graph_seconds(cuda.silu_and_mul, x), memory)
    qkv = torch.randn(16384, HEADS.query + 2 * HEADS.kv, HEADS.size, dtype=DTYPE, device="cuda")
    query, key, value = qkv.split((HEADS.query, HEADS.kv, HEADS.kv), dim=1)
    table, positions = torch.rand(4096, HEADS.size, device="cuda"), torch.randint(0, 4096, (16384,), device="cuda")
    pool = torch.zeros(2, 2048, HEADS.kv, 16, HEADS.size, dtype=DTYPE, device="cuda")
    slots, moved = torch.randperm(2048 * 16, device="cuda")[:16384], 2 * qkv.numel() * qkv.itemsize
    time = _graph_seconds(cuda.rotary_and_cache, query, key, value, positions, table, pool, slots)
    yield bandwidth("rotary_and_cache", moved, time, memory)


def _coded(memory: float) -> Iterator[Figure]:
    """Compares with the same product in bfloat16 for many tokens, and with the time to read its bytes for few."""
    out_features, in_features = 14336, 4096
    plain = torch.randn(out_features, in_features, dtype=DTYPE, device="cuda")
    for name, weight in [("bfloat16", None), *make_weights(out_features, in_features, "cuda")]:
        packed = None if weight is None else coded.pack_coded(weight, False, Quantization.NONE)
        for num_tokens in (1, 16, 64, 2048):
            x = torch.randn(num_tokens, in_features, dtype=DTYPE, device="cuda")
            dense = _graph_seconds(functional.linear, x, plain)
            time = dense if packed is None else _graph_seconds(coded.product, x, packed, None, "identity", DTYPE)
            title = f"product, {name}, {num_tokens} tokens"
            if num_tokens > 64:
                tera = 2 * num_tokens * plain.numel() / 1e12
                yield Figure(f"{title} (ceiling: bfloat16)", "TFLOP/s", tera / time, tera / dense, time * 1e6)
            else:
                yield bandwidth(title, plain.nbytes if weight is None else weight.rows.nbytes, time, memory)


def bandwidth(name: str, num_bytes: int, time: float, ceiling: float, target: float | None = None) -> Figure:
    return Figure(name, "GB/s", num_bytes / time / GIGA, ceiling, time * 1e6, target)


def _bytes_of_blocks(pools: list[torch.Tensor], count: int) -> int:
    return sum(pool[:, 0].numel() * pool.itemsize for pool in pools) * count


def _graph_seconds(function: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """The median time of one call as a replay of a CUDA graph, as in decode steps."""
    work = partial(function, *arguments, **options)
    _warm_up(work)
    recorded = torch.cuda.CUDAGraph()
    # If a recording fails, `torch.cuda.graph` leaves its own stream the current one.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(recorded):
        work()
    return _median(recorded.replay)


def _seconds(function: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """The median time of one plain call, for copies from the host, which no graph can hold."""
    work = partial(function, *arguments, **options)
    _warm_up(work)
    return _median(work)


def _warm_up(work: Callable[[], object]) -> None:
    for _ in range(3):
        work()
    torch.cuda.synchronize()


def _median(run: Callable[[], object]) -> float:
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    fastest = min(_timed(run, flush, 3))
    return statistics.median(_timed(run, flush, max(5, min(50, int(_BUDGET_S / (fastest + 1e-3))))))


def _timed(run: Callable[[], object], flush: torch.Tensor, repeats: int) -> list[float]:
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        for _ in range(_FLUSHES):
            flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairs]
