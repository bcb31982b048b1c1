"""The served model without its weights: name, tokenizer, chat template, defaults."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gateway.offload import FairExecutor
from gateway.request.constraint_checker import ConstraintChecker, TrialProcess
from gateway.request.validation import check_numbers
from gateway.request.violations import Violations
from gateway.text.chat import Chat, ChatTemplate, special_token_texts
from gateway.text.request_template import TemplateProcess
from gateway.text.tokenizer import Tokenizer
from gateway.types import RequestOptions, write
from quire.common.v1.common_pb2 import SamplingParameters
from quire.compatibility import ModelFingerprint
from quire.constraints.token_cache import has_large_tables
from quire.model_directory import ModelDirectory
from quire.settings import ConfigurationError

_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling parameters in generation_config.json, by the names that they have in requests too."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    architecture: str
    fingerprint: ModelFingerprint
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingParameters
    tokenizer: Tokenizer
    chat: Chat
    tokenizer_config: Mapping[str, Any]
    """The content of tokenizer_config.json (`ModelDirectory.tokenizer_config`)."""
    constraints: ConstraintChecker
    executor: FairExecutor
    """Runs long work of callers, such as tokenizing."""

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
        own. Formats that are not given are those of the template.

        Raises:
            ConfigurationError: something is missing or malformed, in one line.
        """
        directory = ModelDirectory.open(path)
        name = name or directory.name
        trial = TrialProcess(directory.path)
        if has_large_tables(directory):
            trial.start()
        tokenizer = Tokenizer.open(directory, executor)
        texts = special_token_texts(directory.tokenizer_config)
        template, tool_template = (
            None if source is None else ChatTemplate(source, texts)
            for source in (directory.chat_template, directory.tool_chat_template)
        )
        return cls(
            name=name,
            architecture=directory.architecture,
            fingerprint=ModelFingerprint.read(directory),
            eos_token_ids=directory.eos_token_ids,
            sampling_defaults=_sampling_defaults(directory),
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
            constraints=ConstraintChecker(trial),
            executor=executor,
        )


def _sampling_defaults(directory: ModelDirectory) -> SamplingParameters:
    """The sampling parameters of generation_config.json; `do_sample: false` is greedy.

    Raises:
        ConfigurationError: a value is not a number, or out of the range of the request field.
    """
    given, file = directory.generation_defaults, directory.path
    file = file / "generation_config.json" if file.is_dir() else file
    if given.get("top_k") == -1:
        # All tokens, as vLLM writes it, in requests too.
        given = {**given, "top_k": 0}
    for name in _DEFAULTS:
        value = given.get(name, 1)
        kind, expected = (int, "an integer") if name == "top_k" else (int | float, "a number")
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ConfigurationError(f"{name} in {file} is {value!r}, not {expected}")
    defaults = SamplingParameters()
    as_written: dict[str, Any] = {}
    for name in _DEFAULTS:
        write(defaults, f"sampling.{name}", given.get(name), as_written)
    if given.get("do_sample") is False:
        write(defaults, "sampling.temperature", 0.0, as_written)
    violations = Violations()
    check_numbers(violations, RequestOptions(None, sampling=defaults, as_written=as_written))
    for violation in violations.found:
        raise ConfigurationError(f"{violation.field.removeprefix('sampling.')} in {file} {violation.description}")
    return defaults
