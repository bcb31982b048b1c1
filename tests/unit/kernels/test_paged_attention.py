"""Paged attention compared with dense attention in float64."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from quire_kernels import int8, ops, reference
from quire_kernels.reference import ScoreRule

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@dataclass(frozen=True, slots=True)
class Batch:
    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in the order of attention's arguments."""
        return self.query, self.kv_cache, self.block_tables, self.query_start_loc, self.seq_lens

    @property
    def limits(self) -> dict[str, int]:
        query_lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
        return {"max_query_len": int(query_lens.max()), "max_seq_len": int(self.seq_lens.max())}

    def attend(self, scale: float = 0.3, **options: Any) -> torch.Tensor:
        asked: dict[str, Any] = {"scale": scale, **self.limits, **options}
        return ops.paged_attention(*self.tensors, **asked)


def make_batch(
    rows: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 32,
    block_size: int = 5,
    dtype: torch.dtype = torch.float32,
    lines_per_token: int = 2,
    seed: int = 0,
) -> Batch:
    """Rows of (new tokens, context length); scrambled blocks, NaN in every slot that is in no context."""
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    columns = max(-(-length // block_size) for _, length in rows) + 2
    num_blocks = columns * len(rows) + 1
    tables = torch.randperm(num_blocks, generator=generator)[:-1].view(len(rows), columns)
    cache = torch.randn(lines_per_token, num_blocks, num_kv_heads, block_size, head_dim, generator=generator)
    written = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for row, (_, length) in enumerate(rows):
        positions = torch.arange(length)
        written[tables[row, positions // block_size], positions % block_size] = True
        tables[row, -(-length // block_size) :] = 2**31 - 1
    cache.masked_fill_(~written[None, :, None, :, None], float("nan"))
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0)
    query = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator)
    return Batch(
        query.to(dtype),
        cache.to(dtype),
        tables.to(torch.int32),
        starts.to(torch.int32),
        torch.tensor([length for _, length in rows], dtype=torch.int32),
    )


def without_tokens_before(batch: Batch, window: int) -> Batch:
    """The batch with a block of NaN in place of blocks that no token of a row sees."""
    tables, unused = batch.block_tables.clone(), int(batch.kv_cache[0, :, 0, 0, 0].isnan().nonzero()[0])
    for table, length, new in zip(tables, batch.seq_lens, batch.query_start_loc.diff(), strict=True):
        table[: max(int(length - new) + 1 - window, 0) // batch.kv_cache.shape[3]] = unused
    return replace(batch, block_tables=tables)


def exact_attention(batch: Batch, rule: ScoreRule) -> torch.Tensor:
    output = torch.empty(batch.query.shape, dtype=torch.float64)
    block_size = batch.kv_cache.shape[3]
    group = batch.query.shape[1] // batch.kv_cache.shape[2]
    for row, length in enumerate(batch.seq_lens.tolist()):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        seen, positions = torch.arange(length), torch.arange(length - (end - start), length)[:, None]
        blocks = batch.block_tables[row, seen // block_size].long()
        context = batch.kv_cache[:, blocks, :, seen % block_size].double().repeat_interleave(group, dim=2)
        # A latent is key and value.
        keys, values = context[:, 0], context[:, -1]
        scores = torch.einsum("qhd,khd->hqk", batch.query[start:end].double(), keys) * rule.scale
        if rule.soft_cap is not None:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        if rule.alibi_slopes is not None:
            scores += rule.alibi_slopes.double()[:, None, None] * (seen - positions)
        hidden = seen > positions
        if rule.sliding_window is not None:
            hidden |= seen <= positions - rule.sliding_window
        scores = scores.masked_fill(hidden, float("-inf"))
        if rule.sinks is not None:
            sinks = rule.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        output[start:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return output


def naive_attention(batch: Batch, scale: float = 0.3, **options: Any) -> torch.Tensor:
    return exact_attention(batch, ScoreRule(scale, **options))


def alone_rows(batch: Batch) -> Iterator[Batch]:
    """Each row as a separate batch."""
    for row in range(len(batch.seq_lens)):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        yield replace(
            batch,
            query=batch.query[start:end],
            block_tables=batch.block_tables[row : row + 1],
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=batch.seq_lens[row : row + 1],
        )


def assert_matches_naive(batch: Batch, **options: Any) -> None:
    expected = naive_attention(batch, **options)
    actual = batch.attend(**options)
    assert actual.dtype == batch.query.dtype
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


# Sinks of six heads: negligible, dominant, and in between.
SINKS = torch.tensor([-20.0, 0.0, 1.5, 8.0, -1.0, 3.0])
MIXED = [(1, 1), (3, 3), (1, 17), (4, 11), (1, 5), (7, 7), (1, 90)]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [1, 6, 40])
def test_blocks_before_the_window_are_not_read(window: int, dtype: torch.dtype) -> None:
    batch = make_batch([*MIXED, (33, 150), (9, 64), (1, 700)], dtype=dtype)
    without = without_tokens_before(batch, window)
    assert not torch.equal(without.block_tables, batch.block_tables)
    assert torch.equal(without.attend(sliding_window=window), batch.attend(sliding_window=window))
    *shape, head_dim = batch.kv_cache.shape
    lines = int8.quantized_lines(batch.kv_cache.view(-1, 1, head_dim)).view(*shape, -1)
    attended = [replace(each, kv_cache=lines).attend(sliding_window=window) for each in (batch, without)]
    assert torch.equal(*attended)
    assert attended[0].isfinite().all()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.int8])
def test_a_layer_may_have_a_part_of_each_block(dtype: torch.dtype) -> None:
    batch = make_batch(MIXED, dtype=torch.float32 if dtype == torch.int8 else dtype)
    whole = batch.kv_cache
    if dtype == torch.int8:
        whole = int8.quantized_lines(whole.view(-1, 1, whole.shape[-1])).view(*whole.shape[:-1], -1)
    wide = torch.zeros((*whole.shape[:2], 3, *whole.shape[2:]), dtype=dtype)
    part = wide[:, :, 1]
    part.copy_(whole)
    assert torch.equal(replace(batch, kv_cache=part).attend(), replace(batch, kv_cache=whole).attend())
    key, value = torch.randn(2, 4, *whole.shape[2:3], batch.query.shape[-1]).to(batch.query.dtype)
    slots = torch.tensor([7, 0, 33, 12])
    for cache in (whole, part):
        ops.reshape_and_cache(key, value, cache, slots)
    assert torch.equal(part.contiguous().view(torch.int8), whole.contiguous().view(torch.int8))
    assert not wide[:, :, [0, 2]].any()


@pytest.mark.usefixtures("implementation")
def test_a_sink_of_minus_infinity_is_none_and_a_great_one_takes_all() -> None:
    batch = make_batch(MIXED)
    sinks = torch.tensor([float("-inf"), 1e6, float("-inf"), 1e6])
    actual, plain = batch.attend(sinks=sinks), batch.attend()
    torch.testing.assert_close(actual[:, ::2], plain[:, ::2])
    assert not actual[:, 1::2].any()


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(("head_dim", "dtype"), [(24, torch.float16), (40, torch.float32), (576, torch.bfloat16)])
def test_a_latent_is_key_and_value(head_dim: int, dtype: torch.dtype) -> None:
    rows = [*MIXED, (1, 300), (30, 70)]
    batch = make_batch(rows, heads=(6, 1), head_dim=head_dim, lines_per_token=1, dtype=dtype)
    assert_matches_naive(batch, scale=head_dim**-0.5)
    together = batch.attend(head_dim**-0.5)
    whole = [each.attend(head_dim**-0.5) for each in alone_rows(batch)]
    if ops.implementation_for(batch.query.device) is not reference:
        assert torch.equal(together, torch.cat(whole))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("rows", [[(1, 12)], [(1, 12), (1, 3)], [(3, 7)], [(1, 12), (3, 7)]])
def test_limits_may_be_more_than_any_row_has(rows: list[tuple[int, int]]) -> None:
    batch = make_batch(rows)
    expected = naive_attention(batch).float()
    torch.testing.assert_close(batch.attend(max_query_len=9, max_seq_len=15), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("implementation")
def test_poisoned_row_leaves_its_neighbours_alone() -> None:
    batch = make_batch([(1, 20), (1, 23), (3, 9)])
    expected = batch.attend()
    batch.kv_cache[:, batch.block_tables[1, 0].long()] = float("inf")
    actual = batch.attend()
    assert actual[1].isnan().any()
    torch.testing.assert_close(actual[[0, 2, 3, 4]], expected[[0, 2, 3, 4]])


GOOD = make_batch([(1, 7), (2, 6)])


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (replace(GOOD, query=GOOD.query[..., :16]), {}, r"query has shape \[3, 4, 16\]; expected \[any, any, 32\]"),
        (replace(GOOD, query=GOOD.query[:, :3]), {}, "query has 3 heads; expected a multiple of the 2"),
        (replace(GOOD, query=GOOD.query.double()), {}, "query has dtype torch.float64; expected torch.float32"),
        (replace(GOOD, kv_cache=GOOD.kv_cache[0]), {}, "kv_cache has shape"),
        (replace(GOOD, kv_cache=GOOD.kv_cache[..., ::2]), {}, "kv_cache is not contiguous"),
        (replace(GOOD, block_tables=GOOD.block_tables[:1]), {}, "block_tables has shape"),
        (replace(GOOD, block_tables=GOOD.block_tables.long()), {}, "block_tables has dtype torch.int64"),
        (replace(GOOD, query_start_loc=GOOD.query_start_loc[:2]), {}, "query_start_loc has shape"),
        (GOOD, {"max_query_len": 0}, "max_query_len is 0"),
        (GOOD, {"max_query_len": 8}, "max_query_len is 8; expected 1 to max_seq_len, 7"),
        (GOOD, {"max_seq_len": 21}, "max_seq_len is 21; 4 blocks of 5 tokens hold fewer"),
        (GOOD, {"sliding_window": 0}, "sliding_window is 0"),
        (GOOD, {"soft_cap": 0.0}, "soft_cap is 0.0"),
        (GOOD, {"alibi_slopes": torch.ones(2)}, "alibi_slopes has shape"),
        (GOOD, {"sinks": torch.ones(2)}, r"sinks has shape \[2\]; expected \[4\]"),
        (GOOD, {"sinks": torch.ones(4).half()}, "sinks has dtype torch.float16; expected torch.float32"),
        (GOOD, {"sinks": torch.ones(4, device="meta")}, "sinks is on meta; expected cpu"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(batch: Batch, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.attend(**{**GOOD.limits, **options})
