"""The products of an expert, and the rule by which a router chooses experts."""

from dataclasses import dataclass

import torch

from quire_kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class Factor:
    """One product of an expert, with the arguments of `ops.product`."""

    weight: PackedWeight
    bias: torch.Tensor | None
    activation: str

    @property
    def shape(self) -> tuple[object, ...]:
        """The same for all experts of a layer that are multiplied together."""
        weight = self.weight
        return (
            self.activation,
            weight.dtype,
            weight.out_features,
            weight.in_features,
            weight.padded_in,
            weight.gated,
            weight.quantization,
        )


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """How scores of experts, a softmax or sigmoids of a router's outputs, become a token's choice.

    Attributes:
        num_chosen: Experts of each token.
        normalized: Whether the weights of a token's experts are divided by their sum.
        num_groups: Experts are in groups of neighbours, and only experts of the best groups are chosen.
        group_members: The score of a group is the sum of this number of its best.
        scale: A factor on the weights.
    """

    num_chosen: int
    sigmoid: bool
    normalized: bool
    num_groups: int
    num_chosen_groups: int
    group_members: int
    scale: float
