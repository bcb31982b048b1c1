"""One function per operation: it checks its arguments and calls the implementation for their device.

Words: T tokens of one flat batch, R rows (sequences) in it, H heads, D head size, B block size. A slot is
`block_id * B + offset`. The KV pool of a layer is `[2, num_blocks, Hkv, B, D]`, keys first: the tile of one block and
head is contiguous. A pool of int8 has lines of `int8.line_bytes(D)` instead of D; keys, values and queries are
floating, rounded on the way in. A pool of latents is `[1, num_blocks, Hkv, B, D]`: a line is both key and value of its
token, as in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) whose projections are absorbed.

All operations raise ValueError when shapes, dtypes or devices do not fit together. The content of index tensors (block
ids, slots, positions) is the caller's duty: reading it would stall a GPU. On the CPU one that is out of range raises
IndexError.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire_kernels import host_memory, int8, reference
from quire_kernels.backends import (  # noqa: F401  (four of these are for importers of this module)
    Products,
    StateOperations,
    block_moves_for,
    coded_products_for,
    draws_for,
    has_fp8_products,
    implementation_for,
    largest_head_dim,
    name_of,
    numerics_of,
    packed_products_for,
    reads_int8_pools,
)
from quire_kernels.checks import (
    FLOATING,
    check_attention,
    check_block_ids,
    check_block_pairs,
    check_device,
    check_dtype,
    check_extent,
    check_kv_cache,
    check_layer_norm,
    check_norm,
    check_rotary,
    check_same_tokens,
    check_shape,
    check_write,
)
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.cpu.low_rank import TokenAddends
from quire_kernels.draw_rules import DrawRules
from quire_kernels.experts import ChoiceRule, Factor
from quire_kernels.packed_weight import ACTIVATIONS, GATES, CodedWeight, Coding, PackedWeight, Quantization
from quire_kernels.states import StatePages, StateShape, StateUnits, check_pages


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Writes the keys and values of new tokens into their slots of `kv_cache`, in place.

    Args:
        key, value: [T, Hkv, D], of the dtype of `kv_cache`; of one floating dtype if that is int8.
        kv_cache: [2, num_blocks, Hkv, B, D].
        slot_mapping: [T] int64, all different.
    """
    check_shape("kv_cache", kv_cache, (2, None, None, None, None))
    _write(key, value, kv_cache, slot_mapping)


def _write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_write(key, value, kv_cache, slot_mapping)
    implementation = implementation_for(kv_cache.device)
    if kv_cache.dtype == torch.int8 and not reads_int8_pools(implementation):
        key, value, kv_cache = _as_lines(key, value, kv_cache)
    implementation.reshape_and_cache(key, value, kv_cache, slot_mapping)


def cache_latents(latents: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes the latents of new tokens into their slots of `kv_cache`, in place.

    Args:
        latents: [T, Hkv, D], of the dtype of `kv_cache`; of one floating dtype if that is int8.
        kv_cache: [1, num_blocks, Hkv, B, D].
        slot_mapping: [T] int64, all different.
    """
    check_shape("kv_cache", kv_cache, (1, None, None, None, None))
    _write(latents, latents, kv_cache, slot_mapping)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch over paged keys and values (the paper's section 4.1).

    The new tokens of row r are `query[query_start_loc[r]:query_start_loc[r + 1]]`; they are the last tokens of a
    context of `seq_lens[r]` tokens, which lies in the blocks `block_tables[r]` and includes the new tokens themselves.
    Decodes (one new token) and prefill chunks mix freely. Slots beyond a row's context may hold anything, NaN too.

    Args:
        query: [T, Hq, D], of the dtype of `kv_cache`; Hq is a multiple of Hkv.
        kv_cache: [2, num_blocks, Hkv, B, D], or [1, ...] of latents.
        block_tables: [R, M] int32, M at least ceil(max_seq_len / B). Entries beyond a row's context are not read.
        query_start_loc: [R + 1] int32, from 0 to T, rising.
        seq_lens: [R] int32, at least the row's new tokens.
        scale: factor on the scores.
        max_query_len, max_seq_len: at least the most new tokens and the longest context of any row.
        sliding_window: a token sees itself and the `sliding_window - 1` tokens before it.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        alibi_slopes: [Hq] float32; `slope * (key position - query position)` is added to the scores.
        sinks: [Hq] float32; a score more in each softmax of the head, as it is (neither scaled nor capped), whose
            weight goes to no value. So the weights of the values come to less than 1.

    Returns:
        [T, Hq, D] of the dtype of `query`.
    """
    check_attention(query, kv_cache, block_tables, query_start_loc, seq_lens, alibi_slopes, sinks)
    check_extent(max_query_len, max_seq_len, block_tables.shape[1], kv_cache.shape[3])
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window is {sliding_window}; expected at least 1")
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f"soft_cap is {soft_cap}; expected more than 0")
    implementation = implementation_for(kv_cache.device)
    if kv_cache.dtype == torch.int8 and not reads_int8_pools(implementation):
        kv_cache, block_tables = int8.floating_blocks(kv_cache, block_tables, seq_lens, query)
    return implementation.paged_attention(
        query,
        kv_cache,
        block_tables,
        query_start_loc,
        seq_lens,
        scores=reference.ScoreRule(scale, sliding_window, soft_cap, alibi_slopes, sinks),
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )


def copy_blocks(kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """Copies whole blocks within every layer's pool, in place (copy-on-write).

    All sources are read before any destination is written.

    Args:
        kv_caches: one [2 or 1, num_blocks, Hkv, B, D] a layer, all of one dtype and on one device.
        pairs: [n, 2] int64 on any device, (source block, destination block); destinations are all different.
    """
    check_block_pairs(pairs)
    for kv_cache in kv_caches:
        check_kv_cache(kv_cache)
        check_device("kv_caches", kv_cache, kv_caches[0].device)
    if kv_caches:
        device = kv_caches[0].device
        if device.type == "cpu":
            pairs = pairs.cpu()
            check_block_ids(pairs, kv_caches, kv_caches)
        block_moves_for(device).copy_blocks(kv_caches, pairs)


def swap_blocks(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """Copies whole blocks of every layer from one pool to another, on whichever devices they are.

    Args:
        source, destination: one [2 or 1, num_blocks, Hkv, B, D] a layer; they differ in num_blocks and device at most.
            All layers of a pool are on one device, and the pools share no memory.
        pairs: [n, 2] int64 on any device, (source block, destination block); destinations are all different.
    """
    check_block_pairs(pairs)
    if len(source) != len(destination):
        raise ValueError(f"source has {len(source)} layers; destination has {len(destination)}")
    for from_cache, to_cache in zip(source, destination, strict=True):
        check_kv_cache(from_cache)
        check_kv_cache(to_cache)
        check_shape("destination", to_cache, (from_cache.shape[0], None, *from_cache.shape[2:]))
        check_dtype("destination", to_cache, from_cache.dtype)
        check_device("source", from_cache, source[0].device)
        check_device("destination", to_cache, destination[0].device)
    if not source:
        return
    if source[0].is_cpu and destination[0].is_cpu:
        pairs = pairs.cpu()
        check_block_ids(pairs, source, destination)
        host_memory.swap_blocks(source, destination, pairs)
    else:
        off_host = destination[0] if source[0].is_cpu else source[0]
        block_moves_for(off_host.device).swap_blocks(source, destination, pairs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * (weight + offset)` over the last dimension; x [..., hidden], weight [hidden].

    The factor is not rounded, as a sum of 1 and a small number in bfloat16 would be.
    """
    check_norm(x, weight)
    return implementation_for(x.device).rms_norm(x, weight, eps, offset)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x [..., hidden] to the residual stream; returns (rms_norm(sum), sum). May write the sum into `residual`."""
    check_norm(x, weight)
    check_shape("residual", residual, x.shape)
    check_dtype("residual", residual, x.dtype)
    residual = _with_lines(residual)
    return implementation_for(x.device).rms_norm(x, weight, eps, offset, residual), residual


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Layer norm over the last dimension; x [..., hidden], weight and bias [hidden] or None for 1 and 0."""
    check_layer_norm(x, weight, bias)
    return implementation_for(x.device).layer_norm(x, weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds x [..., hidden] to the residual; returns (layer_norm(sum), sum). May write the sum into `residual`."""
    check_layer_norm(x, weight, bias)
    check_shape("residual", residual, x.shape)
    check_dtype("residual", residual, x.dtype)
    residual = _with_lines(residual)
    return implementation_for(x.device).layer_norm(x, weight, bias, eps, residual), residual


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of the two-halves kind (dimension i turns with i + D/2).

    Args:
        query, key: [T, Hq, D] and [T, Hkv, D], D even.
        positions: [T] int64, below max_position.
        cos_sin_cache: [max_position, D] float32; the first half of a line is cosines, the second sines.

    Returns:
        The rotated query and key, new tensors.
    """
    check_rotary(query, key, positions, cos_sin_cache)
    return implementation_for(query.device).rotary(query, key, positions, cos_sin_cache)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """`rotary` and `reshape_and_cache` in one: the rotated keys go to their slots and nowhere else.

    It takes the arguments of both; they may be views of one tensor (the output of a merged linear layer).

    Returns:
        The rotated query, [T, Hq, D]. It may be `query` itself, rotated in place: query and key as they were are lost.
    """
    check_rotary(query, key, positions, cos_sin_cache)
    check_shape("kv_cache", kv_cache, (2, None, None, None, None))
    check_write(key, value, kv_cache, slot_mapping)
    check_dtype("query", query, key.dtype)
    implementation = implementation_for(kv_cache.device)
    if kv_cache.dtype == torch.int8 and not reads_int8_pools(implementation):
        query, key = implementation.rotary(query, key, positions, cos_sin_cache)
        key, value, kv_cache = _as_lines(key, value, kv_cache)
        implementation.reshape_and_cache(key, value, kv_cache, slot_mapping)
        return query
    return implementation.rotary_and_cache(query, key, value, positions, cos_sin_cache, kv_cache, slot_mapping)


def empty(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """A tensor of the dtype and on the device of `like`, for results that several operations write."""
    implementation = implementation_for(like.device)
    if isinstance(implementation, CpuKernels):
        return implementation.empty(shape, like.dtype)
    return like.new_empty(tuple(shape))


def rms_norm_into(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """`rms_norm` of x [T, hidden], written to `out` [T, hidden], whose lines may lie apart."""
    check_norm(x, weight)
    check_shape("out", out, x.shape)
    check_dtype("out", out, x.dtype)
    implementation = implementation_for(x.device)
    if isinstance(implementation, CpuKernels) and x.dtype == weight.dtype:
        implementation.rms_norm_into(x, weight, eps, out)
    else:
        out.copy_(implementation.rms_norm(x, weight, eps))


def rotary_into(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, out: torch.Tensor) -> None:
    """`rotary` of one tensor x [T, H, D], written to `out` [T, H, D], whose heads may lie apart."""
    check_rotary(x, x, positions, cos_sin_cache)
    check_shape("out", out, x.shape)
    check_dtype("out", out, x.dtype)
    implementation = implementation_for(x.device)
    if isinstance(implementation, CpuKernels):
        implementation.rotary_into(x, positions, cos_sin_cache, out)
    else:
        out.copy_(implementation.rotary(x, x, positions, cos_sin_cache)[0])


def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [T, n] times y, [T, n] or [n]."""
    if y.dim() > 1:
        check_shape("y", y, x.shape)
    check_norm(x, y if y.dim() == 1 else y[0])
    implementation = implementation_for(x.device)
    return implementation.multiply(x, y) if isinstance(implementation, CpuKernels) else x * y


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """`silu(x[..., :n]) * x[..., n:]` for x [..., 2n]; returns [..., n]."""
    if x.shape[-1] % 2:
        raise ValueError(f"x has a last dimension of {x.shape[-1]}; expected an even one")
    return implementation_for(x.device).silu_and_mul(x)


def has_packed_products(
    device: torch.device, dtype: torch.dtype, quantization: Quantization = Quantization.NONE
) -> bool:
    """Whether weights of this dtype are better packed than not on such a device."""
    return packed_products_for(device, dtype, quantization) is not None


def pack_weight(
    weight: torch.Tensor, *, gated: bool = False, quantization: Quantization = Quantization.NONE
) -> PackedWeight:
    """Puts a weight into the order in which `product` reads it; the weight itself is not kept if that pays.

    Args:
        weight: [out, in]; gated: the rows of the gates, then the same number of rows of the other factors.
        gated: the product is to be `activation(gate) * up`, an activation of `GATES`.
        quantization: the parts of the product that are rounded to int8.
    """
    check_shape("weight", weight, (None, None))
    check_dtype("weight", weight, FLOATING)
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} rows; expected an even number of a gated one")
    products = packed_products_for(weight.device, weight.dtype, quantization) or reference
    return products.pack_weight(weight, gated, quantization)


def has_coded_products(
    device: torch.device, dtype: torch.dtype, quantization: Quantization = Quantization.NONE
) -> bool:
    """Whether tokens of this dtype can be multiplied with coded weights on such a device, rounded like this."""
    kernels = coded_products_for(device, dtype)
    if quantization is Quantization.INT8_DYNAMIC:
        return isinstance(kernels, CpuKernels)
    return kernels is not None and quantization is Quantization.NONE


def pack_coded(
    weight: CodedWeight,
    *,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = False,
    quantization: Quantization = Quantization.NONE,
) -> PackedWeight:
    """The same as `pack_weight` for a coded weight, to be multiplied with tokens of `dtype`. `has_coded_products` is
    true.

    Products are bitwise the same as with the weight decoded to float32 and rounded to `dtype`. If tokens are rounded to
    int8, too, with one scale each, the weight stays in float32, and `quantization` is WEIGHT_AND_INPUT; numbers in FP8
    or of a table have no such products. Groups have whole blocks of 32 inputs, or there is only one group.
    """
    if quantization is Quantization.INT8_WEIGHT_ONLY:
        raise ValueError("quantization is int8-weight-only, and the weight is coded")
    if quantization is not Quantization.NONE and weight.coding in (Coding.FP8, Coding.TABLE4):
        raise ValueError(f"weight is in {weight.coding.value}, which is not multiplied with int8 tokens")
    if (scales := weight.scales) is not None and scales.inputs % 32 and scales.values.shape[1] > 1:
        raise ValueError(f"weight has groups of {scales.inputs} inputs; expected a multiple of 32")
    if gated and weight.rows.shape[0] % 2:
        raise ValueError(f"weight has {weight.rows.shape[0]} rows; expected an even number of a gated one")
    products = coded_products_for(weight.rows.device, dtype)
    if products is None:
        raise ValueError(f"weight is coded, for which there are no products on {weight.rows.device}")
    return products.pack_coded(weight, gated, quantization, dtype)


def look_up(weight: CodedWeight, ids: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Rows of a coded weight, rounded to `dtype`. `has_coded_products` is true.

    Args:
        ids: [T] int64.

    Returns:
        [T, in].

    Raises:
        IndexError: an id is not the index of a row.
    """
    check_shape("ids", ids, (None,))
    check_dtype("ids", ids, torch.int64)
    kernels = coded_products_for(ids.device, dtype)
    if kernels is None or weight.scales is not None:
        raise ValueError(f"weight is in {weight.coding.value}, and there is no look-up of that on {ids.device}")
    return kernels.look_up(weight, ids, dtype)


def products(
    x: torch.Tensor,
    weights: Sequence[PackedWeight],
    bias: torch.Tensor | None = None,
    *,
    addends: TokenAddends | None = None,
) -> torch.Tensor:
    """`product` with several weights of `pack_coded`, none of them gated, one after the other.

    Args:
        x: [..., in], of the dtype of the weights.
        bias: [the sum of their outs].
        addends: as in `product`, of a table for all of the weights.

    Returns:
        [..., the sum of their outs].
    """
    for weight in weights:
        check_shape("x", x, (*x.shape[:-1], weight.in_features))
    check_dtype("x", x, weights[0].dtype)
    if bias is not None:
        check_shape("bias", bias, (sum(weight.out_features for weight in weights),))
        check_dtype("bias", bias, x.dtype)
    kernels = coded_products_for(x.device, x.dtype)
    if kernels is None or any(weight.gated or (weight.coding is None and weight.scales is None) for weight in weights):
        raise ValueError("weights are not all coded, without gates, and on a device that has products for them")
    if addends is not None:
        _check_slots(x, addends)
        if not isinstance(kernels, CpuKernels):
            raise ValueError("addends are for the kernels of the CPU library")
        return kernels.products(x, weights, bias, x.dtype, addends)
    return kernels.products(x, weights, bias, x.dtype)


def product(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    output_dtype: torch.dtype | None = None,
    addends: TokenAddends | None = None,
) -> torch.Tensor:
    """`activation(x @ weight.T + bias + addends)`, summed in float32 and rounded once.

    Args:
        x: [..., in], of the dtype of the weight.
        bias: [out], of that dtype too.
        activation: one of `ACTIVATIONS`, None for the identity; of the gates one of `GATES`, None for silu.
        output_dtype: the dtype of x, or float32.
        addends: Low-rank addends, for weights whose `takes_addends` is true. They change no bit of tokens in slot 0,
            and the addends of a token depend on no other token.

    Returns:
        [..., out], half as many if the weight is gated.
    """
    dtype, device = weight.dtype, weight.data.device
    check_shape("x", x, (*x.shape[:-1], weight.in_features))
    check_dtype("x", x, dtype)
    check_device("x", x, device)
    if bias is not None:
        check_shape("bias", bias, (weight.out_features,))
        check_dtype("bias", bias, dtype)
        check_device("bias", bias, device)
    activation, known = activation or ("silu" if weight.gated else "identity"), GATES if weight.gated else ACTIVATIONS
    if activation not in known:
        raise ValueError(f"activation is {activation!r}; expected one of {', '.join(known)}")
    if output_dtype not in (None, dtype, torch.float32):
        raise ValueError(f"output_dtype is {output_dtype}; expected {dtype} or torch.float32")
    products = _products_for(weight)
    if addends is None:
        return products.product(x, weight, bias, activation, output_dtype or dtype)
    _check_slots(x, addends)
    if not isinstance(products, CpuKernels):
        raise ValueError("addends are for the kernels of the CPU library, which are missing")
    return products.product(x, weight, bias, activation, output_dtype or dtype, addends)


def head_products_into(x: torch.Tensor, weights: Sequence[PackedWeight], out: torch.Tensor) -> None:
    """The product of each head with a weight of its own, none of them gated.

    Args:
        x: [T, H, in], of the dtype of the weights; heads may lie apart.
        weights: H of them, [out, in].
        out: [T, H, out] of that dtype, to write to; heads may lie apart.
    """
    check_shape("x", x, (None, len(weights), weights[0].in_features))
    check_shape("out", out, (*x.shape[:2], weights[0].out_features))
    for name, tensor in (("x", x), ("out", out)):
        check_dtype(name, tensor, weights[0].dtype)
    kernels = _products_for(weights[0])
    if isinstance(kernels, CpuKernels):
        kernels.head_products_into(x, weights, out)
        return
    for head, weight in enumerate(weights):
        out[:, head] = product(x[:, head], weight)


def can_choose_experts(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there is a `choose_experts` of outputs of this dtype on such a device."""
    return dtype in (torch.float32, torch.bfloat16) and isinstance(implementation_for(device), CpuKernels)


def choose_experts(
    outputs: torch.Tensor,
    rule: ChoiceRule,
    correction: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A router's choice of experts for each token. `can_choose_experts` is true.

    Args:
        outputs: [T, experts], of the router, float32 or bfloat16.
        correction: [experts] float32, added to the scores when experts are chosen.
        factors: [experts] float32, of the weights of each expert.

    Returns:
        Weights [T, chosen] float32 of each token's experts, the best first, and their numbers [T, chosen] int64.
    """
    check_shape("outputs", outputs, (None, None))
    for name, each in (("correction", correction), ("factors", factors)):
        if each is not None:
            check_shape(name, each, (outputs.shape[1],))
            check_dtype(name, each, torch.float32)
    if not 0 < rule.num_chosen <= outputs.shape[1]:
        raise ValueError(f"{rule.num_chosen} of {outputs.shape[1]} experts are to be chosen")
    kernels = implementation_for(outputs.device)
    if not isinstance(kernels, CpuKernels):
        raise ValueError(f"outputs is on {outputs.device}, where no experts are chosen")
    return kernels.choose_experts(outputs, rule, correction, factors)


def pack_experts(inner: Sequence[Factor], down: Sequence[Factor]) -> PackedExperts | None:
    """The products of all experts for `experts`; None if they are not of one shape, or their device has none."""
    shapes = {each.shape for each in inner}, {each.shape for each in down}
    if any(len(each) != 1 for each in shapes) or len(inner) != len(down):
        return None
    first, last = inner[0].weight, down[0].weight
    if last.gated or last.in_features != first.width or first.dtype not in (torch.float32, torch.bfloat16):
        return None
    if (first.dtype, first.quantization) != (last.dtype, last.quantization):
        return None
    kernels = {id(each): each for each in (_products_for(factor.weight) for factor in (*inner, *down))}
    (*others, found) = kernels.values()
    return found.pack_experts(inner, down) if isinstance(found, CpuKernels) and not others else None


def experts(
    x: torch.Tensor,
    packed: PackedExperts,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The weighted sum of each token's experts, bit for bit as by `product` one by one.

    Outputs of experts have the dtype of x. They are multiplied with their weights and added in float32, in the order of
    the choice, and the sum is rounded once. Experts that no token has are not read.

    Args:
        x: [T, in], of the dtype of the experts' weights.
        weights, chosen: as from `choose_experts`.
        shared: [T, out] of that dtype, added last.
        shared_gate: [T, 1] of that dtype: the sigmoid is the weight of `shared`. None for 1.

    Returns:
        [T, out] of the dtype of x.

    Raises:
        IndexError: `chosen` names an expert that there is not.
    """
    check_shape("x", x, (None, packed.inner_weight.in_features))
    check_dtype("x", x, packed.inner_weight.dtype)
    check_shape("chosen", chosen, (x.shape[0], None))
    check_dtype("chosen", chosen, torch.int64)
    check_shape("weights", weights, tuple(chosen.shape))
    check_dtype("weights", weights, torch.float32)
    if shared is not None:
        check_shape("shared", shared, (x.shape[0], packed.down_weight.out_features))
        check_dtype("shared", shared, x.dtype)
    if shared_gate is not None:
        check_shape("shared_gate", shared_gate, (x.shape[0], 1))
        check_dtype("shared_gate", shared_gate, x.dtype)
    kernels = implementation_for(x.device)
    if not isinstance(kernels, CpuKernels):
        raise ValueError(f"x is on {x.device}, where experts are not multiplied together")
    return kernels.experts(x, packed, weights, chosen, shared, shared_gate)


def takes_addends(weight: PackedWeight) -> bool:
    """Whether products with it may have addends."""
    return isinstance(_products_for(weight), CpuKernels)


def _products_for(weight: PackedWeight) -> Products:
    device, dtype = weight.data.device, weight.dtype
    own = packed_products_for(device, dtype, weight.quantization) if weight.coding is None else None
    return own or (None if weight.coding is None else coded_products_for(device, dtype)) or reference


def _check_slots(x: torch.Tensor, addends: TokenAddends) -> None:
    check_shape("slots", addends.slots, (x.shape[:-1].numel(),))
    check_dtype("slots", addends.slots, torch.int64)
    check_device("slots", addends.slots, x.device)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    pages: StatePages,
    units: StateUnits,
    *,
    activation: str | None = None,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolution of each channel over the last K tokens of its row:
    `y[t] = activation(sum over j of weight[:, j] * (x * before)[t - K + 1 + j] + bias) * after[t]`, in float32.

    The state is the last K - 1 tokens of `x * before` in float32, `StateShape.of_conv(C, K)`. A token's result has the
    same bits whatever other tokens it is computed with, here and in all operations on states.

    Args:
        x, before, after: [T, C], of one floating dtype; None is 1. Lines may lie apart.
        weight: [C, K] of the dtype of x or float32; it is read faster where `weight.t()` is contiguous.
        bias: [C], of the dtype of `weight`.
        activation: "silu", or None for the identity.

    Returns:
        [T, C] of the dtype of x.

    Raises:
        IndexError: an index of `pages` is out of range. Nothing was written.
    """
    check_shape("x", x, (None, None))
    check_dtype("x", x, FLOATING)
    check_shape("weight", weight, (x.shape[1], None))
    check_dtype("weight", weight, (x.dtype, torch.float32))
    check_device("weight", weight, x.device)
    for name, each in (("before", before), ("after", after)):
        if each is not None:
            check_shape(name, each, x.shape)
            check_same_tokens(name, each, x)
    if bias is not None:
        check_shape("bias", bias, (x.shape[1],))
        check_dtype("bias", bias, weight.dtype)
        check_device("bias", bias, x.device)
    if activation not in (None, "silu"):
        raise ValueError(f"activation is {activation!r}; expected 'silu' or None")
    check_pages(pages, units, StateShape.of_conv(*weight.shape), x)
    return _states_on(x.device).causal_conv(
        x, weight, bias, pages, units, activation=activation, before=before, after=after
    )


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
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """The recurrence of layers with a matrix S of [dk, dv] as the state of a head, token by token in float32:
    `S = decay * S`, then `S += key u^T`, and the output is `S^T query`. u is `beta * (value - S^T key)` for the delta
    rule (Gated DeltaNet, arXiv 2412.06464; Kimi Delta Attention, arXiv 2510.26692), else `beta * value` (Mamba 2, arXiv
    2405.21060: key is its B, query its C, beta its time step).

    The state is `StateShape.of_recurrence(Hv, dk, dv)`.

    Args:
        query, key: [T, Hk, dk], of the dtype of `value`. Tokens and heads may lie apart, of `value` too.
        value: [T, Hv, dv], floating; Hv is a multiple of Hk. Head h has the key head `h // (Hv // Hk)`.
        decay: [T, Hv] float32, or [T, Hv, dk] with a factor for each channel of keys.
        beta: [T, Hv] float32; None is 1.
        delta: whether u is that of the delta rule.
        unit_norm: queries and keys are first divided by their norm: `x * rsqrt(sum(x^2) + 1e-6)`.
        scale: factor on queries.
        skip: [Hv] float32: `skip * value` is added to outputs.

    Returns:
        [T, Hv, dv] of the dtype of `value`.

    Raises:
        IndexError: an index of `pages` is out of range. Nothing was written.
    """
    check_shape("value", value, (None, None, None))
    check_dtype("value", value, FLOATING)
    num_tokens, num_heads, value_dim = value.shape
    check_shape("key", key, (num_tokens, None, None))
    check_shape("query", query, key.shape)
    for name, each in (("query", query), ("key", key)):
        check_same_tokens(name, each, value)
    if key.shape[1] == 0 or num_heads % key.shape[1]:
        raise ValueError(f"value has {num_heads} heads; expected a multiple of the {key.shape[1]} of key")
    check_shape("decay", decay, (num_tokens, num_heads, key.shape[2])[: 3 if decay.dim() == 3 else 2])
    floats = [("decay", decay)]
    if beta is not None:
        check_shape("beta", beta, (num_tokens, num_heads))
        floats.append(("beta", beta))
    if skip is not None:
        check_shape("skip", skip, (num_heads,))
        floats.append(("skip", skip))
    for name, each in floats:
        check_dtype(name, each, torch.float32)
        check_device(name, each, value.device)
    check_pages(pages, units, StateShape.of_recurrence(num_heads, key.shape[2], value_dim), value)
    return _states_on(value.device).linear_recurrence(
        query, key, value, decay, beta, pages, units, delta=delta, unit_norm=unit_norm, scale=scale, skip=skip
    )


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    pages: StatePages,
    units: StateUnits,
    *,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scan of Mamba (arXiv 2312.00752), token by token in float32: each channel d has N states
    `S[n] = exp(dt[d] * a[d, n]) * S[n] + dt[d] * x[d] * b[n]`, and the output is `sum over n of S[n] * c[n]`.

    The state is `StateShape.of_scan(D, N)`.

    Args:
        x: [T, D], floating. Lines may lie apart, of dt, b and c too.
        dt: [T, D] float32, after softplus.
        a: [D, N] float32, negative.
        b, c: [T, N], of the dtype of x.
        skip: [D] float32: `skip * x` is added to outputs.

    Returns:
        [T, D] of the dtype of x.

    Raises:
        IndexError: an index of `pages` is out of range. Nothing was written.
    """
    check_shape("x", x, (None, None))
    check_dtype("x", x, FLOATING)
    num_tokens, num_channels = x.shape
    check_shape("a", a, (num_channels, None))
    check_shape("dt", dt, x.shape)
    for name, each in (("b", b), ("c", c)):
        check_shape(name, each, (num_tokens, a.shape[1]))
        check_same_tokens(name, each, x)
    floats = [("dt", dt), ("a", a)]
    if skip is not None:
        check_shape("skip", skip, (num_channels,))
        floats.append(("skip", skip))
    for name, each in floats:
        check_dtype(name, each, torch.float32)
        check_device(name, each, x.device)
    check_pages(pages, units, StateShape.of_scan(*a.shape), x)
    return _states_on(x.device).selective_scan(x, dt, a, b, c, pages, units, skip=skip)


def gates(
    a: torch.Tensor,
    b: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    dt_min: float = 0.0,
    dt_max: float = float("inf"),
    beta_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decay and beta of `linear_recurrence`, in float32.

    The time step is `softplus(a + dt_bias)`, but at least `dt_min` and at most `dt_max`; the decay is
    `exp(-exp(a_log) * step)`. Beta is `beta_scale * sigmoid(b)`; without b it is the time step, as in Mamba 2.

    Args:
        a: [T, H], or [T, H, dk] with a step for each channel of keys; floating. Lines may lie apart.
        b: [T, H] of that dtype; None only where a is [T, H].
        a_log: [H] float32.
        dt_bias: [H] or [H, dk] float32, as a has it.

    Returns:
        The decay, of the shape of a, and beta, [T, H]; both float32.
    """
    if a.dim() not in (2, 3):
        check_shape("a", a, (None, None))
    check_dtype("a", a, FLOATING)
    if b is not None:
        check_shape("b", b, a.shape[:2])
        check_same_tokens("b", b, a)
    elif a.dim() == 3:
        raise ValueError("b is None; expected a tensor, since a has a step for each channel")
    for name, each, shape in (("a_log", a_log, a.shape[1:2]), ("dt_bias", dt_bias, a.shape[1:])):
        check_shape(name, each, shape)
        check_dtype(name, each, torch.float32)
        check_device(name, each, a.device)
    return _states_on(a.device).gates(a, b, a_log, dt_bias, dt_min=dt_min, dt_max=dt_max, beta_scale=beta_scale)


def gated_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    group_size: int,
    *,
    norm_first: bool,
    activation: str = "silu",
) -> torch.Tensor:
    """RMS norm over groups of numbers, with a gate, in float32: `rms_norm(x) * weight * activation(gate)` if
    `norm_first`, else `rms_norm(x * activation(gate)) * weight`.

    Args:
        x, gate: [T, n], of one floating dtype; n is a multiple of `group_size`. Lines may lie apart.
        weight: [group_size] for all groups, or [n], of the dtype of x or float32. None: there is no norm, and the
            result is `x * activation(gate)`.
        activation: "silu" or "sigmoid".

    Returns:
        [T, n] of the dtype of x.
    """
    check_shape("x", x, (None, None))
    check_dtype("x", x, FLOATING)
    check_shape("gate", gate, x.shape)
    check_same_tokens("gate", gate, x)
    if group_size < 1 or x.shape[1] % group_size:
        raise ValueError(f"group_size is {group_size}; expected a divisor of {x.shape[1]}")
    if weight is not None:
        check_shape("weight", weight, (group_size if weight.shape[0] == group_size else x.shape[1],))
        check_dtype("weight", weight, (x.dtype, torch.float32))
        check_device("weight", weight, x.device)
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation is {activation!r}; expected 'silu' or 'sigmoid'")
    return _states_on(x.device).gated_norm(
        x, gate, weight, eps, group_size, norm_first=norm_first, activation=activation
    )


def _states_on(device: torch.device) -> StateOperations:
    implementation = implementation_for(device)
    return implementation if isinstance(implementation, CpuKernels) else reference


def can_draw(device: torch.device) -> bool:
    """Whether there is a `draw` for such a device."""
    return draws_for(device) is not None


def draw(logits: torch.Tensor, rules: DrawRules, numbers: NDArray[np.float64]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row: the inverse of the cumulative distribution of the tokens kept by `rules`, in the order of ids.

    Tokens that tie with the last one that is kept are kept too. `can_draw` is true.

    Args:
        logits: [n, vocab] float32.
        numbers: [n], from 0 to below 1: the token is the first whose cumulative probability is above it.

    Returns:
        The token ids, [n] int64, and the highest logits, [n] float32. A row with NaN or infinity has NaN; then, and
        where nothing is above -infinity, the token is 0.
    """
    if logits.dim() != 2:
        check_shape("logits", logits, (None, None))
    check_dtype("logits", logits, torch.float32)
    rules.check(len(logits))
    if numbers.shape != (len(logits),) or numbers.dtype != np.float64 or not numbers.flags.c_contiguous:
        raise ValueError(f"numbers is {numbers.dtype} {numbers.shape}; expected float64 ({len(logits)},), contiguous")
    kernels = draws_for(logits.device)
    if kernels is None:
        raise ValueError(f"logits is on {logits.device}, where no tokens are drawn")
    return kernels.draw(logits, rules, numbers)


def _with_lines(residual: torch.Tensor) -> torch.Tensor:
    """A copy unless each line is contiguous, at one distance from the next."""
    has_lines = residual.dim() == 2 and residual.stride(1) == 1
    return residual if has_lines else residual.contiguous()


def _as_lines(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values rounded to lines of the pool; all three as words that plain copies know."""
    key, value = int8.quantized_lines(key), int8.quantized_lines(value)
    return int8.as_words(key), int8.as_words(value), int8.as_words(kv_cache)
