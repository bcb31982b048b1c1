"""The served model without its weights: name, tokenizer, chat template, defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gateway.offload import FairExecutor
from gateway.request.constraint_checker import ConstraintChecker, TrialProcess
from gateway.request.generation_config import ModelDefaults, model_defaults
from gateway.text.chat import Chat, common_prefix, model_template, special_token_texts
from gateway.text.request_template import TemplateProcess
from gateway.text.tokenizer import Tokenizer
from gateway.types import ChatMessage, ChatPrompt, ModelKind
from quire.constraints.token_cache import has_large_tables
from quire.gateway.v1.generation_pb2 import TemplateOptions
from quire.model_files.architectures import ENCODERS, RANKERS
from quire.model_files.embedding_files import EmbeddingFiles, RankingFiles, hidden_size_of, vector_files
from quire.model_files.model_directory import ModelDirectory
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError
from quire.service.compatibility import ModelFingerprint

_PAIR_ROLES = ("query", "document")
_PLAIN = TemplateOptions(add_generation_prompt=False)


def _kind_of(files: EmbeddingFiles | RankingFiles | None) -> ModelKind:
    if files is None:
        return ModelKind.TEXT
    return ModelKind.VECTORS if isinstance(files, EmbeddingFiles) else ModelKind.SCORES


@dataclass(frozen=True, slots=True)
class Pairs:
    """Makes the prompts of pairs of texts for a model that ranks.

    Attributes:
        chat: makes a prompt with the model's chat template; None if the tokenizer joins the texts.
        prompt: comes before each query, or is the system message of the template.
        ending: the tokens that the template puts behind each document; a text that is cut keeps them.
    """

    tokenizer: Tokenizer
    chat: Chat | None = None
    prompt: str = ""
    ending: tuple[int, ...] = ()

    @classmethod
    def open(cls, files: RankingFiles, directory: ModelDirectory, tokenizer: Tokenizer, chat: Chat) -> Self:
        """Raises ConfigurationError if the model has no template that it needs, or one without query and document."""
        if not files.has_template:
            return cls(tokenizer, None, files.prompt)
        pairs = cls(tokenizer, chat, files.prompt)
        template, probes = chat.template, (("0", "0"), ("1 2 3 4", "0"), ("0", "1 2 3 4"))
        try:
            texts = [] if template is None else [template.render(pairs.messages(*pair)) for pair in probes]
        except InvalidArgument as error:
            raise ConfigurationError(f"{directory.path}: {error!s:.300}") from error
        if len({*texts}) < len(probes):
            raise ConfigurationError(
                f"the chat template of {directory.path} does not show messages of the roles query and document, of "
                "which a model that ranks texts gets one each; a chat_template.jinja that does is needed, or "
                "--score-template"
            )
        first, *_, last = (tokenizer.encode_now(text) for text in texts)
        ending = common_prefix(first[::-1], last[::-1])[::-1]
        return cls(tokenizer, chat, files.prompt, tuple(ending))

    def messages(self, query: str, document: str) -> ChatPrompt:
        pair = [ChatMessage(role, text) for role, text in zip(_PAIR_ROLES, (query, document), strict=True)]
        system = [ChatMessage("system", self.prompt)] if self.prompt else []
        return ChatPrompt([*system, *pair], template_options=_PLAIN)

    async def encode(self, query: str, document: str) -> list[int]:
        """The token ids of a pair. Raises InvalidArgument if the template refuses it."""
        if self.chat is None:
            return await self.tokenizer.encode_pair(self.prompt + query, document)
        return await self.chat.encode(self.messages(query, document))


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
    pairs: Pairs | None = None
    """Makes prompts of pairs of texts, if the model ranks."""

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
        pooling: str = "auto",
        score_tokens: Sequence[str] = (),
        score_template: Path | None = None,
    ) -> Self:
        """Reads a model directory; `executor` runs long work; `pooling` and `score_tokens` are as in `vector_files`;
        `score_template` has a template for pairs. With `takes_templates` a chat may have a template of its own. Formats
        that are not given are detected in the template.

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
            for source in (_score_template(score_template) or directory.chat_template, directory.tool_chat_template)
        )
        files, fingerprint = vector_files(directory, pooling, score_tokens), ModelFingerprint.read(directory)
        if score_template is not None and not (isinstance(files, RankingFiles) and files.has_template):
            raise ConfigurationError(
                f"--score-template is {score_template}, and {directory.path} ranks nothing by a template; "
                "--score-tokens makes a model that generates text one that does"
            )
        if files is not None and directory.architecture not in (ENCODERS | RANKERS):
            fingerprint = fingerprint.with_vectors(files)
        chat = Chat(
            name,
            template,
            tokenizer,
            executor,
            tool_template=tool_template,
            tool_format=tool_format,
            reasoning_format=reasoning_format,
            own_templates=TemplateProcess(texts) if takes_templates else None,
        )
        return cls(
            name=name,
            architecture=directory.architecture,
            fingerprint=fingerprint,
            eos_token_ids=directory.eos_token_ids,
            defaults=model_defaults(directory),
            tokenizer=tokenizer,
            chat=chat,
            tokenizer_config=directory.tokenizer_config,
            constraints=ConstraintChecker(trial, is_starting=is_early),
            executor=executor,
            kind=_kind_of(files),
            embedding=files if isinstance(files, EmbeddingFiles) else None,
            vector_size=files.size(hidden_size_of(directory)) if isinstance(files, EmbeddingFiles) else 0,
            pairs=Pairs.open(files, directory, tokenizer, chat) if isinstance(files, RankingFiles) else None,
        )


def _score_template(path: Path | None) -> str | None:
    """Raises ConfigurationError if the file cannot be read."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--score-template {path}: {error}") from error
