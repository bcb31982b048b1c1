"""The interface of a model for the runner and the loader."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from quire.runtime.settings import ConfigurationError
from quire_kernels.states import StatePages
from worker_svc.layers.adapted_products import TokenSlots
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.layers.embedding_norm import Embedding, TiedHead
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.state_layer import StateSize
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens of one step: a flat batch without padding.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's index in its sequence.
        groups: the places of the tokens in the pool, for each group of layers.
        kv_caches: one [lines_per_token, num_blocks, num_kv_heads, block_size, head_dim] for each of the model's
            `cache_layers`. The model writes the keys and values, or latents, of the new tokens into their slots.
        adapter_slots: as in `TokenSlots`.
        group_of: for each of `kv_caches` the index of its group; empty if all are in one.
        states: the states of the rows, which the model changes; None if its layers keep none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    groups: Sequence[AttentionMetadata]
    kv_caches: Sequence[torch.Tensor]
    adapter_slots: torch.Tensor | None = None
    group_of: Sequence[int] = ()
    states: StatePages | None = None

    @property
    def attention(self) -> Sequence[AttentionMetadata]:
        """The metadata of each of `kv_caches`."""
        return [self.attention_of(index) for index in range(len(self.kv_caches))]

    def attention_of(self, index: int) -> AttentionMetadata:
        """The metadata of one of `kv_caches`."""
        return self.groups[self.group_of[index] if self.group_of else 0]


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """Keys and values, or latents, of one layer in the pool.

    Attributes:
        num_kv_heads: of this rank.
        window: tokens that a token sees, itself included; None for all before it.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class RotationByLength:
    """The table of a model that has several, by the length of the sequence.

    Attributes:
        name: differs between tables that differ.
        original: the length up to which the table of the first training is right.
        longest: the length that the model can be served with.
        served: the length that this table is for.
    """

    name: str
    original: int
    longest: int
    served: int

    def __str__(self) -> str:
        """The line for the log of a start."""
        if self.served > self.original:
            return (
                f"the rotation of all sequences is the one for {self.served} tokens; answers of sequences up to "
                f"{self.original} tokens may be better with --max-model-len {self.original}"
            )
        return (
            f"sequences have at most {self.served} tokens, and the rotation of the first training; --max-model-len "
            f"{self.original + 1} to {self.longest} serves longer ones, with the extended rotation for all sequences"
        )


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV pool.

    Attributes:
        architecture: its name in config.json.
        cache_layers: one for each layer that has keys of its own; a layer that reads another's has none.
        state: of each sequence, of the layers that keep something else than keys; None if there are none.
        lines_per_token: lines of a token and head in the pool: a key and a value, or 1 for a latent, which is both.
        vocab_size: width of the logits of all ranks together.
        max_model_len: number of positions that the model supports.
        rotation: None if sequences of all lengths are rotated alike.
        token_slots: the adapters of a pass, for the layers that `AdapterSlots` has made to read them.
    """

    architecture: str

    def __init__(
        self,
        placement: Placement,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        vocab_size: int,
        max_model_len: int,
        lines_per_token: int = 2,
        cache_layers: Sequence[CacheLayer] | None = None,
        state: StateSize | None = None,
    ) -> None:
        """`num_layers`, `num_kv_heads` and `head_dim` describe `cache_layers` that are all alike, without a window."""
        super().__init__()
        self.lines_per_token = lines_per_token
        alike = (CacheLayer(num_kv_heads, head_dim),) * num_layers
        self.cache_layers = alike if cache_layers is None else tuple(cache_layers)
        self.state = state
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.rotation: RotationByLength | None = None
        self.ranks = placement.ranks
        self.device = placement.device
        self.dtype = placement.dtype
        self.token_slots = TokenSlots()

    @property
    def num_layers(self) -> int:
        """The number of layers in the pool."""
        return len(self.cache_layers)

    @property
    def num_kv_heads(self) -> int:
        """The maximum of all layers, on this rank; 0 if no layer has keys."""
        return max((layer.num_kv_heads for layer in self.cache_layers), default=0)

    @property
    def head_dim(self) -> int:
        """The maximum of all layers; 0 if no layer has keys."""
        return max((layer.head_dim for layer in self.cache_layers), default=0)

    @abstractmethod
    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Runs the new tokens through all layers, writing their keys and values into the pool.

        Returns:
            Hidden states after the final norm, [T, hidden].
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden], some of `forward`'s results -> [S, vocab_size] float32."""


class NativeCausalLM(CausalLM):
    """A model of Quire's own layers.

    The constructor reads the configuration and allocates no weights; the loader does.

    Attributes:
        base_prefix: prefix of the names of the base model's tensors in the checkpoint.
        layers: The layers that `run_layers` runs.
        waits_for_device: whether the host reads results of the device within a forward pass.
    """

    base_prefix: ClassVar[str]
    layers: nn.ModuleList
    waits_for_device: bool = False
    head: nn.Module

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "NativeCausalLM":
        """Raises ConfigurationError for a configuration that this family cannot serve."""

    @abstractmethod
    def embed(self, inputs: ModelInput) -> torch.Tensor:
        """The input of the first layer, [T, hidden]."""

    @abstractmethod
    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """The rest of `forward`. `x` is the result of `embed`, and may be overwritten."""

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        return self.run_adapted_layers(self.embed(inputs), inputs)

    def run_adapted_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """`run_layers` with the adapters of the tokens."""
        with self.token_slots.used(inputs.adapter_slots):
            return self.run_layers(x, inputs)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits before `finish`, in float32 where the output layer's products have it."""
        return self.ranks.gather_columns(self.head(hidden), self.vocab_size)

    def finish(self, outputs: torch.Tensor) -> torch.Tensor:
        """The logits from the result of `outputs`."""
        return outputs.float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.finish(self.outputs(hidden))


def make_head(
    embedding: Embedding, dim: int, vocab_size: int, *, tied: bool, bias: bool = False, placement: Placement
) -> nn.Module:
    """The output layer: the embedding itself, or `lm_head` of the checkpoint. Each rank has a part of the logits."""
    if tied:
        return TiedHead(embedding, placement)
    parts = [LinearPart("lm_head", vocab_size)]
    return Linear(
        parts,
        dim,
        bias=bias,
        placement=placement,
        split=Split.OUTPUTS,
        keeps_weights=True,
        float32_outputs=True,
    )


def head_dim_of(hidden_size: int, num_heads: int) -> int:
    """Head size of models whose heads share the hidden size evenly."""
    if hidden_size % num_heads:
        raise ConfigurationError(
            f"config.json: hidden size {hidden_size} is not a multiple of the number of heads, {num_heads}"
        )
    return hidden_size // num_heads


# No field has more, and none above 0 has less. JSON can hold numbers that a float cannot, not even as a product of two.
_MAX_NUMBER = 1e30


class ConfigFields:
    """A section of config.json, as transformers 4 and 5 write it, whose fields are checked as they are read.

    Each method returns `default` when the field is absent or null. It raises ConfigurationError when there is no
    default, or when the value has another type or is out of range.
    """

    def __init__(self, values: Mapping[str, Any], section: str = "config.json") -> None:
        self.values = values
        self.section = section

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, value, f"an integer of at least {minimum}")
        if value > _MAX_NUMBER:
            raise self.error(name, value, f"an integer of at most {_MAX_NUMBER:.0e}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 / _MAX_NUMBER < value < _MAX_NUMBER:
            raise self.error(name, value, "a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._value(name, None)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(x, int | float) and abs(x) < _MAX_NUMBER for x in value)
        ):
            raise self.error(name, value, f"a list of {count} numbers")
        return [float(x) for x in value]

    def check_only(self, name: str, only: float | bool) -> None:
        """Raises ConfigurationError if the field has another value than `only`."""
        found = self.flag(name, only) if isinstance(only, bool) else self.number(name, only)
        if found != only:
            raise self.error(name, found, f"{str(only).lower()}, the only supported value")

    def error(self, name: str, value: object, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{self.section}: {name} is {value!r:.200}; expected {expected}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigurationError(f"{self.section}: {name} is missing")
        return value
