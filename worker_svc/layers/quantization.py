"""Int8 weights: which layers have them, and where.

Linear layers do, rounded when they are loaded, with one scale for each output. The embedding, norms, biases and
the output layer keep the model's dtype: errors of the output layer would go straight to the logits, and an embedding is
looked up by lines, so that its size costs no time.
"""

from enum import Enum

import torch

from kernels import ops
from kernels.packed_weight import Rounding
from quire.settings import ConfigurationError


class Quantization(Enum):
    """What linear layers multiply. The values are those of `--quantization`."""

    NONE = "none"
    INT8_WEIGHT_ONLY = "int8-weight-only"
    """Int8 weights, one scale an output; what they are multiplied with keeps the model's dtype."""
    INT8_DYNAMIC = "int8-dynamic"
    """The same weights, and inputs rounded to int8 with one scale a token; sums are exact integers."""


def check_quantization(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigurationError for a quantization that this device does not have for models of this dtype."""
    if quantization is not Quantization.INT8_DYNAMIC:
        return
    if device.type != "cpu":
        raise ConfigurationError(
            f"--quantization is int8-dynamic, which is for cpu, and the device is {device.type}; "
            "use int8-weight-only or none"
        )
    if not ops.has_packed_products(device, dtype, Rounding.WEIGHT_AND_INPUT) and not has_int8_products():
        raise ConfigurationError(
            "--quantization is int8-dynamic, which needs oneDNN, and this build of torch has none; "
            "use int8-weight-only or none"
        )


def has_int8_products() -> bool:
    """Whether torch has oneDNN's products of int8."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.onednn, name) for name in ("qlinear_prepack", "qlinear_pointwise")
    )
