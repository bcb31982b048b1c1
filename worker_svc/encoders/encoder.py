"""Encoders: layers that attend in both directions, over texts that lie one after the other.

Served from the checkpoints of transformers' classes. `families` says what differs between them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from quire.model_files.architectures import ENCODERS, RANKERS
from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from worker_svc.encoders.attention import attend
from worker_svc.encoders.families import EncoderConfig
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.embedding_norm import Embedding, LayerNorm, RmsNorm
from worker_svc.layers.linear import Linear, LinearPart
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec

_NUM_NEAR, _FARTHEST = 8, 128
"""Distances of MPNet with a bias of their own, in each direction, and the distance from which all have the same."""


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts without padding.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, the index of each token in its text.
        lengths: number of tokens of each text, at least 1; a recording reads them from an array of int32.
        types: [T] int64, 1 for tokens of the second text of a pair; None if all are 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: Sequence[int] | NDArray[np.int32]
    types: torch.Tensor | None = None

    @classmethod
    def of(cls, texts: Sequence[torch.Tensor], separator: int | None = None) -> "PackedTexts":
        """From the token ids of each text, [n] int64, or of pairs whose first text ends with the first `separator`."""
        lengths = [len(each) for each in texts]
        types = None
        if separator is not None:
            ends = [(each == separator).int() for each in texts]
            types = torch.cat([(end.cumsum(0) > end).long() for end in ends])
        positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(torch.cat(list(texts)), positions, lengths, types)


class _Modules:
    """Makes the modules of an encoder by their names in the checkpoint."""

    def __init__(self, config: EncoderConfig, placement: Placement) -> None:
        self._config, self._placement = config, placement

    def embedding(self, name: str, count: int) -> Embedding:
        return Embedding(name, count, self._config.hidden_size, placement=self._placement)

    def norm(self, name: str, size: int | None = None) -> LayerNorm | RmsNorm:
        config, size = self._config, size or self._config.hidden_size
        if config.family.has_root_norms:
            return RmsNorm(name, size, config.norm_eps, placement=self._placement, offset=1.0)
        return LayerNorm(name, size, config.norm_eps, placement=self._placement, bias=config.norm_bias)

    def linear(
        self, parts: Sequence[LinearPart], in_features: int, *, bias: bool, activation: ActivationKind | None = None
    ) -> Linear:
        return Linear(parts, in_features, bias=bias, placement=self._placement, activation=activation)


class _Join(nn.Module):
    """Adds the output of attention or MLP to the residual; the norm of the sum is the next input."""

    def __init__(self, norm: LayerNorm | RmsNorm, output_norm: LayerNorm | RmsNorm | None, keeps_sum: bool) -> None:
        super().__init__()
        self.norm, self.output_norm, self._keeps_sum = norm, output_norm, keeps_sum

    def forward(self, output: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> (input, residual), both [T, hidden]; `residual` may be overwritten."""
        if self.output_norm is not None:
            output = self.output_norm(output)
        x, total = self.norm.add(output, residual)
        return x, total if self._keeps_sum else x


class EncoderLayer(nn.Module):
    def __init__(self, index: int, config: EncoderConfig, modules: _Modules) -> None:
        super().__init__()
        self._config, self.window = config, config.layers[index].window
        names, hidden, inner = config.family.names, config.hidden_size, config.inner_size
        layer = names.layer.format(index)
        self._sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        outputs = [count * config.head_dim for count in self._sizes]

        def parts(modules: Sequence[str], sizes: Sequence[int]) -> list[LinearPart]:
            if len(modules) < len(sizes):
                sizes = [sum(sizes)]
            return [LinearPart(f"{layer}{module}", size) for module, size in zip(modules, sizes, strict=True)]

        self.qkv = modules.linear(parts(names.qkv, outputs), hidden, bias=config.attention_bias)
        self.attention_output = modules.linear(
            parts([names.attention_output], [hidden]), outputs[0], bias=config.attention_bias
        )
        up = parts(names.up, [inner] * (2 if config.family.gated else 1))
        if names.ups_first:
            up = [LinearPart(up[0].name, inner, first=first, of=2 * inner) for first in (inner, 0)]
        self.up = modules.linear(up, hidden, bias=config.mlp_bias, activation=config.activation)
        self.down = modules.linear(parts([names.down], [hidden]), inner, bias=config.down_bias)
        self.head_norms = nn.ModuleList(modules.norm(f"{layer}{name}", config.head_dim) for name in names.head_norms)
        keeps_sum = config.family.begins_with_norms
        after = names.layer.format(index + 1) if keeps_sum else layer
        is_last = names.last_norm is not None and index + 1 == len(config.layers)
        norms = (f"{layer}{names.attention_norm}", names.last_norm if is_last else f"{after}{names.mlp_norm}")
        output_norms = [modules.norm(f"{layer}{name}") for name in names.output_norms] or [None, None]
        self.attention_join, self.mlp_join = (
            _Join(modules.norm(str(norm)), output_norm, keeps_sum)
            for norm, output_norm in zip(norms, output_norms, strict=True)
        )

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        texts: PackedTexts,
        cos_sin: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [T, hidden] -> x, residual of the next layer. `cos_sin` is as in `ops.rotary`, `bias` as in
        `attend`."""
        heads = self.qkv(x).view(len(x), -1, self._config.head_dim)
        q, k, v = heads.split(self._sizes, 1)
        if self.head_norms:
            q, k = (norm(each) for norm, each in zip(self.head_norms, (q, k), strict=True))
        if cos_sin is not None:
            q, k = ops.rotary(q, k, texts.positions, cos_sin)
        attended = attend(q, k, v, texts.lengths, scale=self._config.scale, window=self.window, bias=bias)
        x, residual = self.attention_join(self.attention_output(attended.flatten(1)), residual)
        return self.mlp_join(self.down(self.up(x)), residual)


class DistanceBias(Loadable):
    """MPNet's biases of scores, by the distance of a key from its query: the first buckets have one distance each,
    the others a range that grows with the distance."""

    biases: torch.Tensor
    """As in `attend`."""

    def __init__(self, name: str, config: EncoderConfig) -> None:
        super().__init__()
        self._spec = TensorSpec(f"{name}.weight", (config.num_buckets, config.num_heads))
        self._max_tokens = config.max_tokens

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        count = self._spec.shape[0] // 2
        distances = torch.arange(1 - self._max_tokens, self._max_tokens)
        far = torch.log(distances.abs().clamp(min=1).float() / _NUM_NEAR) / math.log(_FARTHEST / _NUM_NEAR)
        far = (_NUM_NEAR + (far * (count - _NUM_NEAR)).long()).clamp(max=count - 1)
        buckets = torch.where(distances.abs() < _NUM_NEAR, distances.abs(), far) + (distances > 0) * count
        self.biases = tensors.read(self._spec).float()[buckets].T.contiguous()


class Encoder(nn.Module):
    """The hidden states of the tokens of texts.

    Attributes:
        hidden_size: of each token.
        max_tokens: maximum of a text.
        vocab_size: token ids are below it.
    """

    def __init__(self, architecture: str, config: Mapping[str, Any], placement: Placement, longest: int | None) -> None:
        """`config` is of `encoder_fields`. `longest` is the maximum number of tokens of a text that is served."""
        super().__init__()
        if placement.ranks.size > 1:
            raise ConfigurationError(f"{architecture} runs on one rank; --tensor-parallel-size must be 1")
        self._config = described = EncoderConfig.read(config, (ENCODERS | RANKERS)[architecture])
        self.hidden_size, self.vocab_size = described.hidden_size, described.vocab_size
        self.max_tokens = min(described.max_tokens, longest or described.max_tokens)
        names, modules = described.family.names, _Modules(described, placement)
        self.words = modules.embedding(names.words, described.vocab_size)
        self.places = self.types = self.distances = None
        if names.positions is not None:
            self.places = modules.embedding(names.positions, described.num_positions)
        if names.types is not None and described.num_types:
            self.types = modules.embedding(names.types, described.num_types)
        if names.distances is not None:
            self.distances = DistanceBias(names.distances, described)
        is_of_layer = names.norm.startswith(".")
        self.norm = modules.norm(names.layer.format(0) + names.norm if is_of_layer else names.norm)
        self._keeps_words = is_of_layer
        self.layers = nn.ModuleList(EncoderLayer(index, described, modules) for index in range(len(described.layers)))
        self._tables = {
            kind: kind.rope.cos_sin_table(placement.device, self.max_tokens)
            for kind in set(described.layers)
            if kind.rope is not None
        }

    def forward(self, texts: PackedTexts) -> torch.Tensor:
        """Returns [T, hidden]."""
        return self.run_layers(self.embed(texts), texts)

    def embed(self, texts: PackedTexts) -> torch.Tensor:
        """The sums of the embeddings of tokens, [T, hidden]."""
        total = self.words(texts.token_ids)
        if self._config.family.has_root_norms:
            total = total * self.hidden_size**0.5
        if self.places is not None:
            total = total + self.places(texts.positions + self._config.first_position)
        if self.types is not None:
            total = total + self.types(texts.token_ids.new_zeros(1) if texts.types is None else texts.types)
        return total

    def run_layers(self, total: torch.Tensor, texts: PackedTexts) -> torch.Tensor:
        """[T, hidden], which may be overwritten, -> [T, hidden]. Reads positions and lengths of `texts` only."""
        x = self.norm(total)
        residual = total if self._keeps_words else x
        bias = None if self.distances is None else self.distances.biases
        for layer, kind in zip(self.layers, self._config.layers, strict=True):
            x, residual = layer(x, residual, texts, self._tables.get(kind), bias)
        return x
