"""Operations on states in plain torch, token by token. `quire_kernels.ops` documents the arguments and checks them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from quire_kernels.states import StatePages, StateShape, StateUnits, read_state, write_state


@dataclass(frozen=True, slots=True)
class _Row:
    """The new tokens of a sequence: one row of the batch, or several that are one sequence."""

    index: int
    first: int
    num_tokens: int
    num_kept: int
    is_new: bool


def _rows(pages: StatePages) -> list[_Row]:
    """
    Raises:
        IndexError: the content of an index tensor is out of range.
    """
    starts, lengths, tables = (x.tolist() for x in (pages.query_start_loc, pages.seq_lens, pages.tables))
    kept = [int(starts[-1])] * len(lengths) if pages.num_kept is None else pages.num_kept.tolist()
    lines = pages.checkpoints.tolist()
    if starts[0] != 0 or starts[-1] != len(lines):
        raise IndexError("query_start_loc and seq_lens contradict each other or the shapes")
    rows: list[_Row] = []
    for row, length in enumerate(lengths):
        tokens = starts[row + 1] - starts[row]
        if not 0 <= tokens <= length or kept[row] < 0:
            raise IndexError("query_start_loc, seq_lens and num_kept contradict each other")
        if tokens == 0:
            continue
        _check_blocks(pages, tables[row])
        if rows and tables[rows[-1].index][0] == tables[row][0]:
            last = rows.pop()
            more = min(kept[row], tokens) if last.num_kept == last.num_tokens else 0
            rows.append(_Row(last.index, last.first, last.num_tokens + tokens, last.num_kept + more, last.is_new))
        else:
            rows.append(_Row(row, starts[row], tokens, min(kept[row], tokens), tokens == length))
    checkpoint_tables = pages.checkpoint_tables.tolist()
    for line in lines:
        if not -1 <= line < len(checkpoint_tables):
            raise IndexError("checkpoints names a line that is not in checkpoint_tables")
        if line >= 0:
            _check_blocks(pages, checkpoint_tables[line])
    return rows


def _check_blocks(pages: StatePages, table: list[int]) -> None:
    if any(not 0 <= block < pages.pages.shape[0] for block in table):
        raise IndexError("tables or checkpoint_tables names a block that is not in pages")


def _run(
    pages: StatePages,
    units: StateUnits,
    shape: StateShape,
    step: Callable[[torch.Tensor, int], torch.Tensor],
) -> None:
    """Calls step(state before, token) for all tokens, which returns the state after the token."""
    checkpoints = pages.checkpoints.tolist()
    for row in _rows(pages):
        table = pages.tables[row.index]
        if row.is_new:
            state = torch.zeros((shape.heads, shape.lines, shape.columns), device=pages.pages.device)
        else:
            state = read_state(pages.pages, table, units, shape)
        for number, token in enumerate(range(row.first, row.first + row.num_tokens), start=1):
            state = step(state, token)
            if number <= row.num_kept and (line := checkpoints[token]) >= 0:
                write_state(pages.pages, pages.checkpoint_tables[line], units, shape, state)
            if number == row.num_kept:
                write_state(pages.pages, table, units, shape, state)


def causal_conv(
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
    output, (channels, taps) = x.new_empty(x.shape), weight.shape
    columns = x.float() if before is None else x.float() * before.float()
    factors = weight.float().t()

    def step(state: torch.Tensor, token: int) -> torch.Tensor:
        window = torch.cat((state[0], columns[token, None]))
        total = (window * factors).sum(0)
        total = total if bias is None else total + bias.float()
        total = functional.silu(total) if activation == "silu" else total
        output[token] = total if after is None else total * after[token].float()
        return window[None, 1:]

    _run(pages, units, StateShape.of_conv(channels, taps), step)
    return output


def linear_recurrence(
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
    num_heads, value_dim = value.shape[1:]
    queries, keys = (_unit(x) if unit_norm else x.float() for x in (query, key))
    queries = queries * scale
    queries, keys = (x.repeat_interleave(num_heads // key.shape[1], dim=1) for x in (queries, keys))
    values, output = value.float(), value.new_empty(value.shape)
    decays = decay if decay.dim() == 3 else decay[..., None]

    def step(state: torch.Tensor, token: int) -> torch.Tensor:
        state = state * decays[token, ..., None]
        u = values[token] - torch.einsum("hkv,hk->hv", state, keys[token]) if delta else values[token]
        u = u if beta is None else u * beta[token, :, None]
        state = state + keys[token, :, :, None] * u[:, None]
        found = torch.einsum("hkv,hk->hv", state, queries[token])
        output[token] = found if skip is None else found + skip[:, None] * values[token]
        return state

    _run(pages, units, StateShape.of_recurrence(num_heads, key.shape[2], value_dim), step)
    return output


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def selective_scan(
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
    output, factors = x.new_empty(x.shape), a.t()

    def step(state: torch.Tensor, token: int) -> torch.Tensor:
        added = dt[token] * x[token].float()
        state = torch.exp(dt[token] * factors) * state + added * b[token, :, None].float()
        found = (state[0] * c[token, :, None].float()).sum(0)
        output[token] = found if skip is None else found + skip * x[token].float()
        return state

    _run(pages, units, StateShape.of_scan(*a.shape), step)
    return output


def gates(
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    dt_min: float,
    dt_max: float,
    beta_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    step = functional.softplus(a.float() + dt_bias).clamp(dt_min, dt_max)
    rates = torch.exp(a_log)
    decay = torch.exp(-(rates if a.dim() == 2 else rates[:, None]) * step)
    return decay, step if b is None else torch.sigmoid(b.float()) * beta_scale


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int,
    *,
    norm_first: bool,
    activation: str,
) -> torch.Tensor:
    gates = torch.sigmoid(gate.float()) if activation == "sigmoid" else functional.silu(gate.float())
    if weight is None:
        return (x.float() * gates).to(x.dtype)
    numbers = x.float() if norm_first else x.float() * gates
    groups = numbers.unflatten(-1, (-1, group_size))
    normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    normed = (normed.unflatten(-2, (-1, weight.numel() // group_size)).flatten(-2) * weight.float()).flatten(-2)
    return (normed * gates if norm_first else normed).to(x.dtype)
