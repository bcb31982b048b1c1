"""Sets up the worker of a decoder that gives vectors or scores of prompts."""

from dataclasses import dataclass, replace

import torch

from quire.model_files.embedding_files import EmbeddingFiles, RankingFiles, hidden_size_of
from quire.model_files.model_directory import ModelDirectory
from quire.runtime.settings import ConfigurationError
from worker_svc.encoders.decoder_vectors import HeadScores, LogitScores, PooledVectors, PromptVectors
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.registry import FAMILIES
from worker_svc.settings import WorkerSettings
from worker_svc.step import ModelGeometry


@dataclass(frozen=True, slots=True)
class VectorPart:
    """The parts of a worker that gives vectors, in addition to its decoder.

    Attributes:
        files: of a decoder.
        head: in the place of the output layer; None if the scores are logits.
    """

    files: EmbeddingFiles | RankingFiles
    head: PromptVectors | None

    @classmethod
    def make(
        cls,
        directory: ModelDirectory,
        files: EmbeddingFiles | RankingFiles,
        settings: WorkerSettings,
        device: torch.device,
    ) -> "VectorPart":
        """Raises ConfigurationError if the files and the settings do not fit together."""
        if directory.architecture not in FAMILIES or settings.model_impl == "transformers":
            raise ConfigurationError(
                f"{directory.architecture} runs through transformers' code, which gives no vectors of texts; models of "
                "Quire's own code do (docs/models.md)"
            )
        if settings.draft_model is not None:
            raise ConfigurationError(
                f"--draft-model is {settings.draft_model}; {directory.path} gives vectors or scores, and generates no "
                "text: leave it out"
            )
        hidden_size = hidden_size_of(directory)
        if isinstance(files, EmbeddingFiles):
            head = PooledVectors(files, hidden_size)
        else:
            head = None if files.answers else HeadScores(files, hidden_size)
        if head is not None and head.state is not None and device.type != "cpu":
            raise ConfigurationError(
                f"{directory.path} pools all tokens of a text, which needs --device cpu; on {device.type} a vector is "
                "the state of the last token"
            )
        return cls(files, head)

    def settings(self, settings: WorkerSettings) -> WorkerSettings:
        """The settings without what is only for generated text."""
        return replace(settings, speculate=("off",), multi_step_ms=0.0, cuda_graphs="off")

    def vectors(self, model: CausalLM) -> PromptVectors:
        """The last layer of the loaded model, whose sequences have its state from now on."""
        assert isinstance(model, NativeCausalLM)
        if self.head is None:
            assert isinstance(self.files, RankingFiles)
            return LogitScores(self.files, model)
        if self.head.state is not None:
            if model.state is not None:
                raise ConfigurationError(
                    f"layers of {model.architecture} keep states, so the vector of a text cannot be a mean of all "
                    "tokens; --pooling last is possible"
                )
            model.state = self.head.state
        return self.head

    def geometry(self, model: CausalLM, geometry: ModelGeometry, max_model_len: int | None) -> ModelGeometry:
        """With the length of the longest text, which `max_model_len` of the settings may lower, and a place for the
        token that comes with its vector. ConfigurationError for a `max_model_len` that is longer."""
        longest = min(self.files.max_tokens or model.max_model_len, model.max_model_len)
        if max_model_len is not None and max_model_len > longest:
            raise ConfigurationError(
                f"--max-model-len is {max_model_len}; texts of this model have at most {longest} tokens: use at most "
                f"{longest}"
            )
        return replace(geometry, max_model_len=(max_model_len or longest) + 1)
