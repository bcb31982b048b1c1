"""Activation functions by the names that model configurations use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional

from kernels import ops
from quire.settings import ConfigurationError

Activation = Callable[[torch.Tensor], torch.Tensor]


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return functional.relu(x).square()


_gelu_tanh = partial(functional.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Activation] = {
    "gelu": functional.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_python": functional.gelu,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": functional.relu,
    "relu2": _relu_squared,
    "relu6": functional.relu6,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "swish": functional.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True, slots=True)
class FusedActivation:
    """An activation in oneDNN's words, for `torch.ops.mkldnn._linear_pointwise`."""

    name: str
    algorithm: str = ""
    scalars: list[float] = field(default_factory=list)


_GELU_TANH = FusedActivation("gelu", "tanh")

# oneDNN's relu turns NaN into 0, which would hide a poisoned row: it is not among them.
_FUSED: dict[str, FusedActivation] = {
    "gelu": FusedActivation("gelu", "none"),
    "gelu_fast": _GELU_TANH,
    "gelu_new": _GELU_TANH,
    "gelu_python": FusedActivation("gelu", "none"),
    "gelu_pytorch_tanh": _GELU_TANH,
    "sigmoid": FusedActivation("sigmoid"),
    "silu": FusedActivation("swish"),
    "swish": FusedActivation("swish"),
    "tanh": FusedActivation("tanh"),
}

# In the words of `ops.product`.
_OWN = {
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True, slots=True)
class ActivationKind:
    """What a linear layer applies to its outputs. ConfigurationError for a name that is not known.

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
        """Whether it is what `ops.silu_and_mul` computes."""
        return self.gated and ACTIVATIONS[self.name] is functional.silu

    @property
    def function(self) -> Activation:
        if self.is_gated_silu:
            return ops.silu_and_mul
        function = ACTIVATIONS[self.name]
        return partial(_gate_and_mul, function) if self.gated else function

    @property
    def fused(self) -> FusedActivation | None:
        """The same function where oneDNN can apply it to a product; None where it cannot."""
        return None if self.gated else _FUSED.get(self.name)

    @property
    def own(self) -> str | None:
        """The same function where `ops.product` can apply it; None where it cannot."""
        return None if self.gated else _OWN.get(self.name)


def _gate_and_mul(function: Activation, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return function(gate) * up
