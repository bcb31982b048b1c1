"""From the hidden states of a text's tokens to its vector: the modules of `EmbeddingFiles`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from quire.model_files.architectures import RANKERS
from quire.model_files.embedding_files import Dense, EmbeddingFiles, Normalize, Pooling, RankingFiles, Truncate
from quire.runtime.settings import ConfigurationError
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.embedding_norm import LayerNorm
from worker_svc.layers.products import Product, make_product
from worker_svc.models.base import ConfigFields
from worker_svc.weights import Checkpoint, Loadable, Placement, TensorReader, TensorSpec

ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": functional.relu,
    "GELU": functional.gelu,
    "SiLU": functional.silu,
    "Sigmoid": torch.sigmoid,
}


def pool(modes: Sequence[str], hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The pooled states of each text, in float32.

    Args:
        modes: of `POOLING_MODES`; their results lie side by side.
        hidden: [T, size], the states of the tokens of all texts.
        lengths: the number of tokens of each text.

    Returns:
        [texts, len(modes) * size].
    """
    hidden = hidden.float()
    counts = torch.tensor(lengths)
    ends = counts.cumsum(0)

    def sums(states: torch.Tensor) -> torch.Tensor:
        # By numpy: torch's `index_add_` wakes its threads, which takes as long as some layers of a short text.
        lines, places = states.numpy(), zip((ends - counts).tolist(), ends.tolist(), strict=True)
        return torch.from_numpy(np.stack([lines[start:end].sum(0) for start, end in places]))

    def pooled(mode: str) -> torch.Tensor:
        match mode:
            case "cls":
                return hidden[ends - counts]
            case "lasttoken":
                return hidden[ends - 1]
            case "max":
                return torch.stack([each.amax(0) for each in hidden.split(list(lengths))])
            case "mean":
                return sums(hidden) / counts.unsqueeze(1)
            case "mean_sqrt_len_tokens":
                return sums(hidden) / counts.unsqueeze(1).sqrt()
            case _:
                places = torch.cat([torch.arange(1, length + 1) for length in lengths]).unsqueeze(1)
                return sums(hidden * places) / (counts * (counts + 1) / 2).unsqueeze(1)

    return torch.cat([pooled(mode) for mode in modes], 1)


class TextVectors(nn.Module):
    """Runs the modules behind an encoder, in float32.

    Attributes:
        size: the length of a vector.
    """

    def __init__(self, files: EmbeddingFiles, hidden_size: int) -> None:
        """Raises ConfigurationError for weights that are missing or have another shape."""
        super().__init__()
        self._modules_of = files.modules
        self.size = files.size(hidden_size)
        # Products of ours, whose bits do not depend on the other texts.
        self._products = [
            make_product(*_dense_weights(each)) if isinstance(each, Dense) else None for each in files.modules
        ]

    def forward(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """hidden [T, hidden] of the tokens of texts with these lengths -> [texts, size] float32."""
        x = hidden
        for module, product in zip(self._modules_of, self._products, strict=True):
            match module:
                case Pooling(modes):
                    x = pool(modes, x, lengths)
                case Dense():
                    assert product is not None
                    x = ACTIVATION_FUNCTIONS[module.activation](product(x))
                case Normalize():
                    x = functional.normalize(x, dim=1)
                case Truncate(size):
                    x = x[:, :size]
        return x


class PairScores(Loadable):
    """The head of a model that ranks, in float32: one number of each pair.

    Attributes:
        size: 1.
    """

    size = 1

    def __init__(self, files: RankingFiles, architecture: str, config: Mapping[str, Any]) -> None:
        """`config` is of `encoder_fields`. Raises ConfigurationError for a field that is not supported."""
        super().__init__()
        fields, model_type = ConfigFields(config), RANKERS[architecture]
        hidden = fields.integer("hidden_size")
        self._activation = ACTIVATION_FUNCTIONS[files.activation]
        first, second, inner = _HEADS.get(model_type, ("pooler.dense", "classifier", "tanh"))
        sizes = {first: (hidden, hidden), second: (1, hidden)}
        self._norm, self._pooling, has_bias = None, "cls", True
        if model_type == "modernbert":
            inner, has_bias = fields.text("classifier_activation", "gelu"), fields.flag("classifier_bias", False)
            self._pooling = fields.text("classifier_pooling", "cls")
            if self._pooling not in ("cls", "mean"):
                raise fields.error("classifier_pooling", self._pooling, "cls or mean")
            placement, eps = Placement(torch.device("cpu"), torch.float32), fields.number("layer_norm_eps", 1e-5)
            bias = fields.flag("norm_bias", False)
            self._norm = LayerNorm("head.norm", hidden, eps, placement=placement, bias=bias)
        self._inner = ActivationKind(inner).function
        self._specs = [
            (TensorSpec(f"{name}.weight", size), TensorSpec(f"{name}.bias", size[:1]) if has else None)
            for (name, size), has in zip(sizes.items(), (has_bias, True), strict=True)
        ]
        self._products: list[Product] = []

    def tensors(self) -> Iterator[TensorSpec]:
        for pair in self._specs:
            yield from (spec for spec in pair if spec is not None)

    def load(self, tensors: TensorReader) -> None:
        def read(spec: TensorSpec) -> torch.Tensor:
            return tensors.read(spec).float().clone()

        self._products = [
            make_product(read(weight), None if bias is None else read(bias)) for weight, bias in self._specs
        ]

    def forward(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """hidden [T, hidden] of the tokens of pairs with these lengths -> [pairs, 1] float32."""
        first, second = self._products
        inner = self._inner(first(pool([self._pooling], hidden, lengths)))
        return self._activation(second(inner if self._norm is None else self._norm(inner)))


_OF_ROBERTA = ("classifier.dense", "classifier.out_proj", "tanh")
# The two layers of a head, and the function between them.
_HEADS = {
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert", "mpnet"), _OF_ROBERTA),
    "distilbert": ("pre_classifier", "classifier", "relu"),
    "modernbert": ("head.dense", "classifier", "gelu"),
}


def _dense_weights(module: Dense) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [out, in] and bias [out] in float32."""
    if module.tensor is not None:
        spec = TensorSpec(module.tensor, (module.out_features, module.in_features))
        return Checkpoint.open(module.folder, base_prefix="").read(spec).float().clone(), None
    file = module.folder / "model.safetensors"
    pickled = module.folder / "pytorch_model.bin"
    if pickled.is_file() and not file.is_file():
        raise ConfigurationError(
            f"{pickled} is a pickle, which is never loaded; convert the model with sentence-transformers: "
            "SentenceTransformer(DIRECTORY).save_pretrained(NEW_DIRECTORY)"
        )
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"cannot read {file}: {error!s:.200}") from error
    expected: dict[str, tuple[int, ...]] = {"linear.weight": (module.out_features, module.in_features)}
    if module.has_bias:
        expected["linear.bias"] = (module.out_features,)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise ConfigurationError(f"{file} has {found!r:.200}; expected {expected}")
    bias = tensors["linear.bias"].float() if module.has_bias else None
    return tensors["linear.weight"].float(), bias
