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


_GATED = "gated "


def gated(name: str) -> str:
    """The name, for a linear layer, of `act(gate) * up`: gates are the first half of its outputs, ups the second."""
    return _GATED + name


def is_gated_silu(name: str) -> bool:
    """Whether it is what `ops.silu_and_mul` computes."""
    return name in (gated("silu"), gated("swish"))


def check_activation(name: str) -> None:
    """Raises ConfigurationError for a name that is not known."""
    name = name.removeprefix(_GATED)
    if name not in ACTIVATIONS:
        raise ConfigurationError(
            f"config.json: activation {name!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )


def activation(name: str) -> Activation:
    """Raises ConfigurationError for a name that is not known."""
    check_activation(name)
    return gated_activation(name.removeprefix(_GATED)) if name.startswith(_GATED) else ACTIVATIONS[name]


def fused_activation(name: str) -> FusedActivation | None:
    """The same function where oneDNN can apply it to a product; None where it cannot."""
    return _FUSED.get(name)


# In the words of `ops.product`.
_OWN = {
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def own_activation(name: str) -> str | None:
    """The same function where `ops.product` can apply it; None where it cannot."""
    return _OWN.get(name)


def gated_activation(name: str) -> Activation:
    """`act(gate) * up` of a tensor that holds gate and up one after the other in its last dimension."""
    if name in ("silu", "swish"):
        return ops.silu_and_mul
    function = activation(name)

    def gate_and_mul(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return function(gate) * up

    return gate_and_mul
