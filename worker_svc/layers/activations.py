"""Activation functions by the names in model configurations, and the forms that products can apply themselves."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.nn import functional

from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.packed_weight import GATES

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


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


_GELU = _Function(functional.gelu, FusedActivation("gelu", "none"), "gelu")


_GELU_TANH = _Function(partial(functional.gelu, approximate="tanh"), FusedActivation("gelu", "tanh"), "gelu_tanh")


_SILU = _Function(functional.silu, FusedActivation("swish"), "silu")


CLAMPED_SWIGLU = "clamped_swiglu"
"""GPT-OSS's, which no configuration names: (clamped up + 1) times quick GELU of the clamped gate."""

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
        if self.name not in ACTIVATIONS and not self._is_clamped:
            raise ConfigurationError(
                f"config.json: activation {self.name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
            )

    @property
    def is_gated_silu(self) -> bool:
        """Whether it is the function of `ops.silu_and_mul`."""
        return self.gated and not self._is_clamped and ACTIVATIONS[self.name] is _SILU

    @property
    def _is_clamped(self) -> bool:
        return self.gated and self.name == CLAMPED_SWIGLU

    @property
    def function(self) -> Activation:
        if self._is_clamped:
            return _clamped_swiglu
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
        own = CLAMPED_SWIGLU if self._is_clamped else ACTIVATIONS[self.name].own
        return None if self.gated and own not in GATES else own


def _gate_and_mul(function: Activation, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    # torch has another GELU for lines that lie apart, so bits would depend on the number of tokens.
    return function(gate.contiguous()) * up
