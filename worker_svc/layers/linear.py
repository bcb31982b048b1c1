"""Linear layers: how weights of the checkpoint are merged, and split over ranks as in Megatron-LM.

`products` has how weights are multiplied, `adapted_products` how adapters add to the sums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from operator import attrgetter, itemgetter
from typing import Any

import torch

from quire_kernels import ops
from quire_kernels.cpu.low_rank import PackedTable
from quire_kernels.experts import Factor
from quire_kernels.low_rank import LowRank, LowRankTable, MaskedTable
from quire_kernels.packed_weight import CodedWeight, Coding, Quantization
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.adapted_products import AdaptedProduct, MaskedAdapted, PackedAdapted, TokenSlots
from worker_svc.layers.products import (
    CodedProduct,
    OwnProduct,
    Product,
    make_coded_product,
    make_product,
    with_float32_outputs,
    without_activation,
)
from worker_svc.parallel.ranks import ALONE, Segment, Shard
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec


class Split(Enum):
    """The part of a layer that each rank holds."""

    WHOLE = auto()
    OUTPUTS = auto()
    """Some of the outputs. A layer that is split by inputs takes them as they are."""
    INPUTS = auto()
    """The weights of some inputs. The layer's output is the sum over the ranks."""


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The order of the outputs of a query or key in the checkpoint. Here the dimensions that a rotation turns with each
    other are i and i + head size / 2, as in `ops.rotary`.

    Attributes:
        rotated: the number of dimensions of each head that a rotation turns.
        neighbours: it turns 2i with 2i + 1, otherwise i with i + rotated / 2.
        first: dimensions before them, which stay where they are.
    """

    head_dim: int
    rotated: int
    neighbours: bool = False
    first: int = 0

    def runs(self, outputs: Shard) -> Iterator[Shard]:
        """The outputs of some heads in the order that they have here: the first halves of each head's rotated and other
        outputs, then the second halves."""
        turned, rest = self.rotated // 2, (self.head_dim - self.first - self.rotated) // 2
        for start in range(outputs.start, outputs.end, self.head_dim):
            head = start + self.first
            end = head + self.rotated
            yield Shard(start, head)
            for half in (0, 1):
                if self.neighbours:
                    yield Shard(head + half, end, 2)
                else:
                    yield Shard(head + half * turned, head + half * turned + turned)
                yield Shard(end + half * rest, end + half * rest + rest)

    @property
    def places(self) -> list[int]:
        """The places in the checkpoint of a head's outputs."""
        runs = self.runs(Shard(0, self.head_dim))
        return [place for run in runs for place in range(run.start, run.end, run.step)]


@dataclass(frozen=True, slots=True)
class Spread:
    """Outputs of a checkpoint's layer that lie in runs, with outputs of other parts between them.

    Attributes:
        run: outputs of each run.
        distance: outputs from the beginning of a run to the beginning of the next one.
    """

    run: int
    distance: int

    def runs(self, outputs: Shard, first: int) -> Iterator[Shard]:
        """The places of some of the outputs, which are whole runs. `first` is the place of the first run."""
        for start in range(outputs.start, outputs.end, self.run):
            place = first + start // self.run * self.distance
            yield Shard(place, place + self.run)


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A linear layer of the checkpoint, by the name of its module.

    Attributes:
        segments: runs of outputs that are split separately, as GPT-2's query, key and value in one layer; empty if all
            outputs are split together.
        first: outputs of the checkpoint's layer before these.
        of: outputs of the checkpoint's layer; None if these are all.
        apart: Name of a separate layer with only these outputs, which adapters may have been trained on.
        order: of the outputs of heads, if it is not the same as in `ops.rotary`.
        spread: of the outputs from `first` on; None if they are neighbours.
        scale: factor on the outputs.
        input_scale: factor on the input.
    """

    name: str
    out_features: int
    segments: tuple[Segment, ...] = ()
    first: int = 0
    of: int | None = None
    order: HeadOrder | None = None
    apart: str | None = None
    spread: Spread | None = None
    scale: float = 1.0
    input_scale: float = 1.0

    @property
    def weight_scale(self) -> float:
        """Factor on the weights of the checkpoint; that on the biases is `scale`."""
        return self.scale * self.input_scale


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
            for part, shard in group:
                end = start + shard.size
                if weight is not None and stored is not None:
                    weight[start:end] = _scaled(stored[shard.slice, inputs.slice], part.weight_scale)
                if bias is not None and stored_bias is not None:
                    bias[start:end] = _scaled(stored_bias[shard.slice], part.scale)
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
        if not inputs.size or self._input_major or any(part.weight_scale != 1 for part in self._parts):
            return None
        if not ops.has_coded_products(placement.device, placement.dtype, placement.quantization):
            return None
        found: list[CodedWeight] = []
        for part, group in groupby(shards, key=itemgetter(0)):
            stored = tensors.coded(self._weight_spec(part))
            for _, shard in group:
                weight = None if stored is None else stored.part(shard.slice, inputs.slice)
                is_int8 = placement.quantization is not Quantization.NONE
                if weight is None or (is_int8 and weight.coding is Coding.TABLE4):
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

    @property
    def factor(self) -> Factor | None:
        """The product as a factor of `ops.pack_experts`; None if it is more than one, or not by a kernel of ours."""
        product = self._product
        if not isinstance(product, OwnProduct) or product.activation is not None or product.output_dtype is not None:
            return None
        return Factor(product.weight, product.bias, product.fused)

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
            self._product = self._adapted = MaskedAdapted(without_activation(product), table, function)

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
            found.append(LowRank(each.a[:, inputs.slice], b, each.scale * part.weight_scale))
        return found

    def _inputs_of_rank(self) -> Shard:
        is_split = self._split is Split.INPUTS
        return self._placement.ranks.shard(self._in_features) if is_split else Shard(0, self._in_features)

    def _outputs_of_rank(self, part: LinearPart) -> Iterator[Shard]:
        ranks = self._placement.ranks if self._split is Split.OUTPUTS else ALONE
        for outputs in ranks.shards(part.segments or (Segment(part.out_features),)):
            if part.spread is None:
                runs = iter((Shard(part.first + outputs.start, part.first + outputs.end),))
            else:
                runs = part.spread.runs(outputs, part.first)
            for run in runs:
                yield from (run,) if part.order is None else part.order.runs(run)

    def _weight_spec(self, part: LinearPart) -> TensorSpec:
        shape = (part.of or part.out_features, self._in_features)
        return TensorSpec(f"{part.name}.weight", shape[::-1] if self._input_major else shape)

    def _bias_spec(self, part: LinearPart) -> TensorSpec:
        return TensorSpec(f"{part.name}.bias", (part.of or part.out_features,))


def _scaled(stored: torch.Tensor, factor: float) -> torch.Tensor:
    return stored if factor == 1 else stored.float() * factor
