"""Calls the CPU library's operations on states."""

import torch

from quire_kernels.cpu.library import (
    DTYPES,
    ConvArgs,
    GatedNormArgs,
    GatesArgs,
    Operation,
    Operations,
    RecurrenceArgs,
    ScanArgs,
)
from quire_kernels.cpu.library import StatePages as PagesArgs
from quire_kernels.cpu.packing import Empty, address, contiguous, dense
from quire_kernels.states import StatePages, StateUnits


class StateKernels:
    """The operations on states, a part of `CpuKernels`. Tensors may be views whose last dimension is contiguous."""

    _library: Operations
    _empty: Empty

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
    ) -> torch.Tensor:
        x, bias = dense(x), contiguous(bias)
        before, after = _dense(before), _dense(after)
        output, pages = self._empty(x.shape, x.dtype), _with_lines(pages)
        arguments = ConvArgs(
            output=output.data_ptr(),
            x=x.data_ptr(),
            weight=weight.data_ptr(),
            bias=address(bias),
            before=address(before),
            after=address(after),
            pages=_pages_args(pages, units),
            dtype=DTYPES[x.dtype],
            weight_dtype=DTYPES[weight.dtype],
            num_tokens=x.shape[0],
            channels=weight.shape[0],
            taps=weight.shape[1],
            x_stride=x.stride(0),
            before_stride=0 if before is None else before.stride(0),
            after_stride=0 if after is None else after.stride(0),
            weight_channel_stride=weight.stride(0),
            weight_tap_stride=weight.stride(1),
            is_silu=activation == "silu",
        )
        self._library.call(Operation.CAUSAL_CONV, arguments)
        return output

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
    ) -> torch.Tensor:
        query, key, value = dense(query), dense(key), dense(value)
        decay, beta, skip = dense(decay), _dense(beta), contiguous(skip)
        output, pages = self._empty(value.shape, value.dtype), _with_lines(pages)
        arguments = RecurrenceArgs(
            output=output.data_ptr(),
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            decay=decay.data_ptr(),
            beta=address(beta),
            skip=address(skip),
            pages=_pages_args(pages, units),
            dtype=DTYPES[value.dtype],
            num_tokens=value.shape[0],
            num_key_heads=key.shape[1],
            num_heads=value.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            query_token_stride=query.stride(0),
            query_head_stride=query.stride(1),
            key_token_stride=key.stride(0),
            key_head_stride=key.stride(1),
            value_token_stride=value.stride(0),
            value_head_stride=value.stride(1),
            decay_token_stride=decay.stride(0),
            decay_head_stride=decay.stride(1),
            beta_token_stride=0 if beta is None else beta.stride(0),
            is_per_channel=decay.dim() == 3,
            is_delta=delta,
            is_unit_norm=unit_norm,
            scale=scale,
        )
        self._library.call(Operation.LINEAR_RECURRENCE, arguments)
        return output

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
    ) -> torch.Tensor:
        x, dt, b, c = dense(x), dense(dt), dense(b), dense(c)
        a, skip = a.contiguous(), contiguous(skip)
        output, pages = self._empty(x.shape, x.dtype), _with_lines(pages)
        arguments = ScanArgs(
            output=output.data_ptr(),
            x=x.data_ptr(),
            dt=dt.data_ptr(),
            a=a.data_ptr(),
            b=b.data_ptr(),
            c=c.data_ptr(),
            skip=address(skip),
            pages=_pages_args(pages, units),
            dtype=DTYPES[x.dtype],
            num_tokens=x.shape[0],
            channels=a.shape[0],
            num_states=a.shape[1],
            x_stride=x.stride(0),
            dt_stride=dt.stride(0),
            b_stride=b.stride(0),
            c_stride=c.stride(0),
        )
        self._library.call(Operation.SELECTIVE_SCAN, arguments)
        return output

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, num_heads = a.shape[:2]
        decay, beta = self._empty(a.shape, torch.float32), self._empty((num_tokens, num_heads), torch.float32)
        a, b = a if a.dim() == 2 else a.flatten(1), _dense(b)
        a, a_log, dt_bias = dense(a), a_log.contiguous(), dt_bias.contiguous()
        arguments = GatesArgs(
            decay=decay.data_ptr(),
            beta=beta.data_ptr(),
            a=a.data_ptr(),
            b=address(b),
            a_log=a_log.data_ptr(),
            dt_bias=dt_bias.data_ptr(),
            dtype=DTYPES[a.dtype],
            num_tokens=num_tokens,
            num_heads=num_heads,
            head_channels=a.shape[1] // num_heads,
            a_stride=a.stride(0),
            b_stride=0 if b is None else b.stride(0),
            dt_min=dt_min,
            dt_max=dt_max,
            beta_scale=beta_scale,
        )
        self._library.call(Operation.GATES, arguments)
        return decay, beta

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
    ) -> torch.Tensor:
        x, gate, weight = dense(x), dense(gate), contiguous(weight)
        output = self._empty(x.shape, x.dtype)
        arguments = GatedNormArgs(
            output=output.data_ptr(),
            x=x.data_ptr(),
            gate=gate.data_ptr(),
            weight=address(weight),
            dtype=DTYPES[x.dtype],
            weight_dtype=DTYPES[x.dtype if weight is None else weight.dtype],
            num_tokens=x.shape[0],
            hidden=x.shape[1],
            group_size=group_size,
            weight_size=group_size if weight is None else weight.shape[0],
            x_stride=x.stride(0),
            gate_stride=gate.stride(0),
            is_norm_first=norm_first,
            is_sigmoid=activation == "sigmoid",
            eps=eps,
        )
        self._library.call(Operation.GATED_NORM, arguments)
        return output


def _dense(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else dense(x)


def _with_lines(pages: StatePages) -> StatePages:
    """The same with index tensors of contiguous lines."""
    return StatePages(
        pages.pages,
        dense(pages.tables),
        pages.query_start_loc.contiguous(),
        pages.seq_lens.contiguous(),
        pages.checkpoints.contiguous(),
        dense(pages.checkpoint_tables),
        contiguous(pages.num_kept),
    )


def _pages_args(pages: StatePages, units: StateUnits) -> PagesArgs:
    return PagesArgs(
        pages=pages.pages.data_ptr(),
        tables=pages.tables.data_ptr(),
        query_start_loc=pages.query_start_loc.data_ptr(),
        seq_lens=pages.seq_lens.data_ptr(),
        checkpoints=pages.checkpoints.data_ptr(),
        checkpoint_tables=pages.checkpoint_tables.data_ptr(),
        num_kept=address(pages.num_kept),
        num_rows=pages.seq_lens.shape[0],
        num_blocks=pages.pages.shape[0],
        block_stride=pages.pages.stride(0),
        table_stride=pages.tables.stride(0),
        table_width=pages.tables.shape[1],
        checkpoint_stride=pages.checkpoint_tables.stride(0),
        num_checkpoints=pages.checkpoint_tables.shape[0],
        unit_bytes=units.unit_bytes,
        units_per_block=pages.pages.shape[1] // units.unit_bytes,
        first_unit=units.first,
    )
