"""Tensor parallelism: the rendezvous of ranks, and the exchange of tensors."""
