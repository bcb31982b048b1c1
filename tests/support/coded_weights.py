"""Weights as GGUF files store them, of any codes and scales: the package `gguf` reads more kinds than it writes."""

import gguf
import numpy as np
import torch

from kernels.packed_weight import CodedWeight, Coding

# Where groups have their float16 numbers.
_FLOAT16_AT = {
    Coding.Q4_K: (0, 2),
    Coding.Q5_K: (0, 2),
    Coding.Q6_K: (208,),
    Coding.Q8_0: (0,),
    Coding.Q4_0: (0,),
    Coding.Q4_1: (0, 2),
    Coding.Q5_0: (0,),
    Coding.Q5_1: (0, 2),
    Coding.IQ4_XS: (0,),
    Coding.IQ4_NL: (0,),
}
_LARGEST = {
    Coding.Q4_K: 15 * 63,
    Coding.Q5_K: 31 * 63,
    Coding.Q6_K: 32 * 127,
    Coding.Q8_0: 127,
    Coding.Q4_0: 8,
    Coding.Q4_1: 15,
    Coding.Q5_0: 16,
    Coding.Q5_1: 31,
    Coding.IQ4_NL: 127,
    Coding.IQ4_XS: 127 * 32,
}
"""What a number may be, in scales of its group."""


def make_coded(coding: Coding, out_features: int, num_groups: int, seed: int = 0) -> CodedWeight:
    """Any bytes, with scales of groups of either sign that make numbers of about 0.1 at most."""
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, 256, (out_features, num_groups, coding.group[1]), dtype=np.uint8)
    for at in _FLOAT16_AT[coding]:
        numbers = (generator.normal(0, 0.05, groups.shape[:2]) / _LARGEST[coding]).astype("<f2")
        groups[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return CodedWeight(coding, torch.from_numpy(groups.reshape(out_features, -1)))


def dequantized(weight: CodedWeight) -> torch.Tensor:
    """[out, in] float32, by the package."""
    return torch.from_numpy(gguf.dequantize(weight.rows.numpy(), gguf.GGMLQuantizationType[weight.coding.value]))
