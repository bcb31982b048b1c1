"""Vectors and scores of prompts, in the place of a decoder's logits: pooling and the modules behind it, or a head."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace

import torch

from quire.model_files.embedding_files import EmbeddingFiles, Pooling, RankingFiles
from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.states import StateShape, StateUnits
from worker_svc.encoders.pooling import ACTIVATION_FUNCTIONS, TextVectors
from worker_svc.layers.products import Product, make_product
from worker_svc.layers.state_layer import StateLayout, StateSize
from worker_svc.models.base import ModelInput, NativeCausalLM
from worker_svc.weights import Loadable, TensorReader, TensorSpec

_UNITS = StateUnits(0, StateShape.of_recurrence(1, 1, 1).tile_bytes)


class PromptVectors(Loadable):
    """Makes the vector of a prompt from the hidden states of its tokens.

    Attributes:
        size: the length of a vector; 1 for scores.
        state: what is kept of each sequence between steps, in blocks of the pool; None if it is nothing.
    """

    size: int
    state: StateSize | None = None

    def tensors(self) -> Iterator[TensorSpec]:
        yield from ()

    def load(self, tensors: TensorReader) -> None:
        """Most have no tensors of the model's files."""

    def summaries(self, hidden: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """A line for each token, of it and of the tokens before it, [T, n]; changes the states of the rows. Only for
        vectors with a state; otherwise a line is the hidden state.

        Args:
            hidden: [T, hidden], of the new tokens of a step.
        """
        raise NotImplementedError

    @abstractmethod
    def forward(self, summaries: torch.Tensor) -> torch.Tensor:
        """The lines of the last tokens of prompts, [s, n] -> their vectors, [s, size] float32."""


class PooledVectors(PromptVectors):
    """The vectors of a model of embeddings.

    A mean needs the sum of the hidden states of all tokens. This is a state as recurrent layers have, in float32: it
    stays through steps, preemptions and swaps, and checkpoints of it serve prompts with the same beginning. Tokens are
    added one by one, so its bits do not depend on how a prompt is cut.
    """

    def __init__(self, files: EmbeddingFiles, hidden_size: int) -> None:
        """Raises ConfigurationError for weights that are missing or have another shape."""
        super().__init__()
        pooling, *behind = files.modules
        assert isinstance(pooling, Pooling)
        self._modes = pooling.modes
        # The summaries are pooled already.
        rest = replace(files, modules=(Pooling(("lasttoken",)), *behind))
        self._vectors = TextVectors(rest, hidden_size * len(pooling.modes))
        self.size = self._vectors.size
        # Heads of the state: the plain sum of hidden states, and their sum weighted by place.
        self._sums = sorted({mode == "weightedmean" for mode in pooling.modes if mode != "lasttoken"})
        if self._sums:
            shape = StateShape.of_recurrence(len(self._sums), 1, hidden_size)
            self.state = StateLayout((shape,)).size(1)

    def summaries(self, hidden: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        hidden, counts = hidden[: len(inputs.positions)].float(), (inputs.positions + 1).float()[:, None]
        sums = self._running_sums(hidden, counts, inputs)
        divisors = {
            "mean": counts,
            "mean_sqrt_len_tokens": counts.sqrt(),
            "weightedmean": counts * (counts + 1) / 2,
        }
        parts = (
            hidden if mode == "lasttoken" else sums[:, self._sums.index(mode == "weightedmean")] / divisors[mode]
            for mode in self._modes
        )
        return torch.cat([*parts], 1)

    def _running_sums(self, hidden: torch.Tensor, counts: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """The sums up to each token, [T, kinds of sums, hidden]: a recurrence without decay."""
        assert inputs.states is not None, "the states of the rows"
        values = torch.stack([hidden * counts if is_weighted else hidden for is_weighted in self._sums], 1)
        ones = torch.ones(len(values), 1, 1)
        decay = torch.ones(len(values), len(self._sums))
        return ops.linear_recurrence(
            *(ones, ones, values, decay, None, inputs.states, _UNITS), delta=False, unit_norm=False, scale=1.0
        )

    def forward(self, summaries: torch.Tensor) -> torch.Tensor:
        return self._vectors(summaries.float(), [1] * len(summaries))


class HeadScores(PromptVectors):
    """The scores of a model with a head of one number, as transformers' classes for sequence classification."""

    size = 1

    def __init__(self, files: RankingFiles, hidden_size: int) -> None:
        super().__init__()
        self._activation = ACTIVATION_FUNCTIONS[files.activation]
        self._spec = TensorSpec("score.weight", (1, hidden_size))
        self._product: Product | None = None

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        self._product = make_product(tensors.read(self._spec).float().clone())

    def forward(self, summaries: torch.Tensor) -> torch.Tensor:
        assert self._product is not None, "a loaded head"
        return self._activation(self._product(summaries.float()))


class LogitScores(PromptVectors):
    """The scores of a model that is asked whether a document fits: the logit of yes, less the logit of no."""

    size = 1

    def __init__(self, files: RankingFiles, model: NativeCausalLM) -> None:
        super().__init__()
        self._activation, self._answers, self._logits = (
            ACTIVATION_FUNCTIONS[files.activation],
            files.answers,
            model.logits,
        )
        if max(files.answers) >= model.vocab_size:
            raise ConfigurationError(
                f"LogitScore has the token {max(files.answers)}; the model has {model.vocab_size} tokens"
            )

    def forward(self, summaries: torch.Tensor) -> torch.Tensor:
        logits = self._logits(summaries)
        score = logits[:, self._answers[0]]
        if len(self._answers) > 1:
            score = score - logits[:, self._answers[1]]
        return self._activation(score[:, None])
