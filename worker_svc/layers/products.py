"""Products of inputs with a weight, in the form that is fastest for its dtype, coding, size and device.

A weight is multiplied by our own kernel if there is one, else by oneDNN from weights packed once if that is faster,
else as torch does. ADR 0007 compares our own kernel, for bfloat16, with oneDNN. Without our kernel, packed products of
oneDNN take 0.69 to 0.76 of the time of plain ones in bfloat16; in float32 one token takes up to a tenth longer packed,
four and more take a quarter less.

Int8 weights: linear layers round their weights when they are loaded, with one scale for each output. The embedding,
norms, biases and the output layer keep the model's dtype: errors of the output layer would go straight to the logits,
and an embedding is looked up by rows, so that its size costs no time. If our own kernel is missing, torch multiplies
them, converted to the model's dtype.

Weights that a file has in codes stay as they are where our own kernel multiplies them (ADR 0053).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.cpu.low_rank import TokenAddends
from quire_kernels.int8 import quantize
from quire_kernels.packed_weight import CodedWeight, PackedWeight, Quantization
from worker_svc.layers.activations import Activation, ActivationKind, FusedActivation
from worker_svc.weights import Placement

Product = Callable[[torch.Tensor], torch.Tensor]
"""x [..., in] -> [..., out], bias and activation included."""


# In float32 a call to oneDNN costs more than it saves below this many entries: it looks its kernel up at each call.
_MIN_PACKED_FLOAT32 = 2**18


_NOTHING_FUSED = FusedActivation("none")


def make_product(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kind: ActivationKind | None = None,
    quantization: Quantization = Quantization.NONE,
) -> Product:
    """The fastest way to `activation(x @ weight.T + bias)` for these weights.

    Args:
        weight: [out, in]; a plain product keeps it, all others do not.
        bias: [out].
        kind: of the activation; a gated one halves the outputs, None is the identity.
        quantization: how the weights are rounded first.
    """
    quantization = quantization if weight.numel() else Quantization.NONE
    if weight.numel() and ops.has_packed_products(weight.device, weight.dtype, quantization):
        return OwnProduct.of(weight, bias, kind, quantization=quantization)
    function = None if kind is None else kind.function
    if quantization is not Quantization.NONE:
        return WeightOnlyProduct.of(weight, bias, function)
    if pays_to_pack(weight):
        return PackedProduct.of(weight, bias, kind)
    return PlainProduct(weight, bias, function)


def make_coded_product(
    weights: Sequence[CodedWeight],
    bias: torch.Tensor | None,
    kind: ActivationKind | None,
    placement: Placement,
) -> Product:
    """The same for weights as the file has them, whose outputs follow each other; with an activation there is only
    one."""
    pack = partial(ops.pack_coded, dtype=placement.dtype, quantization=placement.quantization)
    if len(weights) == 1:
        return OwnProduct.packed_by(partial(pack, weights[0]), bias, kind)
    return CodedProduct(tuple(map(pack, weights)), bias)


def with_float32_outputs(product: Product) -> Product:
    """The same, whose sums, which are float32, are not rounded; products of torch's round them all the same."""
    return replace(product, output_dtype=torch.float32) if isinstance(product, OwnProduct) else product


def pays_to_pack(weight: torch.Tensor) -> bool:
    """Whether oneDNN is faster for weights on this device, of this dtype and size."""
    if weight.device.type != "cpu" or not weight.numel() or not _has_packed_products():
        return False
    if weight.dtype == torch.float32:
        return weight.numel() >= _MIN_PACKED_FLOAT32
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def _has_packed_products() -> bool:
    """torch's own compiler calls these operations; a build of torch may lack them."""
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported")
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)


def check_quantization(quantization: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """ConfigurationError for a quantization that this device does not have for models of this dtype."""
    if quantization is not Quantization.INT8_DYNAMIC:
        return
    if device.type != "cpu":
        raise ConfigurationError(
            f"--quantization is int8-dynamic, which is for cpu, and the device is {device.type}; "
            "use int8-weight-only or none"
        )
    if not ops.has_packed_products(device, dtype, Quantization.INT8_DYNAMIC):
        raise ConfigurationError(
            "--quantization is int8-dynamic, which needs the CPU library, and that was not built (it takes a C++ "
            "compiler at installation); use int8-weight-only or none"
        )


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
    """The same from weights in the order in which oneDNN's kernels read them. Only these are kept."""

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
    """The same by a kernel of ours, with weights that may be int8."""

    weight: PackedWeight
    bias: torch.Tensor | None
    fused: str
    """Applied to the sums before they are rounded, a name of `ops.product`."""
    activation: Activation | None
    """Applied after that."""
    output_dtype: torch.dtype | None = None
    """Dtype of the sums; None for the dtype of x."""

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        kind: ActivationKind | None,
        *,
        quantization: Quantization = Quantization.NONE,
    ) -> "OwnProduct":
        """Packs the weights."""
        return cls.packed_by(partial(ops.pack_weight, weight, quantization=quantization), bias, kind)

    @classmethod
    def packed_by(
        cls, pack: Callable[..., PackedWeight], bias: torch.Tensor | None, kind: ActivationKind | None
    ) -> "OwnProduct":
        """The same with weights that `pack(gated=...)` packs."""
        if kind is not None and kind.gated and kind.own:
            return cls(pack(gated=True), bias, kind.own, None)
        packed = pack(gated=False)
        if kind is None:
            return cls(packed, bias, "identity", None)
        return cls(packed, bias, kind.own or "identity", None if kind.own else kind.function)

    @property
    def packed(self) -> tuple[PackedWeight, ...]:
        return (self.weight,)

    def __call__(self, x: torch.Tensor, addends: TokenAddends | None = None) -> torch.Tensor:
        product = ops.product(
            x, self.weight, self.bias, activation=self.fused, output_dtype=self.output_dtype, addends=addends
        )
        return product if self.activation is None else self.activation(product)


@dataclass(frozen=True, slots=True)
class CodedProduct:
    """`x @ weight.T + bias` with several weights as the file has them, whose outputs follow each other."""

    packed: tuple[PackedWeight, ...]
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor, addends: TokenAddends | None = None) -> torch.Tensor:
        return ops.products(x, self.packed, self.bias, addends=addends)


@dataclass(frozen=True, slots=True)
class WeightOnlyProduct:
    """`activation(x @ (values * scales).T + bias)`, by torch."""

    values: torch.Tensor
    """[out, in] int8."""
    scales: torch.Tensor
    """[out], of the model's dtype."""
    bias: torch.Tensor | None
    """[out]"""
    activation: Activation | None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None, activation: Activation | None) -> "WeightOnlyProduct":
        """Rounds the weights."""
        rounded = quantize(weight, weight.dtype)
        return cls(rounded.values, rounded.scales.squeeze(-1), bias, activation)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # int8 values are exact in bfloat16 and float16. Their sums may overflow float16, so it is scaled first.
        weight = self.values.to(x.dtype)
        if x.dtype == torch.float16:
            product = torch.nn.functional.linear(x, weight.mul_(self.scales.unsqueeze(1)))
        else:
            product = torch.nn.functional.linear(x, weight).mul_(self.scales)
        if self.bias is not None:
            product = product.add_(self.bias)
        return product if self.activation is None else self.activation(product)


def without_activation(product: Product) -> Product:
    """The same product, for a caller that applies the activation itself."""
    match product:
        case PackedProduct():
            return replace(product, fused=_NOTHING_FUSED, activation=None)
        case PlainProduct() | WeightOnlyProduct():
            return replace(product, activation=None)
        case OwnProduct():
            # A coded weight on a GPU, whose gates are stored like its other outputs.
            return replace(product, weight=replace(product.weight, gated=False), fused="identity", activation=None)
        case _:
            return product
