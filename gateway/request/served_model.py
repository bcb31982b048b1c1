"""The served model without its weights: name, tokenizer, chat template, defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gateway.offload import FairExecutor
from gateway.request.constraint_checker import ConstraintChecker, TrialProcess
from gateway.request.generation_config import ModelDefaults, model_defaults
from gateway.text.chat import Chat, model_template, special_token_texts
from gateway.text.request_template import TemplateProcess
from gateway.text.tokenizer import Tokenizer
from gateway.types import ModelKind
from quire.constraints.token_cache import has_large_tables
from quire.model_files.architectures import ENCODERS, RANKERS
from quire.model_files.embedding_files import EmbeddingFiles, hidden_size_of
from quire.model_files.model_directory import ModelDirectory
from quire.service.compatibility import ModelFingerprint


def _kind_of(directory: ModelDirectory) -> ModelKind:
    if directory.architecture in ENCODERS:
        return ModelKind.VECTORS
    return ModelKind.SCORES if directory.architecture in RANKERS else ModelKind.TEXT


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    architecture: str
    fingerprint: ModelFingerprint
    eos_token_ids: tuple[int, ...]
    defaults: ModelDefaults
    tokenizer: Tokenizer
    chat: Chat
    tokenizer_config: Mapping[str, Any]
    """The content of tokenizer_config.json (`ModelDirectory.tokenizer_config`)."""
    constraints: ConstraintChecker
    executor: FairExecutor
    """Runs long work of callers, such as tokenizing."""
    kind: ModelKind = ModelKind.TEXT
    embedding: EmbeddingFiles | None = None
    """How the model makes vectors of texts, if that is its kind."""
    vector_size: int = 0

    @classmethod
    def open(
        cls,
        path: Path,
        name: str | None,
        executor: FairExecutor,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        takes_templates: bool = False,
    ) -> Self:
        """Reads a model directory; `executor` runs long work. With `takes_templates` a chat may have a template of its
        own. Formats that are not given are detected in the template.

        Raises:
            ConfigurationError: something is missing or malformed, in one line.
        """
        directory = ModelDirectory.open(path)
        name = name or directory.name
        trial, is_early = TrialProcess(directory.path), has_large_tables(directory)
        if is_early:
            trial.start()
        tokenizer = Tokenizer.open(directory, executor)
        texts = special_token_texts(directory.tokenizer_config)
        template, tool_template = (
            None if source is None else model_template(source, texts)
            for source in (directory.chat_template, directory.tool_chat_template)
        )
        return cls(
            name=name,
            architecture=directory.architecture,
            fingerprint=ModelFingerprint.read(directory),
            eos_token_ids=directory.eos_token_ids,
            defaults=model_defaults(directory),
            tokenizer=tokenizer,
            chat=Chat(
                name,
                template,
                tokenizer,
                executor,
                tool_template=tool_template,
                tool_format=tool_format,
                reasoning_format=reasoning_format,
                own_templates=TemplateProcess(texts) if takes_templates else None,
            ),
            tokenizer_config=directory.tokenizer_config,
            constraints=ConstraintChecker(trial, is_starting=is_early),
            executor=executor,
            kind=_kind_of(directory),
            embedding=(files := EmbeddingFiles.of(directory)),
            vector_size=0 if files is None else files.size(hidden_size_of(directory)),
        )
