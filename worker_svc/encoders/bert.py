"""BERT and the models that have its layers (RoBERTa, XLM-RoBERTa, CamemBERT), over texts that lie one after the other.

Served from the checkpoints of transformers' classes of the same names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quire.model_files.architectures import ENCODERS, RANKERS
from quire.runtime.settings import ConfigurationError
from worker_svc.encoders.attention import attend
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.embedding_norm import Embedding, LayerNorm
from worker_svc.layers.linear import Linear, LinearPart
from worker_svc.models.base import ConfigFields, head_dim_of
from worker_svc.weights import Placement

# Types whose positions begin behind that of the padding token, as in fairseq.
_POSITIONS_BEHIND_PADDING = frozenset({"roberta", "xlm-roberta", "camembert"})


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The fields of config.json, with the defaults of transformers. `first_position` is the row of the table of
    positions that the first token of a text has."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    num_types: int
    first_position: int
    activation: str
    layer_norm_eps: float

    @classmethod
    def read(cls, values: Mapping[str, Any], model_type: str) -> "BertConfig":
        """Raises ConfigurationError for a field of another type or out of range."""
        fields = ConfigFields(values)
        if (kind := fields.text("position_embedding_type", "absolute")) != "absolute":
            raise fields.error("position_embedding_type", kind, "absolute, the only supported kind")
        if fields.flag("is_decoder", False):
            raise fields.error("is_decoder", True, "false: encoders attend in both directions")
        behind = model_type in _POSITIONS_BEHIND_PADDING
        return cls(
            vocab_size=fields.integer("vocab_size", 30522 if model_type == "bert" else 50265),
            hidden_size=fields.integer("hidden_size", 768),
            inner_size=fields.integer("intermediate_size", 3072),
            num_layers=fields.integer("num_hidden_layers", 12),
            num_heads=fields.integer("num_attention_heads", 12),
            num_positions=fields.integer("max_position_embeddings", 512),
            num_types=fields.integer("type_vocab_size", 2),
            first_position=fields.integer("pad_token_id", 1, minimum=0) + 1 if behind else 0,
            activation=fields.text("hidden_act", "gelu"),
            layer_norm_eps=fields.number("layer_norm_eps", 1e-12),
        )

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a text."""
        return self.num_positions - self.first_position


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts without padding.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, the index of each token in its text.
        lengths: number of tokens of each text, at least 1.
        types: [T] int64, 1 for tokens of the second text of a pair; None if all are 0.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    lengths: Sequence[int]
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


class BertLayer(nn.Module):
    """One layer; `name` is its module in the checkpoint."""

    def __init__(self, name: str, config: BertConfig, placement: Placement) -> None:
        super().__init__()
        hidden = config.hidden_size
        self._num_heads, self._head_dim = config.num_heads, head_dim_of(hidden, config.num_heads)

        def linear(
            modules: list[str], in_features: int, out_features: int, activation: ActivationKind | None = None
        ) -> Linear:
            parts = [LinearPart(f"{name}.{module}", out_features) for module in modules]
            return Linear(parts, in_features, bias=True, placement=placement, activation=activation)

        def norm(module: str) -> LayerNorm:
            return LayerNorm(f"{name}.{module}", hidden, config.layer_norm_eps, placement=placement)

        self.qkv = linear([f"attention.self.{each}" for each in ("query", "key", "value")], hidden, hidden)
        self.attention_output = linear(["attention.output.dense"], hidden, hidden)
        self.attention_norm = norm("attention.output.LayerNorm")
        self.up = linear(["intermediate.dense"], hidden, config.inner_size, ActivationKind(config.activation))
        self.down = linear(["output.dense"], config.inner_size, hidden)
        self.output_norm = norm("output.LayerNorm")

    def forward(self, x: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden], of texts with `lengths` tokens."""
        q, k, v = self.qkv(x).view(len(x), 3, self._num_heads, self._head_dim).unbind(1)
        attended = attend(q, k, v, lengths, scale=self._head_dim**-0.5)
        x, _ = self.attention_norm.add(self.attention_output(attended.flatten(1)), x)
        x, _ = self.output_norm.add(self.down(self.up(x)), x)
        return x


class BertEncoder(nn.Module):
    """The hidden states of the tokens of texts.

    Attributes:
        hidden_size: of each token.
        max_tokens: maximum of a text.
        vocab_size: token ids are below it.
    """

    # Weights of the file that no vector needs: the heads of pretraining, and buffers of older files.
    unused = ("pooler.", "cls.", "lm_head.", "position_ids", "token_type_ids")

    def __init__(self, architecture: str, config: Mapping[str, Any], placement: Placement) -> None:
        super().__init__()
        if placement.ranks.size > 1:
            raise ConfigurationError(f"{architecture} runs on one rank; --tensor-parallel-size must be 1")
        self.architecture, self.placement = architecture, placement
        self._config = described = BertConfig.read(config, (ENCODERS | RANKERS)[architecture])
        self.hidden_size, self.max_tokens = described.hidden_size, described.max_tokens
        self.vocab_size = described.vocab_size

        def embedding(name: str, count: int) -> Embedding:
            return Embedding(f"embeddings.{name}_embeddings", count, self.hidden_size, placement=placement)

        self.words = embedding("word", described.vocab_size)
        self.places = embedding("position", described.num_positions)
        self.types = embedding("token_type", described.num_types)
        self.norm = LayerNorm("embeddings.LayerNorm", self.hidden_size, described.layer_norm_eps, placement=placement)
        self.layers = nn.ModuleList(
            BertLayer(f"encoder.layer.{index}", described, placement) for index in range(described.num_layers)
        )

    def forward(self, texts: PackedTexts) -> torch.Tensor:
        """Returns [T, hidden]."""
        x = self.words(texts.token_ids) + self.places(texts.positions + self._config.first_position)
        x = self.norm(x + self.types(torch.zeros_like(texts.token_ids) if texts.types is None else texts.types))
        for layer in self.layers:
            x = layer(x, texts.lengths)
        return x
