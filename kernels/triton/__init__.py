"""The operations as Triton kernels, for tensors on a CUDA device; `kernels.ops` documents and checks the arguments.

A file holds `_x_kernel` and the `x()` that launches it; what both attention kernels are made of is in `paged_tiles`,
`scores` and `softmax`. Triton itself comes with torch for CUDA; nothing else of this package imports it, so that a
machine without a GPU needs no Triton. Kernels are launched on torch's current device, which must be that of the
tensors, and never wait for it. Sampling has no kernel: it is torch on every device.

What changes from step to step (rows, tokens, lengths, strides of block tables) is an argument that Triton must not
specialize on, so that serving compiles nothing once each kernel has run. What belongs to the model is a constant.
"""
