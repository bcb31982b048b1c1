"""Chat messages to a prompt, by the template of the model directory and by nothing else."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.requests.request import ChatMessage
from quire.rpc.errors import FieldViolation, InvalidArgument
from quire.settings import ConfigurationError


class ChatTemplate:
    """A compiled chat template with the helpers that transformers gives to templates, in a sandbox. Thread-safe.

    Attributes:
        source: The Jinja template as the model directory has it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the texts of bos_token, eos_token and the like.

        Raises:
            ConfigurationError: the template is not valid Jinja.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigurationError(f"the model's chat template is invalid: {error}") from error

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The prompt that asks for the next assistant message; without `add_generation_prompt` the messages alone.

        Raises:
            InvalidArgument: the template refuses the messages, for example an unknown role.
        """
        conversation = [_fields(message) for message in messages]
        try:
            return self._template.render(
                messages=conversation,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            description = f"the model's chat template refuses the conversation: {error}"
            raise InvalidArgument(
                description, reason="CHAT_TEMPLATE", violations=[FieldViolation("messages", description)]
            ) from error


def _fields(message: ChatMessage) -> dict[str, str]:
    """The message as templates know it; they look whether there is a name."""
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else fields | {"name": message.name}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`, by which templates mark assistant text for training: just the text."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_GenerationTag.tags = {"generation"}


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
