"""Norms, the gated activation, and rotary position embedding.

A program takes a line in a norm, a tile of a line in the activation, and the heads of a token in a rotation.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from quire_kernels.cuda.launch import ceil_div, launch, padded, warps_for, with_contiguous_heads

# Columns of a line that a program of the activation takes.
TILE = 1024
# Elements of a line for each warp of a norm.
ELEMENTS_PER_WARP = 512


@triton.jit
def _rms_norm_kernel(
    output, x, residual, weight, eps, x_stride, offset, residual_stride, HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr
):
    """If `residual` is not None, the sum is written to it and normalized."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HIDDEN_PAD)
    mask = columns < HIDDEN
    values = tl.load(x + line * x_stride + columns, mask=mask, other=0.0)
    if residual is not None:
        stream = residual + line * residual_stride + columns
        # Rounded before the norm, so that it is the norm of the stored sum.
        values = (values.to(tl.float32) + tl.load(stream, mask=mask, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(stream, values, mask=mask)
    values = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(output + line * HIDDEN + columns, (values * factor * weights).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_kernel(output, x, weight, bias, eps, x_stride, HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HIDDEN_PAD)
    mask = columns < HIDDEN
    values = tl.load(x + line * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values, 0) / HIDDEN, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / HIDDEN + eps)
    if weight is not None:
        normed *= tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        normed += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + line * HIDDEN + columns, normed.to(output.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`quire_kernels.ops.rms_norm`, or `add_rms_norm` in one launch; `residual` has contiguous lines."""
    lines = None if residual is None else _as_lines(residual)
    stride = 0 if lines is None else lines.stride(0)
    return _norm(_rms_norm_kernel, x, lines, weight.contiguous(), eps, offset, stride)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quire_kernels.ops.layer_norm`, or `add_layer_norm`, whose sum is a launch of its own."""
    x = x if residual is None else residual.add_(x)
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    return _norm(_layer_norm_kernel, x, weight, bias, eps)


def _norm(
    kernel: Any, x: torch.Tensor, first: torch.Tensor | None, second: torch.Tensor | None, eps: float, *rest: float
) -> torch.Tensor:
    """Launches a norm kernel, whose `first` and `second` follow the lines of x."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        lines, hidden = _as_lines(x), x.shape[-1]
        sizes = {"HIDDEN": hidden, "HIDDEN_PAD": padded(hidden), "num_warps": _num_warps(hidden)}
        launch(kernel, (lines.shape[0],), output, lines, first, second, eps, lines.stride(0), *rest, **sizes)
    return output


def _as_lines(x: torch.Tensor) -> torch.Tensor:
    """x [..., hidden] as [lines, hidden] with contiguous lines; a view where that can be."""
    lines = x.reshape(-1, x.shape[-1])
    return lines if lines.stride(1) == 1 else lines.contiguous()


def _num_warps(hidden: int) -> int:
    return min(16, max(1, padded(hidden) // ELEMENTS_PER_WARP))


@triton.jit
def _silu_and_mul_kernel(output, x, x_stride, WIDTH: tl.constexpr, TILE: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = columns < WIDTH
    gate = tl.load(x + line * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + line * x_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * up
    tl.store(output + line * WIDTH + columns, product.to(output.dtype.element_ty), mask=mask)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1] // 2
    output = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if not output.numel():
        return output
    lines = _as_lines(x)
    grid = (lines.shape[0], ceil_div(width, TILE))
    launch(_silu_and_mul_kernel, grid, output, lines, lines.stride(0), WIDTH=width, TILE=TILE)
    return output


@triton.jit
def load_rotated(x, heads, dims, mask, cos_sin, HEAD_DIM: tl.constexpr):
    """Both halves of the rotated `heads` of one token, each [H, D / 2] float32; `x` points at the token's heads."""
    cos = tl.load(cos_sin + dims, mask=dims < HEAD_DIM // 2, other=0.0)[None, :]
    sin = tl.load(cos_sin + HEAD_DIM // 2 + dims, mask=dims < HEAD_DIM // 2, other=0.0)[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize_on_alignment=("positions",))
def _rotary_kernel(
    output,
    x,
    positions,
    cos_sin_cache,
    x_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    cos_sin = cos_sin_cache + tl.load(positions + token) * HEAD_DIM
    first, second = load_rotated(  # pyrefly: ignore
        x + token * x_stride, heads, dims, mask, cos_sin, HEAD_DIM
    )
    target = output + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, first.to(output.dtype.element_ty), mask=mask)
    tl.store(target + HEAD_DIM // 2, second.to(output.dtype.element_ty), mask=mask)


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return rotated(query, positions, cos_sin_cache), rotated(key, positions, cos_sin_cache)


def rotated(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """x [T, H, D]; returns a new, contiguous tensor."""
    num_tokens, num_heads, head_dim = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return output
    x = with_contiguous_heads(x)
    launch(
        _rotary_kernel,
        (num_tokens,),
        output,
        x,
        positions.contiguous(),
        cos_sin_cache.contiguous(),
        x.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PAD=padded(num_heads),
        HALF_PAD=padded(head_dim // 2),
        num_warps=warps_for(padded(num_heads) * padded(head_dim // 2), x.dtype),
    )
    return output
