"""Paged attention: decodes and prefill chunks of one flat batch, each by its own kernel."""

import torch

from kernels.reference_attention import ScoreRule
from kernels.triton.decode_attention import decode_attention
from kernels.triton.kv_split import DecodeTiling
from kernels.triton.paged_batch import PagedBatch
from kernels.triton.prefill_attention import PrefillTiling, prefill_attention
from kernels.triton.reshape_and_cache import with_contiguous_heads

LARGEST_HEAD = 256


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
    """`kernels.ops.paged_attention`. Each kernel passes over the rows of the other: no length is read on the host.

    Raises:
        ValueError: a head size of more than 256, whose tiles do not fit into a multiprocessor; a scale that is not
            positive, with which the best of all products would not be the best of all scores.
    """
    if not scores.scale > 0:
        raise ValueError(f"scale is {scores.scale}; the GPU kernels take more than 0 only")
    if kv_cache.shape[4] > LARGEST_HEAD:
        raise ValueError(f"kv_cache has head size {kv_cache.shape[4]}; the GPU kernels take at most {LARGEST_HEAD}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not query.numel():
        return output
    indexes = (block_tables.contiguous(), query_start_loc.contiguous(), seq_lens.contiguous())
    batch = PagedBatch(with_contiguous_heads(query), kv_cache, *indexes)
    head_dim, dtype = kv_cache.shape[4], kv_cache.dtype
    # `max_query_len` may be more than any row has, but a row alone has all tokens.
    num_tokens = query.shape[0]
    if max_query_len > 1 and num_tokens > 1:
        prefill_attention(output, batch, scores, tiling=prefill_tiling(head_dim, dtype))
    if num_tokens == 1 or batch.num_rows > 1:
        decode_attention(output, batch, scores, max_seq_len=max_seq_len, tiling=decode_tiling(head_dim, dtype))
    return output


def decode_tiling(head_dim: int, dtype: torch.dtype) -> DecodeTiling:
    """Tiles of bounded size in bytes, since those of all stages share a multiprocessor's memory."""
    vector_bytes = head_dim * dtype.itemsize
    if vector_bytes > 512:
        return DecodeTiling(tile=32, num_warps=8)
    return DecodeTiling(tile=32) if vector_bytes > 256 else DecodeTiling()


def prefill_tiling(head_dim: int, dtype: torch.dtype) -> PrefillTiling:
    """As large as the registers and the memory of a multiprocessor of an H100 or H200 hold, two tiles in flight."""
    if dtype != torch.float32:
        return PrefillTiling() if head_dim <= 128 else PrefillTiling(tile=32)
    if head_dim <= 128:
        return PrefillTiling(query_tile=32, tile=32, num_warps=4, num_stages=2)
    return PrefillTiling(query_tile=16, tile=32, num_warps=8, num_stages=2)
