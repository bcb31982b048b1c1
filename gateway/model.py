"""The served model without its weights: name, tokenizer, chat template, defaults."""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gateway.requests.request import SamplingOptions
from gateway.requests.validation import check_defaults
from gateway.requests.violations import Violations
from gateway.text.chat import Chat, ChatTemplate, special_token_texts
from gateway.text.tokenizer import Tokenizer
from quire.compatibility import ModelFingerprint
from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    architecture: str
    fingerprint: ModelFingerprint
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingOptions
    tokenizer: Tokenizer
    chat: Chat
    tokenizer_config: Mapping[str, Any]
    """The content of tokenizer_config.json (`ModelDirectory.tokenizer_config`)."""
    executor: Executor
    """Runs long tokenization and rendering."""

    @classmethod
    def open(cls, path: Path, name: str | None, executor: Executor) -> Self:
        """Reads a model directory; `executor` runs long work.

        Raises:
            ConfigurationError: something is missing or malformed, in one line.
        """
        directory = ModelDirectory.open(path)
        name = name or directory.name
        tokenizer = Tokenizer.open(directory.tokenizer_file(), executor, directory.tokenizer_config)
        template = None
        if directory.chat_template is not None:
            template = ChatTemplate(directory.chat_template, special_token_texts(directory.tokenizer_config))
        return cls(
            name=name,
            architecture=directory.architecture,
            fingerprint=ModelFingerprint.read(directory),
            eos_token_ids=directory.eos_token_ids,
            sampling_defaults=_sampling_defaults(directory),
            tokenizer=tokenizer,
            chat=Chat(name, template, tokenizer, executor),
            tokenizer_config=directory.tokenizer_config,
            executor=executor,
        )


def _sampling_defaults(directory: ModelDirectory) -> SamplingOptions:
    """The sampling parameters of generation_config.json; `do_sample: false` is greedy.

    Raises:
        ConfigurationError: a value is not a number, or out of the range of the request field.
    """
    given, file = directory.generation_defaults, directory.path / "generation_config.json"
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = given.get(name, 1)
        kind, expected = (int, "an integer") if name == "top_k" else (int | float, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigurationError(f"{name} in {file} is {value!r}, not {expected}")
    defaults = SamplingOptions(
        temperature=0.0 if given.get("do_sample") is False else given.get("temperature"),
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        min_p=given.get("min_p"),
        repetition_penalty=given.get("repetition_penalty"),
    )
    violations = Violations()
    check_defaults(violations, defaults)
    for violation in violations.found:
        raise ConfigurationError(f"{violation.field.removeprefix('sampling.')} in {file} {violation.description}")
    return defaults
