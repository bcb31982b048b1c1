"""The served model, as far as the gateway knows it: names, text, defaults. No weights."""

import asyncio
import functools
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from gateway.requests.request import ChatMessage, SamplingOptions
from gateway.requests.validation import check_defaults
from gateway.requests.violations import Violations
from gateway.text.chat_template import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from quire.compatibility import ModelFingerprint
from quire.model_directory import ModelDirectory
from quire.rpc.errors import FieldViolation, InvalidArgument
from quire.settings import ConfigurationError

_INLINE_CHARACTERS = 4096
_CHARACTERS_OF_A_MESSAGE = 32
_SPECIAL_TOKEN_SECTIONS = ("extra_special_tokens", "model_specific_special_tokens")


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    architecture: str
    fingerprint: ModelFingerprint
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingOptions
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tokenizer_config: Mapping[str, Any]
    """What tokenizer_config.json says (`ModelDirectory.tokenizer_config`)."""
    executor: Executor

    @classmethod
    def open(cls, path: Path, name: str | None, executor: Executor) -> Self:
        """Reads a model directory; `executor` runs what takes long.

        Raises:
            ConfigurationError: something is missing or broken, in one line.
        """
        directory = ModelDirectory.open(path)
        template = None
        if directory.chat_template is not None:
            template = ChatTemplate(directory.chat_template, _special_tokens(directory.tokenizer_config))
        return cls(
            name=name or directory.name,
            architecture=directory.architecture,
            fingerprint=ModelFingerprint.read(directory),
            eos_token_ids=directory.eos_token_ids,
            sampling_defaults=_sampling_defaults(directory),
            tokenizer=Tokenizer.open(directory.tokenizer_file(), executor, directory.tokenizer_config),
            chat_template=template,
            tokenizer_config=directory.tokenizer_config,
            executor=executor,
        )

    async def encode_chat(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the prompt that the chat template makes; special tokens are what the template writes.

        Without `add_generation_prompt` it ends with the last message, and not with the start of an answer.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            description = f'cannot be used: model "{self.name}" has no chat template; send text instead'
            violation = FieldViolation("messages", description)
            raise InvalidArgument(f"messages {description}", reason="NO_CHAT_TEMPLATE", violations=[violation])
        render = functools.partial(self.chat_template.render, messages, add_generation_prompt=add_generation_prompt)
        if _size(messages) <= _INLINE_CHARACTERS:
            text = render()
        else:
            text = await asyncio.get_running_loop().run_in_executor(self.executor, render)
        return await self.tokenizer.encode(text, add_special_tokens=False)


def _size(messages: Sequence[ChatMessage]) -> int:
    """In characters, of which a message takes some even where it has none itself."""
    return sum(
        _CHARACTERS_OF_A_MESSAGE + len(message.role) + len(message.content) + len(message.name or "")
        for message in messages
    )


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by their names in templates; transformers writes them as text or as an object with
    `content`, and those that only some models have in a section of their own."""
    named = dict(tokenizer_config)
    for section in _SPECIAL_TOKEN_SECTIONS:
        if isinstance(further := tokenizer_config.get(section), dict):
            named |= further
    found: dict[str, str] = {}
    for name, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _sampling_defaults(directory: ModelDirectory) -> SamplingOptions:
    """What generation_config.json says about sampling; `do_sample: false` is greedy.

    Raises:
        ConfigurationError: a value is not a number, or out of the range that a caller may ask for.
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
