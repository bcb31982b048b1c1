"""How a linear layer multiplies: by our own kernel where there is one, from weights that oneDNN has packed once where
that is faster, else as torch does.

docs/adr/0007 has what our own kernel, for bfloat16, was measured at beside oneDNN's. Where it is missing, packed
products of oneDNN take 0.69 to 0.76 of the time of plain ones in bfloat16. In float32 one token takes up to a tenth
longer packed, four and more take a quarter less.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import ops
from kernels.packed_weight import PackedWeight, Rounding
from worker_svc.layers.activation import Activation, ActivationKind, FusedActivation

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in] -> [..., out], bias and activation included."""

# Below this many entries a call to oneDNN costs more in float32 than it wins: it looks its kernel up anew each time.
_LEAST_PACKED_FLOAT32 = 2**18
_NOTHING_FUSED = FusedActivation("none")


@dataclass(frozen=True, slots=True)
class PlainProduct:
    """`activation(x @ weight.T + bias)`."""

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    """[out]"""
    activation: Activation | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = torch.nn.functional.linear(x, self.weight, self.bias)
        return product if self.activation is None else self.activation(product)


@dataclass(frozen=True, slots=True)
class PackedProduct:
    """The same from weights in the order in which oneDNN's kernels read them, which is all that is kept of them."""

    weight: torch.Tensor
    """[out, in], opaque."""
    bias: torch.Tensor | None
    fused: FusedActivation
    """Applied to the sums before they are rounded."""
    activation: Activation | None
    """Applied after that."""

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, kind: ActivationKind | None) -> "PackedProduct":
        """Packs the weights."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        if kind is None:
            return cls(packed, bias, _NOTHING_FUSED, None)
        return cls(packed, bias, kind.fused or _NOTHING_FUSED, None if kind.fused else kind.function)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.fused
        product = torch.ops.mkldnn._linear_pointwise.default(
            x, self.weight, self.bias, fused.name, fused.scalars, fused.algorithm
        )
        return product if self.activation is None else self.activation(product)


@dataclass(frozen=True, slots=True)
class OwnProduct:
    """The same by a kernel of ours."""

    weight: PackedWeight
    bias: torch.Tensor | None
    fused: str
    """Applied to the sums before they are rounded, a name of `ops.product`."""
    activation: Activation | None
    """Applied after that."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: ActivationKind | None,
        *,
        rounding: Rounding = Rounding.NONE,
    ) -> "OwnProduct":
        """Packs the weights."""
        if kind is not None and kind.is_gated_silu:
            return cls(ops.pack_weight(weight, gated=True, rounding=rounding), bias, "identity", None)
        packed = ops.pack_weight(weight, rounding=rounding)
        if kind is None:
            return cls(packed, bias, "identity", None)
        return cls(packed, bias, kind.own or "identity", None if kind.own else kind.function)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = ops.product(x, self.weight, self.bias, activation=self.fused)
        return product if self.activation is None else self.activation(product)


def make_product(weight: torch.Tensor, bias: torch.Tensor | None = None, kind: ActivationKind | None = None) -> Product:
    """The fastest way to `activation(x @ weight.T + bias)` for these weights.

    Args:
        weight: [out, in]; a plain product keeps it, a packed one does not.
        bias: [out].
        kind: of the activation; a gated one halves the outputs, none is the identity.
    """
    if weight.numel() and ops.has_packed_products(weight.device, weight.dtype):
        return OwnProduct.of(weight, bias, kind)
    if pays_to_pack(weight):
        return PackedProduct.of(weight, bias, kind)
    return PlainProduct(weight, bias, None if kind is None else kind.function)


def pays_to_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN is there for weights on this device, of this dtype and size."""
    if weight.device.type != "cpu" or not weight.numel() or not _has_packed_products():
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _LEAST_PACKED_FLOAT32
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _has_packed_products() -> bool:
    """These operations are what torch's own compiler calls; a build of torch may lack them."""
    names = (
        "_reorder_linear_weight",
        "_linear_pointwise",
        "_is_mkldnn_bf16_supported",
        "_is_mkldnn_fp16_supported",
    )
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)
