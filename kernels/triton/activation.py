"""Gated activations."""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import ceil_div, launch

TILE = 1024


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
    """`kernels.ops.silu_and_mul`."""
    width = x.shape[-1] // 2
    output = torch.empty((*x.shape[:-1], width), dtype=x.dtype, device=x.device)
    if not output.numel():
        return output
    lines = x.reshape(-1, x.shape[-1])
    if lines.stride(1) != 1:
        lines = lines.contiguous()
    grid = (lines.shape[0], ceil_div(width, TILE))
    launch(_silu_and_mul_kernel, grid, output, lines, lines.stride(0), WIDTH=width, TILE=TILE)
    return output
