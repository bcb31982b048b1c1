"""Operations on states with their formulas in float64, and memory in which sequences have states."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits, read_state

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """An operation with a state.

    Attributes:
        call: the operation, of tensors with a line for each token, and constants.
        exact: one sequence by the formula: outputs, and the state after each token, in float64.
        make: random tensors, by the number of tokens.
    """

    name: str
    shape: StateShape
    make: Callable[[int], dict[str, torch.Tensor]]
    call: Callable[[Tensors, StatePages, StateUnits], torch.Tensor]
    exact: Callable[[Tensors], tuple[torch.Tensor, torch.Tensor]]

    def __str__(self) -> str:
        return self.name


def conv_case(channels: int, taps: int, dtype: torch.dtype, *, gated: bool, weight_dtype: torch.dtype) -> Case:
    """The convolution of LFM2 if gated, else that of the other families."""
    weight = (torch.randn(channels, taps) / taps).to(weight_dtype)
    bias = None if gated else torch.randn(channels).to(weight_dtype)
    names = ("before", "after") if gated else ()

    def make(count: int) -> dict[str, torch.Tensor]:
        lines = torch.randn(count, channels * 3).to(dtype)
        return {name: lines[:, i * channels : (i + 1) * channels] for i, name in enumerate(("x", *names))}

    def call(tokens: Tensors, pages: StatePages, units: StateUnits) -> torch.Tensor:
        gates = {name: tokens[name] for name in names}
        return ops.causal_conv(tokens["x"], weight, bias, pages, units, activation=None if gated else "silu", **gates)

    def exact(tokens: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        x = tokens["x"].double() * (tokens["before"].double() if gated else 1.0)
        padded = functional.pad(x, (0, 0, taps - 1, 0))
        windows = padded.unfold(0, taps, 1)
        total = (windows * weight.double()).sum(-1) + (0.0 if bias is None else bias.double())
        output = total * tokens["after"].double() if gated else functional.silu(total)
        return output, windows[:, :, 1:].transpose(1, 2)[:, None]

    return Case(f"conv-{taps}-{dtype}", StateShape.of_conv(channels, taps), make, call, exact)


def recurrence_case(
    dtype: torch.dtype,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (24, 40),
    *,
    kind: str,
) -> Case:
    """`kind` is "delta", "channels" (the same with a decay for each channel) or "mamba"."""
    (num_key_heads, num_heads), (key_dim, value_dim) = heads, dims
    is_delta, scale = kind != "mamba", key_dim**-0.5
    skip = None if is_delta else torch.randn(num_heads)

    def make(count: int) -> dict[str, torch.Tensor]:
        # Views of one line, as a convolution's outputs are.
        sizes = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
        parts = torch.randn(count, sum(sizes) + 3).to(dtype)[:, 3:].split(sizes, dim=1)
        lines = [part.unflatten(1, (n, -1)) for part, n in zip(parts, (*[num_key_heads] * 2, num_heads), strict=True)]
        decay_shape = (count, num_heads, key_dim) if kind == "channels" else (count, num_heads)
        gates = {"decay": torch.rand(decay_shape) ** 0.2, "beta": torch.rand(count, num_heads)}
        return dict(zip(("query", "key", "value"), lines, strict=True)) | gates

    def call(tokens: Tensors, pages: StatePages, units: StateUnits) -> torch.Tensor:
        query, key, value, decay, beta = (tokens[name] for name in ("query", "key", "value", "decay", "beta"))
        options: dict[str, Any] = {"delta": is_delta, "unit_norm": is_delta, "scale": scale, "skip": skip}
        return ops.linear_recurrence(query, key, value, decay, beta, pages, units, **options)

    def exact(tokens: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value, decay, beta = (tokens[n].double() for n in ("query", "key", "value", "decay", "beta"))
        if is_delta:
            query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
        query, key = (x.repeat_interleave(num_heads // num_key_heads, dim=1) for x in (query * scale, key))
        state, outputs, states = torch.zeros(num_heads, key_dim, value_dim).double(), [], []
        for i in range(len(value)):
            state = state * decay[i].view(num_heads, -1, 1)
            found = (state * key[i, :, :, None]).sum(1) if is_delta else 0.0
            state = state + key[i, :, :, None] * ((value[i] - found) * beta[i, :, None])[:, None]
            output = (state * query[i, :, :, None]).sum(1)
            outputs.append(output if skip is None else output + skip[:, None] * value[i])
            states.append(state)
        return torch.stack(outputs), torch.stack(states)

    shape = StateShape.of_recurrence(num_heads, key_dim, value_dim)
    return Case(f"{kind}-{key_dim}-{value_dim}-{dtype}", shape, make, call, exact)


def scan_case(dtype: torch.dtype, channels: int = 40, num_states: int = 16) -> Case:
    a, skip = -torch.rand(channels, num_states) * 4, torch.randn(channels)

    def make(count: int) -> dict[str, torch.Tensor]:
        lines = torch.randn(count, channels + 2 * num_states).to(dtype)
        x, b, c = lines.split((channels, num_states, num_states), dim=1)
        return {"x": x, "dt": torch.rand(count, channels), "b": b, "c": c}

    def call(tokens: Tensors, pages: StatePages, units: StateUnits) -> torch.Tensor:
        return ops.selective_scan(tokens["x"], tokens["dt"], a, tokens["b"], tokens["c"], pages, units, skip=skip)

    def exact(tokens: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        x, dt, b, c = (tokens[name].double() for name in ("x", "dt", "b", "c"))
        state, outputs, states = torch.zeros(channels, num_states).double(), [], []
        for i in range(len(x)):
            state = torch.exp(dt[i, :, None] * a.double()) * state + (dt[i] * x[i])[:, None] * b[i]
            outputs.append((state * c[i]).sum(-1) + skip * x[i])
            states.append(state.t()[None])
        return torch.stack(outputs), torch.stack(states)

    return Case(f"scan-{dtype}", StateShape.of_scan(channels, num_states), make, call, exact)


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of a row of a batch.

    Attributes:
        tokens: of the whole sequence.
        table: the blocks of its state.
        checkpoints: lines of checkpoint tables by the positions of tokens.
    """

    tokens: Tensors
    table: Sequence[int]
    begin: int
    end: int
    kept: int | None = None
    checkpoints: Mapping[int, int] = field(default_factory=dict)


class Memory:
    """Blocks of NaN that states of one layer are in, after units of another; each sequence has two blocks or more."""

    def __init__(self, shape: StateShape, num_blocks: int = 24, tiles_per_unit: int = 3) -> None:
        self.shape = shape
        self.units = StateUnits(1, tiles_per_unit * shape.tile_bytes + 64)
        units_per_block = -(-(1 + shape.num_units(self.units.unit_bytes)) // 2)
        self.width = -(-(1 + shape.num_units(self.units.unit_bytes)) // units_per_block)
        memory = torch.full((num_blocks, units_per_block * self.units.unit_bytes // 4 + 16), float("nan"))
        self.pages = memory.view(torch.uint8)[:, :-32]
        self._free = torch.randperm(num_blocks).tolist()

    def new_table(self) -> list[int]:
        return [self._free.pop() for _ in range(self.width)]

    def state(self, table: Sequence[int]) -> torch.Tensor:
        return read_state(self.pages, torch.tensor(table), self.units, self.shape)

    def batch(self, parts: Sequence[Part], checkpoint_tables: Sequence[Sequence[int]] = ()) -> StatePages:
        counts = torch.tensor([0, *(part.end - part.begin for part in parts)])
        lines = [part.checkpoints.get(position, -1) for part in parts for position in range(part.begin, part.end)]
        kept = [part.end - part.begin if part.kept is None else part.kept for part in parts]
        return StatePages(
            self.pages,
            _indices([part.table for part in parts]).view(len(parts), self.width),
            counts.cumsum(0).int(),
            _indices([part.end for part in parts]),
            _indices(lines),
            _indices(checkpoint_tables).view(-1, self.width),
            None if all(part.kept is None for part in parts) else _indices(kept),
        )

    def run(
        self, case: Case, parts: Sequence[Part], checkpoint_tables: Sequence[Sequence[int]] = ()
    ) -> tuple[torch.Tensor, ...]:
        """The outputs of each part."""
        pages = self.batch(parts, checkpoint_tables)
        names = parts[0].tokens
        tokens = {name: torch.cat([part.tokens[name][part.begin : part.end] for part in parts]) for name in names}
        return case.call(tokens, pages, self.units).split([part.end - part.begin for part in parts])


def _indices(numbers: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)
