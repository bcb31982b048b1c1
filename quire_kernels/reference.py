"""The operations in plain torch: the truth that faster kernels are tested against, and the fallback if none exists.

`quire_kernels.ops` documents the arguments and checks them.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from quire_kernels.int8 import quantize
from quire_kernels.packed_weight import PackedWeight, Quantization
from quire_kernels.reference_states import (  # noqa: F401  (for importers of this module)
    causal_conv,
    gated_norm,
    gates,
    linear_recurrence,
    selective_scan,
)

# Bound on the elements of keys and values that one group of decodes gathers, and so on attention's memory.
MAX_GATHERED_ELEMENTS = 1 << 24
# Contexts up to this many tokens share a group whatever their lengths: padding them costs less than another group.
SHORT_CONTEXT = 64
# Tokens of a prefill chunk that attend at once. It bounds the mask, and keys beyond a slice are not read for nothing:
# 2,048 tokens, 8 heads of 32, float32, one core: 34 ms in slices of 256, 64 ms at once.
QUERY_SLICE = 256


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """How scores follow from products of queries and keys; see `quire_kernels.ops.paged_attention`."""

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    block_size = kv_cache.shape[3]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    kv_cache[0, blocks, :, offsets] = key
    kv_cache[-1, blocks, :, offsets] = value


def copy_blocks(kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    for kv_cache in kv_caches:
        source, destination = pairs.to(kv_cache.device, non_blocking=True).unbind(1)
        kv_cache.index_copy_(1, destination, kv_cache.index_select(1, source))


def swap_blocks(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    if not source:
        return
    # The indices travel once, not once a layer.
    from_ids, to_ids = pairs[:, 0].to(source[0].device), pairs[:, 1].to(destination[0].device)
    for from_cache, to_cache in zip(source, destination, strict=True):
        to_cache.index_copy_(1, to_ids, from_cache.index_select(1, from_ids).to(to_cache.device))


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0, residual: torch.Tensor | None = None
) -> torch.Tensor:
    x = x if residual is None else residual.add_(x)
    if not offset:
        return functional.rms_norm(x, weight.shape, weight, eps)
    # float64 is not narrowed.
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps).to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    x = x if residual is None else residual.add_(x)
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D]; cos, sin [T, 1, D/2] float32."""
    rotated = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin)
    return rotated.to(x.dtype)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    query, key = rotary(query, key, positions, cos_sin_cache)
    reshape_and_cache(key, value, kv_cache, slot_mapping)
    return query


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def pack_weight(weight: torch.Tensor, gated: bool, quantization: Quantization) -> PackedWeight:
    out_features, in_features = weight.shape
    if quantization is Quantization.NONE:
        return PackedWeight(weight, None, weight.dtype, out_features, in_features, in_features, gated, quantization)
    lines = quantize(weight)
    return PackedWeight(
        lines.values,
        lines.scales.squeeze(-1),
        weight.dtype,
        out_features,
        in_features,
        in_features,
        gated,
        quantization,
    )


def product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str, output_dtype: torch.dtype
) -> torch.Tensor:
    if weight.scales is None:
        # float64 is not narrowed.
        wide = torch.promote_types(weight.dtype, torch.float32)
        sums = functional.linear(x.to(wide), weight.data.to(wide), None if bias is None else bias.to(wide))
    elif weight.quantization is Quantization.INT8_WEIGHT_ONLY:
        sums = functional.linear(x.float(), weight.data.float()) * weight.scales
        sums = sums if bias is None else sums + bias
    else:
        lines = quantize(x)
        # In float64 whole numbers of this size are exact.
        exact = functional.linear(lines.values.double(), weight.data.double()).float()
        sums = exact * lines.scales * weight.scales
        sums = sums if bias is None else sums + bias
    return activated(sums, weight.gated, activation, output_dtype)


def activated(sums: torch.Tensor, gated: bool, activation: str, output_dtype: torch.dtype) -> torch.Tensor:
    """Applies an activation to the sums of a product, [..., out]; the first half are gates if `gated`."""
    if gated:
        gate, up = sums.chunk(2, dim=-1)
        if activation == "clamped_swiglu":
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            return ((up + 1) * (gate * torch.sigmoid(1.702 * gate))).to(output_dtype)
        return (_ACTIVATIONS[activation](gate) * up).to(output_dtype)
    return _ACTIVATIONS[activation](sums).to(output_dtype)


_ACTIVATIONS = {
    "identity": torch.nn.Identity(),
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "gelu": functional.gelu,
}


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scores: ScoreRule,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    """Gathers the blocks of a row into contiguous keys and values, then attends densely: decodes together in groups of
    similar length, prefill chunks one row at a time.

    A row's result depends only on its own context: slots outside it are cleared after the gather, so that a NaN in a
    shared or recycled block cannot reach another row. On a GPU, a batch of only decodes never waits for the device; one
    with prefill chunks reads lengths from it.
    """
    num_rows = seq_lens.shape[0]
    lengths = seq_lens.tolist() if query.is_cpu or max_query_len > 1 else [max_seq_len] * num_rows
    output = torch.empty_like(query)
    decodes: Sequence[int] = range(num_rows)
    if max_query_len > 1:
        starts = query_start_loc.tolist()
        decodes = [row for row in range(num_rows) if starts[row + 1] - starts[row] == 1]
        for row in range(num_rows):
            chunk = slice(starts[row], starts[row + 1])
            if chunk.stop - chunk.start > 1:
                output[chunk] = _attend_chunk(query[chunk], kv_cache, block_tables[row], lengths[row], scores)
    for group in _decode_groups(decodes, lengths, kv_cache):
        longest = lengths[group[-1]]
        if len(group) == query.shape[0]:
            return _attend_decodes(query, kv_cache, block_tables, seq_lens, longest, scores)
        rows = torch.tensor(group, device=query.device)
        tokens = query_start_loc[rows].long()
        output[tokens] = _attend_decodes(query[tokens], kv_cache, block_tables[rows], seq_lens[rows], longest, scores)
    return output


def _decode_groups(rows: Sequence[int], lengths: Sequence[int], kv_cache: torch.Tensor) -> Iterator[list[int]]:
    """Splits decodes, shortest first, into groups of bounded size in which no context is much longer than another."""
    block_size = kv_cache.shape[3]
    elements_per_token = 2 * kv_cache[0, 0].numel() // block_size
    ordered = sorted(rows, key=lengths.__getitem__)
    first = 0
    while first < len(ordered):
        longest = max(2 * lengths[ordered[first]], SHORT_CONTEXT)
        end = bisect_right(ordered, longest, lo=first, key=lengths.__getitem__)
        end = min(end, first + max(1, MAX_GATHERED_ELEMENTS // (elements_per_token * longest)))
        yield ordered[first:end]
        first = end


def _attend_decodes(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    longest: int,
    scores: ScoreRule,
) -> torch.Tensor:
    """Attention of one new token a row; query [n, Hq, D], block_tables [n, M], seq_lens [n] of at most `longest`."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    num_blocks = _num_blocks(longest, block_size)
    key_positions = torch.arange(num_blocks * block_size, device=query.device)
    absent = key_positions >= seq_lens[:, None]
    if scores.sliding_window is not None:
        absent |= key_positions < ((seq_lens - scores.sliding_window) // block_size * block_size)[:, None]
    # Table entries outside of what a row sees mean nothing; the block of its last token stands in for them.
    lasts = block_tables.gather(1, ((seq_lens - 1) // block_size).long()[:, None])
    tables = torch.where(absent[:, ::block_size], lasts, block_tables[:, :num_blocks])
    keys, values = _gather(kv_cache, tables, absent)
    attended = _attend(
        query.reshape(num_rows, num_kv_heads, group, head_dim),
        keys,
        values,
        query_positions=(seq_lens - 1)[:, None, None, None],
        key_positions=key_positions,
        head_shape=(num_kv_heads, group, 1),
        scores=scores,
    )
    return attended.reshape(num_rows, num_heads, head_dim)


def _attend_chunk(
    query: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, length: int, scores: ScoreRule
) -> torch.Tensor:
    """Attention of the last tokens of one row; query [L, Hq, D], block_table [M]; returns [L, Hq, D]."""
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    table, absent = block_table[None, : _num_blocks(length, block_size)], None
    if scores.sliding_window is not None:
        first = max(length - num_tokens + 1 - scores.sliding_window, 0) // block_size * block_size
        absent = (torch.arange(table.shape[1] * block_size, device=query.device) < first)[None]
    keys, values = _gather(kv_cache, table, absent)
    # Heads that share keys become one batch entry each, by a view that repeats nothing.
    shape = (num_kv_heads, group, keys.shape[2], head_dim)
    keys, values = keys[0, :, None].expand(shape), values[0, :, None].expand(shape)
    query = query.reshape(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    key_positions = torch.arange(length, device=query.device)
    slices = []
    for start in range(0, num_tokens, QUERY_SLICE):
        end = min(start + QUERY_SLICE, num_tokens)
        first, last = length - num_tokens + start, length - num_tokens + end
        attended = _attend(
            query[:, :, start:end],
            keys[:, :, :last],
            values[:, :, :last],
            query_positions=key_positions[first:last, None],
            key_positions=key_positions[:last],
            head_shape=(num_kv_heads, group, 1, 1),
            scores=scores,
        )
        slices.append(attended.permute(2, 0, 1, 3).reshape(end - start, num_heads, head_dim))
    return torch.cat(slices)


def _gather(
    kv_cache: torch.Tensor, tables: torch.Tensor, absent: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the blocks `tables` [R, M], each [R, Hkv, M * B, D]; zero if `absent` [R, M * B]. Latents are
    both."""
    if not kv_cache.is_contiguous():  # Blocks lie apart.
        kv_cache = kv_cache.index_select(1, tables.long().flatten())
        tables = torch.arange(tables.numel(), device=tables.device).view_as(tables)
    _, num_blocks, num_kv_heads, block_size, head_dim = kv_cache.shape
    heads = torch.arange(num_kv_heads, device=tables.device)[:, None]
    tiles = tables.long()[:, None, :] * num_kv_heads + heads
    parts = kv_cache.shape[0]
    tiles = torch.stack([tiles + part * num_blocks * num_kv_heads for part in range(parts)]).view(-1)
    gathered = kv_cache.view(-1, block_size * head_dim).index_select(0, tiles)
    gathered = gathered.view(parts, tables.shape[0], num_kv_heads, -1, head_dim)
    if absent is not None:
        absent = absent[:, None].expand(-1, num_kv_heads, -1)
        if gathered.is_cpu:  # Touches the absent slots only. On a GPU finding them would wait for the device.
            slots = absent.reshape(-1).nonzero().view(-1)
            gathered.view(parts, -1, head_dim).index_fill_(1, slots, 0)
        else:
            gathered.masked_fill_(absent[..., None], 0)
    return gathered[0], gathered[parts - 1]


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    head_shape: tuple[int, ...],
    scores: ScoreRule,
) -> torch.Tensor:
    """Causal dense attention; the last two dimensions are (tokens, D), positions broadcast to the scores.

    Args:
        head_shape: the shape in which one number per query head broadcasts to the scores.
    """
    visible = key_positions <= query_positions
    if scores.sliding_window is not None:
        visible &= key_positions > query_positions - scores.sliding_window
    if scores.soft_cap is None and scores.alibi_slopes is None and scores.sinks is None:
        return functional.scaled_dot_product_attention(query, keys, values, attn_mask=visible, scale=scores.scale)
    weights = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * scores.scale
    if scores.soft_cap is not None:
        weights = torch.tanh(weights / scores.soft_cap) * scores.soft_cap
    if scores.alibi_slopes is not None:
        weights = weights + scores.alibi_slopes.view(head_shape) * (key_positions - query_positions)
    weights = weights.masked_fill(~visible, float("-inf"))
    weights = _softmax(weights, None if scores.sinks is None else scores.sinks.view(head_shape))
    return torch.matmul(weights, values.float()).to(query.dtype)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension; `sinks` broadcast to the scores, and their share is left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks.expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
