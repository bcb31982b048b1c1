"""Calls the CPU library's attention within texts."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from quire_kernels.cpu.library import DTYPES, Operation, Operations, TextAttentionArgs, TextHeads
from quire_kernels.cpu.packing import Empty, address, contiguous, dense


class TextKernels:
    """The operation on texts that lie one after the other."""

    def __init__(self, library: Operations, make_empty: Empty) -> None:
        self._library = library
        self._empty = make_empty

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: Sequence[int] | NDArray[np.int32],
        *,
        scale: float,
        window: int | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `worker_svc.encoders.attention.attend`, for tensors of one dtype that this library has. A
        recording reads lengths from the array that it was recorded with."""
        num_tokens, num_heads, head_dim = query.shape
        query, key, value, bias = dense(query), dense(key), dense(value), contiguous(bias)
        output, of_texts = self._empty(query.shape, query.dtype), np.asarray(lengths, np.int32)
        arguments = TextAttentionArgs(
            output=output.data_ptr(),
            **{name: _text_heads(x) for name, x in (("query", query), ("key", key), ("value", value))},
            lengths=of_texts.ctypes.data,
            bias=address(bias),
            dtype=DTYPES[query.dtype],
            num_tokens=num_tokens,
            num_texts=len(of_texts),
            num_heads=num_heads,
            num_kv_heads=key.shape[1],
            head_dim=head_dim,
            bias_stride=0 if bias is None else bias.shape[1],
            window=num_tokens if window is None else window,
            scale=scale,
        )
        self._library.call(Operation.TEXT_ATTENTION, arguments)
        return output


def _text_heads(x: torch.Tensor) -> TextHeads:
    token_stride, head_stride, _ = x.stride()
    return TextHeads(at=x.data_ptr(), token_stride=token_stride, head_stride=head_stride)
