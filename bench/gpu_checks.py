"""Compares every Triton kernel with the same computation in float64, on new random inputs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.attention_problems import Heads, expected_attention, make_problem
from quire_kernels import cuda, reference
from quire_kernels.cuda import coded, fp8
from quire_kernels.packed_weight import CodedWeight, Coding, GroupScales, Quantization
from quire_kernels.reference import ScoreRule

# Relative errors (of a token's norm) up to these are rounding.
LIMITS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
MIXED = ((1, 1), (3, 3), (1, 17), (40, 71), (1, 300))
LARGE = ((1, 5000), (512, 2048), (1, 1), (1, 1333), (77, 77), (1, 4096), (2, 900))


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    dtype: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        # Not `not >`: NaN never passes.
        return self.error <= self.limit

    def __str__(self) -> str:
        verdict = "ok" if self.passed else "WRONG"
        return f"{self.name:<28} {self.dtype:<9} error {self.error:9.2e} of {self.limit:.1e}  {verdict}"


def check_groups(device: str, dtypes: tuple[torch.dtype, ...]) -> Iterator[tuple[str, Iterator[Check]]]:
    """Groups of checks by name; a group runs when it is iterated over."""
    for dtype in dtypes:
        yield f"attention, {dtype}", _attention_checks(device, dtype)
        yield f"pointwise, {dtype}", _pointwise_checks(device, dtype)
        yield f"rotary, {dtype}", _rotary_checks(device, dtype)
        yield f"cache, {dtype}", _cache_checks(device, dtype)
        if dtype != torch.float32:
            yield f"coded weights, {dtype}", _coded_checks(device, dtype)


def _attention_checks(device: str, dtype: torch.dtype) -> Iterator[Check]:
    slopes = torch.rand(8, device=device)
    rules = {
        "": ScoreRule(0.1),
        ", window": ScoreRule(0.1, sliding_window=50),
        ", cap": ScoreRule(0.1, soft_cap=5.0),
        ", alibi": ScoreRule(0.1, alibi_slopes=slopes),
        ", sinks": ScoreRule(0.1, sinks=4 * slopes),
        ", sinks and window": ScoreRule(0.1, sliding_window=50, sinks=4 * slopes),
    }
    for label, rule in rules.items():
        yield _attention_check(f"attention{label}", MIXED, Heads(8, 2, 80), 16, rule, dtype, device)
    sizes = ((64, 32), (96, 16), (112, 5), (128, 64), (256, 16)) if device == "cuda" else ((32, 5), (256, 16))
    for head_dim, block_size in sizes:
        rows = LARGE if device == "cuda" else MIXED
        name = f"attention, D {head_dim}, B {block_size}"
        yield _attention_check(name, rows, Heads(8, 2, head_dim), block_size, ScoreRule(0.1), dtype, device)


def _attention_check(
    name: str,
    rows: tuple[tuple[int, int], ...],
    heads: Heads,
    block_size: int,
    rule: ScoreRule,
    dtype: torch.dtype,
    device: str,
) -> Check:
    problem = make_problem(rows, heads, dtype, device, block_size=block_size, poisoned=True)
    expected = expected_attention(problem, rule)
    _leave_nan_in_free_memory(problem.query)
    return compare(name, cuda.paged_attention(*problem.tensors, scores=rule, **problem.limits), expected)


def _pointwise_checks(device: str, dtype: torch.dtype) -> Iterator[Check]:
    x, residual = torch.randn(2, 37, 4100, device=device).to(dtype)
    weight, bias = torch.rand(2, 4100, device=device).to(dtype)
    wide_x, wide_weight, wide_bias = x.double(), weight.double(), bias.double()
    yield compare("rms_norm", cuda.rms_norm(x, weight, 1e-5), reference.rms_norm(wide_x, wide_weight, 1e-5))
    yield compare(
        "layer_norm",
        cuda.layer_norm(x, weight, bias, 1e-5),
        reference.layer_norm(wide_x, wide_weight, wide_bias, 1e-5),
    )
    # The norm is taken of the sum as it is stored, and may be written over the residual.
    stored, total = (x + residual).double(), wide_x + residual.double()
    stream = residual.clone()
    normed = cuda.rms_norm(x, weight, 1e-5, residual=stream)
    yield compare("add_rms_norm", normed, reference.rms_norm(stored, wide_weight, 1e-5))
    yield compare("add_rms_norm, residual", stream, total)
    stream = residual.clone()
    normed = cuda.layer_norm(x, weight, bias, 1e-5, stream)
    yield compare("add_layer_norm", normed, reference.layer_norm(stored, wide_weight, wide_bias, 1e-5))
    yield compare("add_layer_norm, residual", stream, total)
    yield compare("silu_and_mul", cuda.silu_and_mul(x), reference.silu_and_mul(wide_x))


def _rotary_checks(device: str, dtype: torch.dtype) -> Iterator[Check]:
    query, key, value = torch.randn(37, 16, 80, device=device).to(dtype).split((8, 4, 4), dim=1)
    positions, table = torch.randint(0, 500, (37,), device=device), torch.rand(500, 80, device=device)
    wide_query, wide_key = reference.rotary(query.double(), key.double(), positions, table.double())
    turned_query, turned_key = cuda.rotary(query, key, positions, table)
    yield compare("rotary, query", turned_query, wide_query)
    yield compare("rotary, key", turned_key, wide_key)
    pool, slots = torch.randn(2, 6, 4, 16, 80, device=device).to(dtype), torch.randperm(96, device=device)[:37]
    wide_pool = pool.double()
    reference.reshape_and_cache(wide_key, value.double(), wide_pool, slots)
    turned_query = cuda.rotary_and_cache(query, key, value, positions, table, pool, slots)
    yield compare("rotary_and_cache, query", turned_query, wide_query)
    yield compare("rotary_and_cache, pool", _by_slot(pool), _by_slot(wide_pool))


def _cache_checks(device: str, dtype: torch.dtype) -> Iterator[Check]:
    pools = [torch.randn(2, 40, 4, 16, 64, device=device).to(dtype) for _ in range(3)]
    key, value = torch.randn(2, 50, 4, 64, device=device).to(dtype)
    slots = torch.randperm(640, device=device)[:50]
    yield _compare_moves(
        "reshape_and_cache", pools[:1], lambda op, own: op.reshape_and_cache(key, value, own[0], slots)
    )
    chain = torch.tensor([[0, 1], [1, 2], [9, 0]])
    apart = torch.tensor([[0, 31], [1, 32], [1, 33]])
    for name, pairs in (("host pairs", apart), ("chain", chain), ("device pairs", apart.to(device))):
        yield _compare_moves(f"copy_blocks, {name}", pools, lambda op, own, pairs=pairs: op.copy_blocks(own, pairs))
    others = [torch.randn(2, 50, 4, 16, 64, dtype=dtype, pin_memory=device == "cuda") for _ in range(3)]
    yield _compare_moves("swap in", pools, lambda op, own: op.swap_blocks(others, own, apart))
    yield _compare_moves("swap out", others, lambda op, own: op.swap_blocks(pools, own, apart))


def _coded_checks(device: str, dtype: torch.dtype) -> Iterator[Check]:
    """Products with one token and with many, whose inputs are summed by one program or by several."""
    for name, weight in make_weights(200, 1280, device):
        packed = coded.pack_coded(weight, False, Quantization.NONE, dtype)
        codes, _, scale = coded.read(weight)
        numbers = scale.numbers(codes).to(dtype).double()
        for num_tokens in (1, 16, 100):
            x, bias = torch.randn(num_tokens, 1280, device=device).to(dtype), torch.rand(200, device=device).to(dtype)
            if isinstance(packed, fp8.Fp8Weight):
                tokens, scales = fp8.rounded(x)
                wide, expected = tokens.double() * scales, scale.numbers(codes).double()
            else:
                wide, expected = x.double(), numbers
            actual = coded.product(x, packed, bias, "identity", dtype)
            yield compare(f"{name}, {num_tokens} tokens", actual, wide @ expected.t() + bias.double())


def make_weights(out_features: int, in_features: int, device: str) -> Iterator[tuple[str, CodedWeight]]:
    """One weight for each kind of codes and scales, from random bytes; `in_features` is a multiple of 256."""
    for coding in (Coding.Q4_K, Coding.Q5_K, Coding.Q6_K, Coding.Q8_0, Coding.Q4_0, Coding.IQ4_XS):
        per_group, num_bytes = coding.group
        rows = torch.randint(0, 256, (out_features, in_features // per_group, num_bytes), dtype=torch.uint8)
        for at in {Coding.Q4_K: (0, 2), Coding.Q5_K: (0, 2), Coding.Q6_K: (208,)}.get(coding, (0,)):
            # A float16 of about 0.01, of either sign.
            rows[..., at + 1] = rows[..., at + 1] & 0x83 | 0x20
        yield coding.value, CodedWeight(coding, rows.flatten(1)).to(torch.device(device))
    for coding, group in ((Coding.INT4, 128), (Coding.INT8, in_features), (Coding.FP8, 128), (Coding.FP8, in_features)):
        groups, per_byte = in_features // group, coding.group[0]
        rows = torch.randint(0, 120, (out_features, in_features // per_byte), dtype=torch.uint8)
        scales = GroupScales(torch.rand(out_features, groups).mul(0.01).half(), None, group)
        weight = CodedWeight(coding, rows, scales, rounds_inputs=group == in_features)
        yield f"{coding.value}, groups of {group}", weight.to(torch.device(device))


def _compare_moves(name: str, pools: list[torch.Tensor], move: Callable[[Any, list[torch.Tensor]], None]) -> Check:
    """Checks that copies of the pools have the same bits after the kernel and after the reference."""
    own = [_copy(each) for each in pools]
    expected = [_copy(each) for each in pools]
    move(cuda, own)
    move(reference, expected)
    if own[0].is_cuda or torch.cuda.is_available():
        torch.cuda.synchronize()
    different = sum(int((a != b).sum()) for a, b in zip(own, expected, strict=True))
    return Check(name, str(pools[0].dtype).removeprefix("torch."), float(different), 0.0)


def _copy(pool: torch.Tensor) -> torch.Tensor:
    return pool.clone().pin_memory() if pool.is_cpu and torch.cuda.is_available() else pool.clone()


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Check:
    """The largest relative error of a token; [T, ...]. Each error is relative to its own token's norm, since a row of a
    long context is smaller than the others."""
    wrong = torch.linalg.vector_norm((actual.double() - expected).flatten(1), dim=1)
    errors = wrong / torch.linalg.vector_norm(expected.flatten(1), dim=1)
    return Check(name, str(actual.dtype).removeprefix("torch."), errors.max().item(), LIMITS[actual.dtype])


def _by_slot(pool: torch.Tensor) -> torch.Tensor:
    """[2, N, H, B, D] -> [2 N B, H, D]: the keys of each slot, then the values."""
    return pool.transpose(2, 3).flatten(0, 2)


def _leave_nan_in_free_memory(like: torch.Tensor) -> None:
    """Fills the memory of the next output of this size with NaN, so that an element that was not written shows."""
    torch.full_like(like, torch.nan)
