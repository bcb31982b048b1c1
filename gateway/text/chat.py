"""Renders conversations as prompts with the chat template of the model directory."""

import contextlib
import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn, Protocol, cast

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from google.protobuf import json_format

from gateway.auth.caller import current_tenant
from gateway.offload import FairExecutor
from gateway.text.bounded import MAX_MEMORY_BYTES, MAX_PROCESSOR_S, TookTooLong, bounded
from gateway.text.formats.answer import THINKING_MARKS, reasoning_format_of, tool_format_of
from gateway.text.formats.parser import Thinking
from gateway.text.formats.rendered import (
    PROBE_SCHEMA,
    PROBE_TOOLS,
    ProbeCall,
    RenderedCalls,
    num_common,
    rendered_calls,
    written_calls,
)
from gateway.text.formats.scanning import read_json
from gateway.text.formats.shapes import JSON_LIST, SHAPES
from gateway.text.tokenizer import Tokenizer, named_tokens
from gateway.turns import LONG_BYTES
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import TOOL_CHOICE_MODE_NONE, TemplateOptions, Tool, ToolCall
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import FieldViolation, InvalidArgument, invalid_field
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError

# Up to this many characters are rendered on the event loop; more in a thread. A message costs some even if it is empty.
_INLINE_CHARACTERS = 4096
_CHARACTERS_OF_A_MESSAGE = 32
# Maximum characters of a prompt: a constant for the template, and a number for each character of the conversation.
_OF_TEMPLATE, _TIMES_WRITTEN = 1 << 18, 5
_MAX_BITS = 1 << 16
# Two messages without a common character. Some tokenizers merge the second one with a line break before it.
_PROBES = ("a", "\n7")
_ASKED_ROLES = frozenset({"user", "tool"})
# OpenAI's newer name of the role system. Templates that do not have it leave out such a message, or refuse it.
_DEVELOPER = "developer"
# Marks the end of the message that an answer continues; the prompt is cut there. Templates may trim the space.
_END_OF_FINAL_MESSAGE = "\N{END OF TEXT}end of the final message\N{END OF TEXT} "
# Variables that the server sets for a template, in addition to the caller's arguments.
_OWN_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
# Many clients send these to every model. A template that does not read them renders the same prompt without them.
_HINTS = frozenset({"reasoning_effort"})
# Errors that a template raises for a conversation; RecursionError if its macros follow the schemas of tools.
_OF_PYTHON = ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError
_REFUSALS = (jinja2.TemplateError, *_OF_PYTHON)
# With these values the arguments are the default behaviour, so a template that does not read them is correct too.
_NO_REASONING = {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}


@dataclass(frozen=True, slots=True)
class _CallsAs:
    """The form of past calls for a template. `has_texts`: arguments as texts; `has_null`: null for no content;
    `has_thinking`: reasoning by this name next to calls with a content."""

    has_texts: bool = False
    has_null: bool = False
    has_thinking: bool = True


_FORMS = [_CallsAs(has_texts, has_null) for has_null in (False, True) for has_texts in (False, True)]


class ChatTemplate:
    """A compiled chat template with the helpers that transformers gives to templates, in a sandbox. Thread-safe.

    Attributes:
        source: The Jinja source in the model directory.
        variables: The names that the template reads.
        arguments: The variables that only a caller can set.
        calls: The calls that it renders; None if it leaves them out.
        tool_format: The format of the model's calls, detected in the template's output or text; None if it is unknown.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are the texts of bos_token, eos_token and the like.

        Raises:
            ConfigurationError: the template is not valid Jinja.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(tree)
        except (jinja2.TemplateError, RecursionError) as error:
            problem = " ".join(str(error).split())
            raise ConfigurationError(f"the model's chat template is invalid: {problem:.300}") from error
        self.variables = frozenset(name.name for name in tree.find_all(jinja2.nodes.Name) if name.ctx == "load")
        undeclared = jinja2.meta.find_undeclared_variables(tree)
        self.arguments = undeclared - _OWN_NAMES - environment.globals.keys() - self._special_tokens.keys()
        self._knows_developers = _DEVELOPER in source
        # Templates of models that read images may leave out a text that is not a part of a message's content.
        self._takes_parts = False
        if "type" in source and not self._shows_text():
            self._takes_parts = True
            self._takes_parts = self._shows_text()
        self._calls_as, self.calls = self._probed_calls() if "tool_calls" in source else (_CallsAs(), None)
        if "thinking" in source and self._tried(_REASONED, self._calls_as) is None:
            self._calls_as = replace(self._calls_as, has_thinking=False)
        self.tool_format = tool_format_of(
            self.calls, self._prompt_with_tools() if self.calls is None and "tools" in self.variables else ""
        )
        own = None if self.calls is None else self.calls.shape
        self._call_shape = own or SHAPES.get(self.tool_format or JSON_LIST, SHAPES[JSON_LIST])

    def render(self, prompt: ChatPrompt) -> str:
        """Renders a conversation as a prompt.

        Raises:
            InvalidArgument: the template refuses it, for example because of an unknown role, or would omit parts of it.
        """
        self._check(prompt)
        prompt = replace(prompt, messages=self._shown(prompt.messages))
        try:
            return self._render(prompt, self._calls_as)
        except _REFUSALS as error:
            # Some templates refuse a text in place of an object, or a result without the name of its tool.
            messages = [self._written(each) if _has_cut_calls(each) else each for each in prompt.messages]
            if (messages := _with_names(messages)) != prompt.messages:
                with contextlib.suppress(*_REFUSALS):
                    return self._render(replace(prompt, messages=messages), self._calls_as)
            description = f"the model's chat template refuses the conversation: {error!s:.1000}"
            raise _refusal("messages", description) from error

    def _check(self, prompt: ChatPrompt) -> None:
        """Raises InvalidArgument for tools, calls and arguments that the template would ignore."""
        if prompt.tools and "tools" not in self.variables:
            description = "cannot be used: the model's chat template has no tools"
            raise _refusal("tools", description, subject="tools", reason="NO_TOOLS")
        for position, message in enumerate(prompt.messages):
            if message.tool_calls and self.calls is None and "tools" not in self.variables:
                field = f"messages[{position}].tool_calls"
                description = "cannot be used: the model's chat template has no tool calls"
                raise _refusal(field, description, subject=field, reason="NO_TOOLS")
        reasons = reasoning_format_of(self.source) is not None
        for name, value in _arguments(prompt).items():
            field = f"template_options.arguments.{name:.80}"
            if name in _OWN_NAMES or name in self._special_tokens:
                raise invalid_field(field, "is set by the server; leave it out")
            asks_nothing = not reasons and name in _NO_REASONING and _NO_REASONING[name] == value
            if name not in self.variables and name not in _HINTS and not asks_nothing:
                shown = ", ".join(sorted(self.arguments)[:20]) or "none"
                raise invalid_field(field, f"is not read by the model's chat template, which reads: {shown}")

    def _shown(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """The messages in a form in which the template leaves no call out. If it writes one call per message, each
        message gets one call; if it writes none, the calls become part of the text, as the model writes them."""
        if not any(message.tool_calls for message in messages):
            return messages
        if self.calls is not None and len(self.calls.calls) == 1:
            messages = _with_one_call_each(messages)
        leaves_out, has_null = self.calls is None, self._calls_as.has_null
        is_left_out = (bool(each.tool_calls) and (leaves_out or (has_null and each.content)) for each in messages)
        return [self._written(each) if is_out else each for each, is_out in zip(messages, is_left_out, strict=True)]

    def _written(self, message: ChatMessage) -> ChatMessage:
        calls = written_calls(self._call_shape, [(call.name, call.arguments, call.id) for call in message.tool_calls])
        content = f"{message.content}\n{calls}" if message.content else calls
        return replace(message, content=content, tool_calls=())

    def _prompt_with_tools(self) -> str:
        """The prompt of a conversation with tools; empty if it is refused, or if it is the same without tools."""
        with_tools, without = (self._tried(ChatPrompt(_TEXT.messages, tools), _CallsAs()) for tools in (_PROBED, ()))
        return "" if with_tools is None or with_tools == without else with_tools

    def _probed_calls(self) -> tuple[_CallsAs, RenderedCalls | None]:
        """The form in which the template takes past calls, and the calls that it renders.

        Most templates write the arguments as JSON themselves; some take them as text. Some show calls only of messages
        whose content is null, or of messages that are not the last one. The first form with readable calls counts.
        """
        shown: list[tuple[_CallsAs, RenderedCalls]] = []
        for form in _FORMS:
            probes = (functools.partial(self._probe, form, has_results) for has_results in (False, True))
            calls = next(filter(None, map(rendered_calls, probes)), None)
            if calls is not None:
                if tool_format_of(calls) is not None:
                    return form, calls
                shown.append((form, calls))
        return shown[0] if shown else (_CallsAs(), None)

    def _probe(self, form: _CallsAs, has_results: bool, content: str, calls: Sequence[ProbeCall]) -> str | None:
        made = [ToolCall(id=call.id, name=call.name, arguments=_to_json(call.arguments)) for call in calls]
        messages = [*_TEXT.messages, ChatMessage("assistant", content, tool_calls=made)]
        if has_results:
            messages += [ChatMessage("tool", _RESULT, call.name, tool_call_id=call.id) for call in calls]
        options = None if has_results else _UNANSWERED
        text = self._tried(ChatPrompt(messages, _PROBED, template_options=options), form)
        return text and text.partition(_RESULT)[0]

    def _tried(self, prompt: ChatPrompt, form: _CallsAs) -> str | None:
        try:
            return self._render(prompt, form)
        except Exception:
            return None

    def _shows_text(self) -> bool:
        return _TEXT.messages[0].content in (self._tried(_TEXT, _CallsAs()) or "")

    def _render(self, prompt: ChatPrompt, form: _CallsAs) -> str:
        options = prompt.template_options or _NO_OPTIONS
        messages, continues = list(prompt.messages), options.continue_final_message
        if not self._knows_developers:
            messages = [replace(each, role="system") if each.role == _DEVELOPER else each for each in messages]
        if continues:
            messages[-1] = replace(messages[-1], content=messages[-1].content + _END_OF_FINAL_MESSAGE)
        begins = options.add_generation_prompt if options.HasField("add_generation_prompt") else not continues
        # Templates may test `documents` without asking whether it is defined.
        arguments = {"documents": None} | _arguments(prompt)
        text = self._template.render(
            **self._special_tokens,
            **arguments,
            messages=[_fields(message, form, self._takes_parts) for message in messages],
            tools=[_tool_fields(tool) for tool in prompt.tools] or None,
            add_generation_prompt=begins,
        )
        return _until_final_message(text, prompt.messages[-1].content) if continues else text


class OwnTemplates(Protocol):
    """Renders conversations by templates that their requests bring, isolated so that they do no harm. `render` is for
    threads."""

    def render(self, source: str, prompt: ChatPrompt) -> str: ...
    def close(self) -> None: ...


class Chat:
    """Converts conversations to token ids for one model.

    Attributes:
        template: None for a model without a chat template.
        tool_template: The template of conversations with tools or calls; often the same one.
        tool_format: The format of the model's tool calls; None if it is unknown.
        call_shape: The shape in which the template writes calls of that format; None if it writes no such calls.
        reasoning_format: The format of its reasoning; None if it does not reason, or if the format is unknown.
    """

    def __init__(
        self,
        model_name: str,
        template: ChatTemplate | None,
        tokenizer: Tokenizer,
        executor: FairExecutor,
        *,
        tool_template: ChatTemplate | None = None,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
        own_templates: OwnTemplates | None = None,
    ) -> None:
        """`executor` renders long conversations. `own_templates` renders conversations with the requests' templates,
        and is closed with this; without it such requests are refused. Formats that are not given are detected in the
        templates."""
        self.template = template
        self.tool_template = tool_template or template
        calls = None if self.tool_template is None else self.tool_template.calls
        detected = None if self.tool_template is None else self.tool_template.tool_format
        self.tool_format = tool_format or detected
        self.call_shape = calls.shape if calls is not None and self.tool_format == detected else None
        self.reasoning_format = reasoning_format or reasoning_format_of("" if template is None else template.source)
        self._model_name = model_name
        self._tokenizer = tokenizer
        self._executor = executor
        self._own_templates = own_templates
        # Such templates may take seconds, one at a time, so other work must not wait behind them.
        self._own_executor = FairExecutor(1)

    def close(self) -> None:
        """Ends the executor and the process that render templates of requests."""
        self._own_executor.shutdown()
        if self._own_templates is not None:
            self._own_templates.close()

    async def render(self, prompt: ChatPrompt) -> str:
        """The text of the rendered prompt.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the conversation.
        """
        choice = prompt.tool_choice
        if choice is not None and choice.mode == TOOL_CHOICE_MODE_NONE:
            # Without tools in its prompt a model makes no calls.
            prompt = replace(prompt, tools=())
        if prompt.template is not None:
            if self._own_templates is None:
                description = "is set; this gateway takes no templates of requests (--request-chat-templates)"
                raise invalid_field("chat_template", description)
            # All renderings count as long work of similar size, since a short template may take as long as a long one.
            size = LONG_BYTES + 1 + _size(prompt) + len(prompt.template)
            render = self._own_templates.render
            return await self._own_executor.run(current_tenant(), size, render, prompt.template, prompt)
        template = self.template
        if prompt.tools or any(message.tool_calls for message in prompt.messages):
            template = self.tool_template
        if template is None:
            description = f'cannot be used: model "{self._model_name}" has no chat template; send text instead'
            raise _refusal("messages", description, subject="messages", reason="NO_CHAT_TEMPLATE")
        size = _size(prompt)
        if size <= _INLINE_CHARACTERS:
            return _written(template, prompt, size)
        return await self._executor.run(current_tenant(), size, _written, template, prompt, size)

    async def encode(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of the rendered prompt. As in transformers, text that reads like a special token becomes that
        token, also in a user's message, unless tokenizer_config.json has `split_special_tokens`.

        Raises:
            InvalidArgument: as `render` does.
        """
        return await self.encode_text(await self.render(prompt))

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of a rendered prompt."""
        return await self._tokenizer.encode(text, add_special_tokens=False)

    def thinking_after(self, prompt: ChatPrompt, text: str) -> Thinking:
        """Whether an answer to the rendered prompt `text` begins before, in or after the reasoning."""
        marks = THINKING_MARKS.get(self.reasoning_format or "")
        options = prompt.template_options
        if marks is None:
            return Thinking.MAY_BEGIN
        if options is not None and options.continue_final_message:
            written = prompt.messages[-1].content
            begin, end = written.rfind(marks.begin), written.rfind(marks.end)
            return Thinking.BEGUN if begin > end else Thinking.NONE
        tail = text.rstrip()
        if tail.endswith(marks.begin) or (marks.label and tail.endswith(marks.begin + marks.label)):
            return Thinking.BEGUN
        return Thinking.NONE if tail.endswith(marks.end) else Thinking.MAY_BEGIN

    async def encode_prefix(self, prompt: ChatPrompt) -> list[int]:
        """The common prefix, in token ids, of the prompts of all conversations that continue this one.

        Some templates change a message when others follow it, and some write a system message only together with the
        first user message. So the prefix is the common part of two different continuations, or the prompt of the
        messages if they end with a user message. If the template accepts no role of these continuations, the prefix is
        the prompt of only the messages.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the messages.
        """
        try:
            prompts = [
                await self.encode(replace(prompt, messages=messages)) for messages in _continuations(prompt.messages)
            ]
        except InvalidArgument:
            options = copy.deepcopy(prompt.template_options or _NO_OPTIONS)
            options.add_generation_prompt = False
            return await self.encode(replace(prompt, template_options=options))
        size = len(prompts[0])
        if size <= _INLINE_CHARACTERS:
            return functools.reduce(common_prefix, prompts)
        return await self._executor.run(current_tenant(), size, functools.reduce, common_prefix, prompts)


def special_token_texts(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by their names in templates. Raises ConfigurationError for a malformed token."""
    tokens = named_tokens(tokenizer_config)
    return {name: token.content for name, token in tokens.items() if name.endswith("_token")}


def common_prefix(first: list[int], second: list[int]) -> list[int]:
    return first[: num_common(first, second)]


def _continuations(messages: Sequence[ChatMessage]) -> list[list[ChatMessage]]:
    """Conversations that begin with the messages and end with the user's turn."""
    if messages[-1].role not in _ASKED_ROLES:
        return [[*messages, ChatMessage("user", text)] for text in _PROBES]
    answered = [[*messages, ChatMessage("assistant", text), ChatMessage("user", "a")] for text in _PROBES]
    return [list(messages), *answered]


def model_template(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The chat template of a model's files, which may be a program that does harm.

    Raises:
        ConfigurationError: it is not valid Jinja, or takes too much time or memory.
    """
    try:
        with bounded():
            return ChatTemplate(source, special_tokens)
    except (TookTooLong, MemoryError, OverflowError) as error:
        raise ConfigurationError(f"the model's chat template takes {_excess(error)} to render a short chat") from error


def _excess(error: BaseException) -> str:
    if isinstance(error, TookTooLong):
        return f"more than {MAX_PROCESSOR_S} s of processor time"
    return f"more than {shown_bytes(MAX_MEMORY_BYTES)} of memory"


def _written(template: ChatTemplate, prompt: ChatPrompt, size: int) -> str:
    """The prompt of a conversation of `size`. Raises InvalidArgument as `ChatTemplate.render`, and for a prompt much
    longer than its conversation: the tokenizer takes more than a hundred bytes for each character."""
    try:
        with bounded():
            text = template.render(prompt)
    except (TookTooLong, MemoryError, OverflowError) as error:
        description = f"the model's chat template takes {_excess(error)} to render the conversation; make it simpler"
        raise _refusal("messages", description) from error
    if len(text) > _OF_TEMPLATE + _TIMES_WRITTEN * size:
        description = (
            f"becomes {len(text):,} characters by the model's chat template, which indents JSON by its depth; make the "
            "parameters of tools, or the arguments of calls, less deep"
        )
        raise _refusal("tools" if prompt.tools else "messages", description, subject="the conversation")
    return text


def _size(prompt: ChatPrompt) -> int:
    size = 0 if prompt.template_options is None else prompt.template_options.ByteSize()
    size += sum(_CHARACTERS_OF_A_MESSAGE + len(tool.description) + len(tool.parameters) for tool in prompt.tools)
    for message in prompt.messages:
        size += _CHARACTERS_OF_A_MESSAGE + len(message.content) + len(message.reasoning or "")
        size += sum(_CHARACTERS_OF_A_MESSAGE + len(call.arguments) for call in message.tool_calls)
    return size


def _fields(message: ChatMessage, form: _CallsAs, takes_parts: bool) -> dict[str, Any]:
    """The message for a template, without its empty fields: templates test whether a field is defined."""
    content = [{"type": "text", "text": message.content}] if takes_parts else message.content
    if form.has_null and message.tool_calls and not message.content:
        content = None
    fields: dict[str, Any] = {"role": message.role, "content": content}
    if message.name is not None:
        fields["name"] = message.name
    if message.tool_calls:
        fields["tool_calls"] = [_call_fields(call, form) for call in message.tool_calls]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        # Templates use three names for the reasoning.
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
        if form.has_thinking or not (message.tool_calls and message.content):
            fields["thinking"] = message.reasoning
    return fields


def _object_of(arguments: str) -> dict[str, Any] | None:
    """The arguments of a call; None if they are not an object, for example because max_tokens cut them off."""
    try:
        value: Any = read_json(arguments or "{}")
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _has_cut_calls(message: ChatMessage) -> bool:
    return any(_object_of(call.arguments) is None for call in message.tool_calls)


def _with_names(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with the names of their tools in the results."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    return [
        replace(each, name=names[each.tool_call_id]) if each.name is None and each.tool_call_id in names else each
        for each in messages
    ]


def _with_one_call_each(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """The messages with one call each: several calls become several messages, each followed by its result."""
    made: list[ChatMessage] = []
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if len(message.tool_calls) < 2:
            made.append(message)
            continue
        ids = {call.id for call in message.tool_calls}
        count = next((place for place, each in enumerate(rest) if each.tool_call_id is None), len(rest))
        results, rest = rest[:count], rest[count:]
        for call in message.tool_calls:
            made += [replace(message, tool_calls=[call]), *(each for each in results if each.tool_call_id == call.id)]
            message = replace(message, content="", reasoning=None)
        made += [each for each in results if each.tool_call_id not in ids]
    return made


def _call_fields(call: ToolCall, form: _CallsAs) -> dict[str, Any]:
    values = None if form.has_texts else _object_of(call.arguments)
    arguments = call.arguments if values is None else values
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _tool_fields(tool: Tool) -> dict[str, Any]:
    parameters = json.loads(tool.parameters) if tool.parameters else {"type": "object", "properties": {}}
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _arguments(prompt: ChatPrompt) -> dict[str, Any]:
    """The arguments of a template; whole numbers of a message become integers, as they are in JSON."""
    options = prompt.template_options
    if prompt.template_arguments is not None:
        return dict(prompt.template_arguments)
    if options is not None and options.HasField("arguments_json"):
        return read_json(options.arguments_json)
    if options is None or not options.HasField("arguments"):
        return {}
    return _with_integers(json_format.MessageToDict(options.arguments))


def _with_integers(value: Any) -> Any:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_with_integers(each) for each in value]
        case dict():
            return {name: _with_integers(each) for name, each in value.items()}
    return value


def _until_final_message(text: str, content: str) -> str:
    """The prompt up to the end of the message that the answer continues.

    Raises ValueError if the template did not write that message unchanged.
    """
    mark = _END_OF_FINAL_MESSAGE.rstrip()
    end = text.rfind(mark)
    if end < 0 or content.strip() not in text:
        raise ValueError("continue_final_message is set, but the template changes the last message")
    is_as_written = text.startswith(_END_OF_FINAL_MESSAGE, end)
    return text[:end] if is_as_written else text[:end].rstrip()


def _refusal(field: str, description: str, *, subject: str = "", reason: str = "CHAT_TEMPLATE") -> InvalidArgument:
    """An error. `subject` precedes the description in the message; the violation names the field itself."""
    violations = [FieldViolation(field, description)]
    return InvalidArgument(f"{subject} {description}".lstrip(), reason=reason, violations=violations)


_NO_OPTIONS = TemplateOptions()
_TEXT = ChatPrompt([ChatMessage("user", "aQ7")])
_PROBED = [Tool(name=name, description="d", parameters=json.dumps(PROBE_SCHEMA)) for name in PROBE_TOOLS]
_RESULT = "Quire result"
_UNANSWERED = TemplateOptions(add_generation_prompt=False)
_REASONED_CALL = ToolCall(id="abcdefgh1", name=PROBE_TOOLS[0], arguments="{}")
_REASONED = ChatPrompt(
    [
        *_TEXT.messages,
        ChatMessage("assistant", "aQ8", tool_calls=[_REASONED_CALL], reasoning="aQ9"),
        ChatMessage("tool", _RESULT, _REASONED_CALL.name, tool_call_id=_REASONED_CALL.id),
    ],
    _PROBED,
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only the text."""

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_GenerationTag.tags = {"generation"}


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of transformers, with a limit on the bits of integers, so that arithmetic ends at once."""

    intercepted_binops = frozenset(("**", "*"))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            size = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if size > _MAX_BITS:
                raise OverflowError(f"an integer of {size:,} bits")
        return super().call_binop(context, operator, left, right)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception  # pyrefly: ignore[unsupported-operation]
    environment.globals["strftime_now"] = _strftime_now  # pyrefly: ignore[unsupported-operation]
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.fromtimestamp(clock.unix_s()).strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML characters, which must not happen in a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
