"""RMS norm, alone and with the sum into the residual stream, and layer norm. A program takes one line."""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch, padded

# Elements of a line for each warp of its program.
ELEMENTS_PER_WARP = 512


@triton.jit
def _rms_norm_kernel(
    output, x, residual, weight, eps, x_stride, residual_stride, HIDDEN: tl.constexpr, HIDDEN_PAD: tl.constexpr
):
    """Where `residual` is not None, it takes the sum of both, and the sum is what is normed."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, HIDDEN_PAD)
    mask = columns < HIDDEN
    values = tl.load(x + line * x_stride + columns, mask=mask, other=0.0)
    if residual is not None:
        stream = residual + line * residual_stride + columns
        # Rounded as it is stored, so that the norm is that of the stream which others see.
        values = (values.to(tl.float32) + tl.load(stream, mask=mask, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(stream, values, mask=mask)
    values = values.to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / HIDDEN + eps)
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`kernels.ops.rms_norm`."""
    return _rms_norm(x, None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.ops.add_rms_norm`; the sum is written into `residual` where its lines allow that."""
    residual = _as_lines(residual).view(residual.shape)
    return _rms_norm(x, _as_lines(residual), weight, eps), residual


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.ops.add_layer_norm`; the sum is a launch of its own."""
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`kernels.ops.layer_norm`."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return output
    lines, hidden = _as_lines(x), x.shape[-1]
    launch(
        _layer_norm_kernel,
        (lines.shape[0],),
        output,
        lines,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        eps,
        lines.stride(0),
        HIDDEN=hidden,
        HIDDEN_PAD=padded(hidden),
        num_warps=_num_warps(hidden),
    )
    return output


def _rms_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return output
    lines, hidden = _as_lines(x), x.shape[-1]
    launch(
        _rms_norm_kernel,
        (lines.shape[0],),
        output,
        lines,
        residual,
        weight.contiguous(),
        eps,
        lines.stride(0),
        0 if residual is None else residual.stride(0),
        HIDDEN=hidden,
        HIDDEN_PAD=padded(hidden),
        num_warps=_num_warps(hidden),
    )
    return output


def _as_lines(x: torch.Tensor) -> torch.Tensor:
    """x [..., hidden] as [lines, hidden] with contiguous lines; a view where that can be."""
    lines = x.reshape(-1, x.shape[-1])
    return lines if lines.stride(1) == 1 else lines.contiguous()


def _num_warps(hidden: int) -> int:
    return min(16, max(1, padded(hidden) // ELEMENTS_PER_WARP))
