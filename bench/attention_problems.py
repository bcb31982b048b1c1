"""Random inputs of paged attention, and their expected results."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire_kernels.reference import ScoreRule


@dataclass(frozen=True, slots=True)
class Heads:
    """The shape of a model's attention."""

    query: int
    kv: int
    size: int

    def __str__(self) -> str:
        return f"{self.query}/{self.kv} heads of {self.size}"


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Arguments of `quire_kernels.ops.paged_attention`; `rows` are (new tokens, context length)."""

    rows: tuple[tuple[int, int], ...]
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.kv_cache, self.block_tables, self.query_start_loc, self.seq_lens

    @property
    def limits(self) -> dict[str, int]:
        return {"max_query_len": max(new for new, _ in self.rows), "max_seq_len": max(total for _, total in self.rows)}

    @property
    def context_bytes(self) -> int:
        """Bytes of keys and values of all contexts."""
        _, _, num_kv_heads, _, head_dim = self.kv_cache.shape
        return 2 * sum(total for _, total in self.rows) * num_kv_heads * head_dim * self.kv_cache.dtype.itemsize


def make_problem(
    rows: Sequence[tuple[int, int]],
    heads: Heads,
    dtype: torch.dtype,
    device: str,
    *,
    block_size: int = 16,
    poisoned: bool = False,
) -> AttentionProblem:
    """Contexts in blocks that are scattered over the pool; if `poisoned`, the slots outside them are NaN."""
    longest = max(total for _, total in rows)
    columns = -(-longest // block_size)
    num_blocks = len(rows) * columns
    tables = torch.randperm(num_blocks, device=device).view(len(rows), columns)
    shape = (2, num_blocks, heads.kv, block_size, heads.size)
    kv_cache = torch.randn(shape, dtype=dtype, device=device)
    if poisoned:
        for row, (_, total) in enumerate(rows):
            absent = torch.arange(columns * block_size, device=device).view(columns, block_size) >= total
            blocks = kv_cache[:, tables[row]]
            kv_cache[:, tables[row]] = blocks.masked_fill_(absent[None, :, None, :, None], torch.nan)
    new = torch.tensor([0, *(count for count, _ in rows)], device=device)
    query = torch.randn(sum(count for count, _ in rows), heads.query, heads.size, dtype=dtype, device=device)
    seq_lens = torch.tensor([total for _, total in rows], dtype=torch.int32, device=device)
    return AttentionProblem(tuple(rows), query, kv_cache, tables.int(), new.cumsum(0).int(), seq_lens)


def expected_attention(problem: AttentionProblem, rule: ScoreRule) -> torch.Tensor:
    """[T, Hq, D] float64, row by row from gathered keys and values."""
    outputs, start = [], 0
    for row, (new, total) in enumerate(problem.rows):
        query = problem.query[start : start + new].double().transpose(0, 1)
        outputs.append(_expected_row(query, problem, row, total, rule).transpose(0, 1))
        start += new
    return torch.cat(outputs)


def _expected_row(
    query: torch.Tensor, problem: AttentionProblem, row: int, total: int, rule: ScoreRule
) -> torch.Tensor:
    """query [Hq, n, D] -> [Hq, n, D]."""
    cache = problem.kv_cache[:, problem.block_tables[row].long()].double()
    keys, values = cache.permute(0, 2, 1, 3, 4).flatten(2, 3)[:, :, :total]
    group = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = query @ keys.transpose(1, 2) * rule.scale
    if rule.soft_cap is not None:
        scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
    positions = torch.arange(total, device=query.device)
    distances = positions - positions[total - query.shape[1] :, None]
    if rule.alibi_slopes is not None:
        scores = scores + rule.alibi_slopes.double()[:, None, None] * distances
    visible = distances <= 0
    if rule.sliding_window is not None:
        visible &= distances > -rule.sliding_window
    scores = scores.masked_fill(~visible, -torch.inf)
    if rule.sinks is not None:
        scores = torch.cat((scores, rule.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)), dim=-1)
    return torch.softmax(scores, dim=-1)[..., :total] @ values
