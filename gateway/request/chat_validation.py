"""Validates the parts of chats that are not texts: tools, calls and their results, and options of the template."""

import json
import re
from collections.abc import Sequence, Set
from typing import Any, cast

from google.protobuf.json_format import MessageToDict

from gateway.request.counting import MAX_VALUES_OF_OBJECTS, MAX_VALUES_OF_TEXTS, num_values_in
from gateway.request.limits import MAX_CALL_ID_LENGTH, MAX_TOOL_SCHEMA_BYTES, MAX_TOOLS
from gateway.request.violations import Violations, shortened
from gateway.text.formats.scanning import read_json, write_json
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import (
    TOOL_CHOICE_MODE_NONE,
    TOOL_CHOICE_MODE_REQUIRED,
    TemplateOptions,
    Tool,
    ToolChoice,
    ToolChoiceMode,
)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "it must be 1 to 64 characters of [A-Za-z0-9_.-]"
_CALLER = "assistant"


def check_chat(violations: Violations, prompt: ChatPrompt, field: str) -> None:
    """Checks a conversation whose messages are in `field`, except their texts."""
    scope = field.removesuffix("messages")
    _check_calls(violations, prompt.messages, field)
    _check_tools(violations, prompt, scope)
    _check_template_options(violations, prompt, scope)


def check_constraints(violations: Violations, prompt: ChatPrompt, *, has_constraint: bool) -> None:
    """Checks that at most one field constrains the answer."""
    if not has_constraint:
        return
    if prompt.response_format is not None:
        violations.add("response_format", "is set, and sampling.constraint too; set one of them")
    choice = prompt.tool_choice
    if choice is not None and (choice.name or choice.mode == TOOL_CHOICE_MODE_REQUIRED):
        violations.add("tool_choice", "requires a call, which sampling.constraint may not allow; set one of them")


def _check_calls(violations: Violations, messages: Sequence[ChatMessage], field: str) -> None:
    """Checks that only the assistant makes calls, and that each result belongs to an earlier call."""
    known: set[str] = set()
    num_values = 0
    for position, message in enumerate(messages):
        if violations.are_enough:
            return
        path = f"{field}[{position}]"
        if message.tool_calls and message.role != _CALLER:
            violations.add(f"{path}.tool_calls", f'is set for role "{shortened(message.role)}"; only {_CALLER} calls')
        if message.reasoning is not None:
            violations.check_text(f"{path}.reasoning", message.reasoning)
        if violations.check_count(f"{path}.tool_calls", message.tool_calls, MAX_TOOLS):
            ids = {call.id for call in message.tool_calls}
            if len(ids) < len(message.tool_calls):
                violations.add(f"{path}.tool_calls", "have two calls with the same id; ids must be unique")
            known |= ids
        for number, call in enumerate(message.tool_calls[:MAX_TOOLS]):
            where = f"{path}.tool_calls[{number}]"
            if not call.id:
                violations.add(f"{where}.id", "is empty; it must be the id by which the result refers to the call")
            if len(call.id) > MAX_CALL_ID_LENGTH:
                violations.add(f"{where}.id", f"has {len(call.id):,} characters; the max is {MAX_CALL_ID_LENGTH}")
            if not _NAME.fullmatch(call.name):
                violations.add(f"{where}.name", f'is "{shortened(call.name)}"; {_NAME_RULE}')
            num_values += num_values_in(call.arguments)
            if num_values > MAX_VALUES_OF_TEXTS:
                _add_too_many_values(violations, f"{where}.arguments", num_values)
                return
        if message.tool_call_id is not None and message.tool_call_id not in known:
            violations.add(
                f"{path}.tool_call_id",
                f'names the call "{shortened(message.tool_call_id)}", which no message before it has',
            )


def _check_tools(violations: Violations, prompt: ChatPrompt, scope: str) -> None:
    field = f"{scope}tools"
    if not violations.check_count(field, prompt.tools, MAX_TOOLS):
        return
    names: set[str] = set()
    num_values = 0
    for position, tool in enumerate(prompt.tools):
        if violations.are_enough:
            return
        path = f"{field}[{position}]"
        if not _NAME.fullmatch(tool.name):
            violations.add(f"{path}.name", f'is "{shortened(tool.name)}"; {_NAME_RULE}')
        elif tool.name in names:
            violations.add(f"{path}.name", f'is "{tool.name}", like an earlier tool\'s name; names must be unique')
        names.add(tool.name)
        if not violations.check_size(f"{path}.parameters", [tool.parameters], MAX_TOOL_SCHEMA_BYTES):
            continue
        num_values += num_values_in(tool.parameters)
        if num_values > MAX_VALUES_OF_TEXTS:
            _add_too_many_values(violations, f"{path}.parameters", num_values)
            return
        _check_parameters(violations, f"{path}.parameters", tool)
    if prompt.tool_choice is not None:
        _check_tool_choice(violations, prompt.tool_choice, names)


def _check_tool_choice(violations: Violations, choice: ToolChoice, names: Set[str]) -> None:
    shown = ", ".join(map(shortened, sorted(names)[:10])) or "none"
    if choice.allowed and (choice.name or choice.mode == TOOL_CHOICE_MODE_NONE):
        violations.add("tool_choice.allowed", "is set; it has a meaning only with the modes auto and required")
    violations.check_count("tool_choice.allowed", choice.allowed, MAX_TOOLS)
    for position, name in enumerate(choice.allowed[:MAX_TOOLS]):
        if violations.are_enough:
            return
        if name not in names:
            violations.add(f"tool_choice.allowed[{position}]", f'is "{shortened(name)}"; the tools are: {shown}')
    if choice.WhichOneof("choice") == "name":
        if choice.name not in names:
            violations.add("tool_choice.name", f'is "{shortened(choice.name)}"; the tools are: {shown}')
    elif choice.mode not in ToolChoiceMode.values():
        known = ", ".join(ToolChoiceMode.keys()[1:])
        violations.add("tool_choice.mode", f"is {choice.mode}; it must be one of {known}")
    elif choice.mode == TOOL_CHOICE_MODE_REQUIRED and not names:
        violations.add("tool_choice.mode", "requires a call, and there are no tools; set tools")


def _check_parameters(violations: Violations, path: str, tool: Tool) -> None:
    if tool.parameters:
        try:
            schema: Any = read_json(tool.parameters)
        except ValueError:
            schema = None
        if not isinstance(schema, dict):
            violations.add(path, f"is {shortened(tool.parameters)!r}; it must be a JSON schema, which is a JSON object")
        elif (kind := cast(dict[str, Any], schema).get("type", "object")) != "object":
            shown = shortened(json.dumps(kind))
            violations.add(f"{path}.type", f"is {shown}; arguments are an object, so it must be object, or absent")


def _check_template_options(violations: Violations, prompt: ChatPrompt, scope: str) -> None:
    options = prompt.template_options
    if options is None:
        return
    try:
        MessageToDict(options.arguments)
    except ValueError:
        violations.add(f"{scope}template_options.arguments", "has NaN or infinity, which JSON does not have")
    if options.HasField("arguments_json"):
        _check_arguments_json(violations, options, f"{scope}template_options.arguments_json")
    if not options.continue_final_message:
        return
    field = f"{scope}template_options.continue_final_message"
    if options.add_generation_prompt:
        violations.add(field, "is true, and add_generation_prompt too; an answer continues a message or begins one")
    if prompt.messages and prompt.messages[-1].tool_calls:
        violations.add(field, "is true, and the last message has tool calls; only text can be continued")


def _check_arguments_json(violations: Violations, options: TemplateOptions, field: str) -> None:
    text, max_values = options.arguments_json, MAX_VALUES_OF_OBJECTS["chat_template_kwargs"]
    if options.HasField("arguments"):
        violations.add(field, "is set, and arguments too; set only one of them")
    elif (num_values := num_values_in(text)) > max_values:
        violations.add(field, f"has {num_values:,} values; the max is {max_values:,}")
    else:
        problem = ""
        try:
            value: Any = read_json(text)
            # Python reads 1e999 as infinity.
            write_json(value)
        except ValueError as error:
            value, problem = None, f" ({error})"
        if not isinstance(value, dict):
            violations.add(field, f"is {shortened(text)!r}{problem}; it must be a JSON object")


def _add_too_many_values(violations: Violations, path: str, num_values: int) -> None:
    """Reports too many JSON values in texts, which the count of values of the message does not include."""
    violations.add(
        path, f"has with all before it {num_values:,} values in its JSON; the max is {MAX_VALUES_OF_TEXTS:,}"
    )
