"""Linear layers: how weights are merged and split over ranks (as in Megatron-LM), and how they are multiplied.

A layer multiplies with our own kernel if there is one, else from weights that oneDNN has packed once if that is faster,
else as torch does. ADR 0007 compares our own kernel, for bfloat16, with oneDNN. Without our kernel, packed products of
oneDNN take 0.69 to 0.76 of the time of plain ones in bfloat16; in float32 one token takes up to a tenth longer packed,
four and more take a quarter less.

Int8 weights: linear layers round their weights when they are loaded, with one scale for each output. The embedding,
norms, biases and the output layer keep the model's dtype: errors of the output layer would go straight to the logits,
and an embedding is looked up by rows, so that its size costs no time. If our own kernel is missing, torch multiplies
them, converted to the model's dtype.

Weights that a file has in codes stay as they are where our own kernel multiplies them (ADR 0053).

Adapters add to the sums before the activation, so that tokens without one keep their bits (ADR 0054).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch.nn import functional

from kernels import ops
from kernels.cpu.low_rank import PackedTable, TokenAddends
from kernels.int8 import quantize
from kernels.low_rank import LowRank, LowRankTable, MaskedTable
from kernels.packed_weight import GATES, CodedWeight, PackedWeight, Quantization
from quire.runtime.settings import ConfigurationError
from worker_svc.parallel.ranks import Shard
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec

Activation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class FusedActivation:
    """An activation as `torch.ops.mkldnn._linear_pointwise` names it."""

    name: str
    algorithm: str = ""
    scalars: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Function:
    """An activation function, and the names by which a product can apply it to its sums; None if it cannot.

    oneDNN's relu turns NaN into 0, which would hide a poisoned row, so it is not used.
    """

    function: Activation
    fused: FusedActivation | None = None
    own: str | None = None
    """The name in `ops.product`."""


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


_GELU = _Function(functional.gelu, FusedActivation("gelu", "none"))
_GELU_TANH = _Function(partial(functional.gelu, approximate="tanh"), FusedActivation("gelu", "tanh"), "gelu_tanh")
_SILU = _Function(functional.silu, FusedActivation("swish"), "silu")

ACTIVATIONS: dict[str, _Function] = {
    "gelu": _GELU,
    "gelu_fast": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_python": _GELU,
    "gelu_pytorch_tanh": _GELU_TANH,
    "quick_gelu": _Function(_quick_gelu),
    "relu": _Function(functional.relu, own="relu"),
    "relu2": _Function(_relu_squared),
    "relu6": _Function(functional.relu6),
    "sigmoid": _Function(torch.sigmoid, FusedActivation("sigmoid")),
    "silu": _SILU,
    "swish": _SILU,
    "tanh": _Function(torch.tanh, FusedActivation("tanh")),
}
"""Activations by the names that model configurations use."""


@dataclass(frozen=True, slots=True)
class ActivationKind:
    """The activation that a linear layer applies to its outputs. ConfigurationError for an unknown name.

    Attributes:
        name: of `ACTIVATIONS`.
        gated: it is `act(gate) * up`, with the gates in the first half of the outputs and the ups in the second.
    """

    name: str
    gated: bool = False

    def __post_init__(self) -> None:
        if self.name not in ACTIVATIONS:
            raise ConfigurationError(
                f"config.json: activation {self.name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )

    @property
    def is_gated_silu(self) -> bool:
        """Whether it is the function of `ops.silu_and_mul`."""
        return self.gated and ACTIVATIONS[self.name] is _SILU

    @property
    def function(self) -> Activation:
        if self.is_gated_silu:
            return ops.silu_and_mul
        function = ACTIVATIONS[self.name].function
        return partial(_gate_and_mul, function) if self.gated else function

    @property
    def fused(self) -> FusedActivation | None:
        """The same function if oneDNN can apply it to a product; None if it cannot."""
        return None if self.gated else ACTIVATIONS[self.name].fused

    @property
    def own(self) -> str | None:
        """The same function if `ops.product` can apply it, to the gates if it is gated; None if it cannot."""
        own = ACTIVATIONS[self.name].own
        return None if self.gated and own not in GATES else own


def _gate_and_mul(function: Activation, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up


class Split(Enum):
    """The part of a layer that each rank holds."""

    WHOLE = auto()
    OUTPUTS = auto()
    """Some of the outputs. A layer that is split by inputs takes them as they are."""
    INPUTS = auto()
    """The weights of some inputs. The layer's output is the sum over the ranks."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A linear layer of the checkpoint, by the name of its module.

    Attributes:
        segments: equal runs of outputs that are split separately, as GPT-2's query, key and value in one layer.
        num_shards: number of parts of the outputs, if it is smaller than the number of ranks.
        first: outputs of the checkpoint's layer before these.
        of: outputs of the checkpoint's layer; None if these are all.
        apart: Name of a separate layer with only these outputs, which adapters may have been trained on.
        rotated: the head size, and the number of dimensions of each head that a rotation turns, i with i + rotated / 2,
            if it does not turn all. Outputs are put so that these are i and i + head size / 2, as in `ops.rotary`.
    """

    name: str
    out_features: int
    segments: int = 1
    num_shards: int | None = None
    first: int = 0
    of: int | None = None
    rotated: tuple[int, int] | None = None
    apart: str | None = None


class TokenSlots:
    """The slot of each token's adapter in the pass of a model that runs, which its linear layers read."""

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None
        """[T] int64, slots from 1 on, and 0 for tokens without an adapter; None if there are no others."""

    @contextmanager
    def used(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Within it, layers take the adapters of these slots."""
        self.current = slots
        try:
            yield
        finally:
            self.current = None


class Linear(Loadable):
    """`activation(x @ weight.T + bias)` for one or more linear layers of the checkpoint that share their input.

    Several parts (query, key and value; gate and up) are merged into one matrix when they are loaded, outputs one after
    the other.

    Args:
        in_features: of the whole layer.
        split: the part of each rank.
        input_major: the checkpoint stores [in, out], as GPT-2's Conv1D does, and not [out, in].
        activation: None is the identity.
        keeps_weights: weights that are not coded are multiplied as they are, even with a quantization.
        float32_outputs: sums stay float32 if our own kernel has them; else they have the dtype of the inputs.
    """

    def __init__(
        self,
        parts: Sequence[LinearPart],
        in_features: int,
        *,
        bias: bool,
        placement: Placement,
        split: Split = Split.WHOLE,
        input_major: bool = False,
        activation: ActivationKind | None = None,
        keeps_weights: bool = False,
        float32_outputs: bool = False,
    ) -> None:
        super().__init__()
        self._keeps_weights = keeps_weights
        self._float32_outputs = float32_outputs
        self._parts = tuple(parts)
        self._in_features = in_features
        self._has_bias = bias
        self._placement = placement
        self._split = split
        self._input_major = input_major
        self._activation = activation
        self._product: Product
        self._adapted: AdaptedProduct | None = None
        self._token_slots = TokenSlots()

    def tensors(self) -> Iterator[TensorSpec]:
        for part in self._parts:
            yield self._weight_spec(part)
            if self._has_bias:
                yield self._bias_spec(part)

    def load(self, tensors: TensorReader) -> None:
        shards = [(part, shard) for part in self._parts for shard in self._outputs_of_rank(part)]
        is_split_by_inputs, ranks = self._split is Split.INPUTS, self._placement.ranks
        inputs = self._inputs_of_rank()
        # Only one of several partial sums has the bias.
        adds_bias = self._has_bias and (not is_split_by_inputs or ranks.rank == 0)
        bias = self._placement.empty(sum(shard.size for _, shard in shards)) if adds_bias else None
        coded = self._coded(tensors, shards, inputs)
        weight = self._placement.empty(sum(shard.size for _, shard in shards), inputs.size) if coded is None else None
        start = 0
        for name, group in groupby(shards, key=lambda each: each[0].name):
            part = next(part for part in self._parts if part.name == name)
            stored = None if weight is None else tensors.read(self._weight_spec(part))
            stored = stored.t() if stored is not None and self._input_major else stored
            stored_bias = tensors.read(self._bias_spec(part)) if self._has_bias else None
            for _, shard in group:
                end = start + shard.size
                if weight is not None and stored is not None:
                    weight[start:end] = stored[shard.slice, inputs.slice]
                if bias is not None and stored_bias is not None:
                    bias[start:end] = stored_bias[shard.slice]
                start = end
        if coded is not None:
            self._product = make_coded_product(coded, bias, self._activation, self._placement)
        elif weight is not None:
            self.install(weight, bias)
        if self._float32_outputs:
            self._product = with_float32_outputs(self._product)

    def _coded(
        self, tensors: TensorReader, shards: Sequence[tuple[LinearPart, Shard]], inputs: Shard
    ) -> list[CodedWeight] | None:
        """The weights as the file has them, joined where neighbours are of one kind; None if they cannot be multiplied
        so, and are to be dequantized."""
        placement = self._placement
        if not inputs.size or self._input_major:
            return None
        if not ops.has_coded_products(placement.device, placement.dtype, placement.quantization):
            return None
        found: list[CodedWeight] = []
        for part, group in groupby(shards, key=itemgetter(0)):
            stored = tensors.coded(self._weight_spec(part))
            for _, shard in group:
                weight = None if stored is None else stored.part(shard.slice, inputs.slice)
                if weight is None:
                    return None
                if weight.rows.shape[0]:
                    found.append(weight.to(placement.device))
        joined = [CodedWeight.joined(list(group)) for _, group in groupby(found, key=attrgetter("kind"))]
        return joined if len(joined) == 1 or (joined and self._activation is None) else None

    def install(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Takes merged weights, [out, in] and [out]."""
        quantization = Quantization.NONE if self._keeps_weights else self._placement.quantization
        self._product = make_product(weight, bias, self._activation, quantization)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], each of this rank's part if the layer is split by it."""
        product = self.partial(x)
        return self._placement.ranks.sum(product) if self._split is Split.INPUTS else product

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """The same, for a layer that is split by inputs, without the partial sums of other ranks."""
        slots = self._token_slots.current
        return self._product(x) if slots is None or self._adapted is None else self._adapted(x, slots)

    def accept_adapters(self, token_slots: TokenSlots, num_slots: int, max_rank: int) -> None:
        """Makes room for adapters of at most this rank, when weights are loaded."""
        self._token_slots = token_slots
        inputs = self._inputs_of_rank()
        widths = [sum(shard.size for shard in self._outputs_of_rank(part)) for part in self._parts]
        product = self._product
        if isinstance(product, OwnProduct | CodedProduct) and all(map(ops.takes_addends, product.packed)):
            table = PackedTable(product.packed, widths, num_slots, max_rank)
            self._adapted = PackedAdapted(product, table)
        else:
            table = MaskedTable(inputs.size, widths, num_slots, max_rank, like=self._placement.empty(0))
            # The same products with and without adapters: none has the activation fused.
            function = None if self._activation is None else self._activation.function
            self._product = self._adapted = MaskedAdapted(_without_activation(product), table, function)

    @property
    def adapted_modules(self) -> tuple[dict[str, tuple[int, int, int]], ...]:
        """For each part, the layers that it is (a part) of, by name: the inputs and outputs of the layer, and the
        outputs of the checkpoint's layer before them."""
        return tuple(
            {part.name: (self._in_features, part.of or part.out_features, 0)}
            | ({} if part.apart is None else {part.apart: (self._in_features, part.out_features, part.first)})
            for part in self._parts
        )

    @property
    def adapters(self) -> LowRankTable[Any]:
        """Where the slots of adapters are; `accept_adapters` has made it."""
        assert self._adapted is not None
        return self._adapted.table

    def of_rank(self, parts: Sequence[LowRank | None]) -> list[LowRank | None]:
        """This rank's share of the adapter of each part: the outputs of B, or the inputs of A, since the products with
        A are summed over the ranks before the products with B."""
        inputs, found = self._inputs_of_rank(), list[LowRank | None]()
        for part, each in zip(self._parts, parts, strict=True):
            if each is None:
                found.append(None)
                continue
            b = torch.cat([each.b[shard.slice] for shard in self._outputs_of_rank(part)])
            found.append(LowRank(each.a[:, inputs.slice], b, each.scale))
        return found

    def _inputs_of_rank(self) -> Shard:
        is_split = self._split is Split.INPUTS
        return self._placement.ranks.shard(self._in_features) if is_split else Shard(0, self._in_features)

    def _outputs_of_rank(self, part: LinearPart) -> Iterator[Shard]:
        if self._split is not Split.OUTPUTS:
            yield Shard(part.first, part.first + part.out_features)
            return
        width = part.out_features // part.segments
        shard = self._placement.ranks.shard(width, part.num_shards)
        for segment in range(part.segments):
            start = part.first + segment * width
            outputs = Shard(start + shard.start, start + shard.end)
            yield from (outputs,) if part.rotated is None else _runs_of_heads(outputs, *part.rotated)

    def _weight_spec(self, part: LinearPart) -> TensorSpec:
        shape = (part.of or part.out_features, self._in_features)
        return TensorSpec(f"{part.name}.weight", shape[::-1] if self._input_major else shape)

    def _bias_spec(self, part: LinearPart) -> TensorSpec:
        return TensorSpec(f"{part.name}.bias", (part.of or part.out_features,))


def _runs_of_heads(outputs: Shard, head_dim: int, rotated: int) -> Iterator[Shard]:
    """The first halves of each head's rotated and other outputs, then the second halves."""
    turned, rest = rotated // 2, (head_dim - rotated) // 2
    for head in range(outputs.start, outputs.end, head_dim):
        for start, size in ((0, turned), (rotated, rest), (turned, turned), (rotated + rest, rest)):
            yield Shard(head + start, head + start + size)


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


@dataclass(frozen=True, slots=True)
class PackedAdapted:
    """A product of our own kernel with the adapters of its tokens."""

    product: OwnProduct | CodedProduct
    table: PackedTable

    def __call__(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self.product(x, TokenAddends(self.table, slots))


@dataclass(frozen=True, slots=True)
class MaskedAdapted:
    """The same by torch."""

    product: Product
    """Without activation."""
    table: MaskedTable
    activation: Activation | None

    def __call__(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        product = self.product(x)
        if slots is not None:
            product = self.table.add(product, x, slots)
        return product if self.activation is None else self.activation(product)


AdaptedProduct = PackedAdapted | MaskedAdapted


def _without_activation(product: Product) -> Product:
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
