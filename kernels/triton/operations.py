"""All operations that have a kernel, under the names of `kernels.reference`."""

from kernels.triton.activation import silu_and_mul
from kernels.triton.block_copies import copy_blocks, swap_blocks
from kernels.triton.norms import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.triton.paged_attention import paged_attention
from kernels.triton.reshape_and_cache import reshape_and_cache
from kernels.triton.rotary import rotary, rotary_and_cache

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "copy_blocks",
    "layer_norm",
    "paged_attention",
    "reshape_and_cache",
    "rms_norm",
    "rotary",
    "rotary_and_cache",
    "silu_and_mul",
    "swap_blocks",
]
