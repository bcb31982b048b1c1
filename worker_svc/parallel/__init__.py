"""Tensor parallelism: how ranks meet, and what they exchange tensors by."""
