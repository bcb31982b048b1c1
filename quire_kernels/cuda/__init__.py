"""The operations as Triton kernels, for tensors on a CUDA device; `quire_kernels.ops` documents and checks arguments.

The names are the same as in `quire_kernels.reference`. Triton comes with torch for CUDA; nothing outside this package
imports it, so that a machine without a GPU needs no Triton. Kernels are launched on torch's current device, which must
be the tensors' device, and never wait for it. Sampling has no kernel: it uses torch on every device.

Values that change from step to step (rows, tokens, lengths, strides of block tables) are arguments that Triton must not
specialize on, so that serving compiles nothing once each kernel has run. Values of the model are constants.
"""

# ruff: noqa: F401  (the operations)

from quire_kernels.cuda.attention import paged_attention
from quire_kernels.cuda.blocks import copy_blocks, reshape_and_cache, rotary_and_cache, swap_blocks
from quire_kernels.cuda.pointwise import layer_norm, rms_norm, rotary, silu_and_mul
