"""How a linear layer multiplies with int8 weights: in bfloat16 on the CPU by our own kernels (ADR 0007), else by torch.

Of what torch has, measured on two cores with AVX-512 and AMX, 768 x 3072, weights from memory, ms for 1, 4, 16, 64 and
256 tokens:

    bfloat16, packed       0.38  0.34  0.36  0.48   0.91
    int8, as they are      0.31  0.33  0.91  3.03  11.23
    int8, made bfloat16    0.85  0.78  0.78  1.03   1.85
    int8 by int8           0.29  0.23  0.29  0.55   1.47

So few tokens take the weights as they are, and more of them make them floating first.
"""

from dataclasses import dataclass

import torch

from kernels import ops
from kernels.int8 import quantize
from kernels.packed_weight import Rounding
from worker_svc.layers.activation import Activation, ActivationKind
from worker_svc.layers.product import OwnProduct, Product, make_product
from worker_svc.layers.quantization import Quantization

_ROUNDING = {
    Quantization.INT8_WEIGHT_ONLY: Rounding.WEIGHT,
    Quantization.INT8_DYNAMIC: Rounding.WEIGHT_AND_INPUT,
}
_MOST_TOKENS_AS_THEY_ARE = 8
# torch's kernel reads its inputs in vectors of this many and does not look whether there are so many.
_INPUT_STEP = 16


@dataclass(frozen=True, slots=True)
class WeightOnlyProduct:
    """`activation(x @ (codes * scales).T + bias)`."""

    codes: torch.Tensor
    """[out, in] int8."""
    scales: torch.Tensor
    """[out], of the model's dtype."""
    bias: torch.Tensor | None
    """[out]"""
    activation: Activation | None
    takes_codes: bool
    """Whether there is a kernel that reads codes."""

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> "WeightOnlyProduct":
        """Rounds the weights."""
        lines = quantize(weight, weight.dtype)
        takes_codes = weight.device.type == "cpu" and weight.shape[1] > 0 and weight.shape[1] % _INPUT_STEP == 0
        return cls(lines.values, lines.scales.squeeze(-1), bias, activation, takes_codes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        if self.takes_codes and 0 < tokens.shape[0] <= _MOST_TOKENS_AS_THEY_ARE:
            product = torch.ops.aten._weight_int8pack_mm(tokens.contiguous(), self.codes, self.scales)
        else:
            # Codes are exact in bfloat16 and float16. Sums of them may leave float16, so there the scales come first.
            weight = self.codes.to(x.dtype)
            if x.dtype == torch.float16:
                product = torch.nn.functional.linear(tokens, weight.mul_(self.scales.unsqueeze(1)))
            else:
                product = torch.nn.functional.linear(tokens, weight).mul_(self.scales)
        return _finish(product, x, self.bias, self.activation)


@dataclass(frozen=True, slots=True)
class DynamicProduct:
    """The same with inputs rounded to int8, one scale a token."""

    codes: torch.Tensor
    """[out, in] int8, in the order in which oneDNN reads it."""
    scales: torch.Tensor
    """[out] float32"""
    no_offsets: torch.Tensor
    """[out] int32 zeros."""
    bias: torch.Tensor | None
    activation: Activation | None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> "DynamicProduct":
        """Rounds the weights and packs them."""
        lines = quantize(weight)
        packed = torch.ops.onednn.qlinear_prepack(lines.values, None)
        scales = lines.scales.squeeze(-1)
        return cls(packed, scales, torch.zeros_like(scales, dtype=torch.int32), bias, activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens = quantize(x.reshape(-1, x.shape[-1]))
        product = torch.ops.onednn.qlinear_pointwise.default(
            tokens.values, 1.0, 0, self.codes, self.scales, self.no_offsets, None, 1.0, 0, torch.float32, "none", [], ""
        )
        # A token that is not finite has codes of 0 and a scale that keeps its products from being finite.
        return _finish(product.mul_(tokens.scales).to(x.dtype), x, self.bias, self.activation)


def make_linear_product(
    weight: torch.Tensor, bias: torch.Tensor | None, kind: ActivationKind | None, quantization: Quantization
) -> Product:
    """`make_product` of weights [out, in] that are rounded as `quantization` says; they are not kept."""
    if quantization is Quantization.NONE or not weight.numel():
        return make_product(weight, bias, kind)
    rounding = _ROUNDING[quantization]
    if ops.has_packed_products(weight.device, weight.dtype, rounding):
        return OwnProduct.of(weight, bias, kind, rounding=rounding)
    product = DynamicProduct if quantization is Quantization.INT8_DYNAMIC else WeightOnlyProduct
    return product.of(weight, bias, None if kind is None else kind.function)


def _finish(
    product: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None
) -> torch.Tensor:
    """Bias and activation of a product [tokens, out] of x [..., in]; returns [..., out]."""
    if bias is not None:
        product = product.add_(bias)
    if activation is not None:
        product = activation(product)
    return product.view(*x.shape[:-1], product.shape[-1])
