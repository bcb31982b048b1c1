"""Chat messages to a prompt, by the template of the model directory and by nothing else."""

import asyncio
import functools
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gateway.request.types import ChatMessage
from gateway.text.tokenizer import Tokenizer
from quire.rpc.errors import FieldViolation, InvalidArgument
from quire.settings import ConfigurationError

# Up to this many characters are rendered on the event loop; more in a thread. A message costs some even if it is empty.
_INLINE_CHARACTERS = 4096
_CHARACTERS_OF_A_MESSAGE = 32
_SPECIAL_TOKEN_SECTIONS = ("extra_special_tokens", "model_specific_special_tokens")
# Two messages without a common character. The second one merges with a line break before it in some tokenizers.
_PROBES = ("a", "\n7")
_ASKED_ROLES = frozenset({"user", "tool"})


class ChatTemplate:
    """A compiled chat template with the helpers that transformers gives to templates, in a sandbox. Thread-safe.

    Attributes:
        source: The Jinja source in the model directory.
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
        """The prompt for the next assistant message; without `add_generation_prompt`, the messages alone.

        Raises:
            InvalidArgument: the template refuses the messages, for example an unknown role.
        """
        try:
            return self._template.render(
                messages=[_fields(message) for message in messages],
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


class Chat:
    """Conversations to token ids, as one model sees them.

    Attributes:
        template: None for a model without a chat template.
    """

    def __init__(
        self, model_name: str, template: ChatTemplate | None, tokenizer: Tokenizer, executor: Executor
    ) -> None:
        """`executor` renders long conversations."""
        self.template = template
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._executor = executor

    async def encode(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of the prompt that the template makes. The only special tokens are those that it writes.

        Without `add_generation_prompt` the prompt ends with the last message, not with the start of an answer.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the messages.
        """
        if self.template is None:
            description = f'cannot be used: model "{self._model_name}" has no chat template; send text instead'
            violation = FieldViolation("messages", description)
            raise InvalidArgument(f"messages {description}", reason="NO_CHAT_TEMPLATE", violations=[violation])
        render = functools.partial(self.template.render, messages, add_generation_prompt=add_generation_prompt)
        if _size(messages) <= _INLINE_CHARACTERS:
            text = render()
        else:
            text = await asyncio.get_running_loop().run_in_executor(self._executor, render)
        return await self._tokenizer.encode(text, add_special_tokens=False)

    async def encode_prefix(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The token ids with which the prompts of all conversations begin that continue these messages.

        Some templates change a message when others follow it, and some write a system message only together with the
        first user message. So the prefix is what two different continuations have in common, and the messages' own
        prompt where they end with a question. If the template knows none of the roles of these continuations, the
        prefix is the prompt of the messages alone.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the messages.
        """
        try:
            prompts = [await self.encode(conversation) for conversation in _continuations(messages)]
        except InvalidArgument:
            return await self.encode(messages, add_generation_prompt=False)
        return functools.reduce(common_prefix, prompts)


def special_token_texts(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by their names in templates.

    transformers writes a token as its text or as an object with `content`, and has sections for tokens that only some
    models have.
    """
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


def common_prefix(first: list[int], second: list[int]) -> list[int]:
    """The longest list with which both begin."""
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return first[:position]
    return min(first, second, key=len)


def _continuations(messages: Sequence[ChatMessage]) -> list[list[ChatMessage]]:
    """Conversations that begin with the messages and end with the user's turn."""
    if messages[-1].role not in _ASKED_ROLES:
        return [[*messages, ChatMessage("user", text)] for text in _PROBES]
    answered = [[*messages, ChatMessage("assistant", text), ChatMessage("user", "a")] for text in _PROBES]
    return [list(messages), *answered]


def _size(messages: Sequence[ChatMessage]) -> int:
    return sum(
        _CHARACTERS_OF_A_MESSAGE + len(message.role) + len(message.content) + len(message.name or "")
        for message in messages
    )


def _fields(message: ChatMessage) -> dict[str, str]:
    """The message for a template, without `name` if it has none: templates test whether it is defined."""
    fields = {"role": message.role, "content": message.content}
    return fields if message.name is None else fields | {"name": message.name}


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only the text."""

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
    """Jinja's own filter escapes HTML characters, which must not happen in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
