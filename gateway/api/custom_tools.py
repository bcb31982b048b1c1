"""OpenAI's custom tools: tools whose input is a text, free or constrained by a grammar, in place of JSON.

A model calls a tool in the form that it learned, with JSON arguments. So it sees a custom tool as a function with one
string parameter, `input`, and the schema of the arguments is enforced as for other tools. A regular expression becomes
the `pattern` of that string. A Lark grammar cannot be enforced inside a JSON string: the model reads it in the tool's
description, and a request that requires a call of such a tool is rejected.
"""

import json
import re
from typing import Any

from pydantic_core import from_json

from gateway.api.field_rule import Part
from gateway.api.fields import make_tool
from gateway.request.violations import Violations, shortened
from quire.gateway.v1.generation_pb2 import Tool, ToolCall

_INPUT = "input"
_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# Whole characters of a JSON string: a surrogate counts only with its other half.
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


class Grammar(Part):
    """A grammar; `syntax` is regex or lark."""

    syntax: str
    definition: str


class CustomFormat(Part):
    """A format; `type` is text or grammar. Responses have the fields of a grammar here, chats in `grammar`."""

    type: str
    syntax: str | None = None
    definition: str | None = None
    grammar: Grammar | None = None


class CustomDefinition(Part):
    name: str
    description: str | None = None
    format: CustomFormat | None = None


def check_custom(violations: Violations, path: str, tool: CustomDefinition, *, is_forced: bool) -> None:
    """Adds violations for an unsupported format. `is_forced` is whether a call of some tool is required."""
    format = tool.format
    if format is None or format.type == "text":
        return
    grammar = _grammar_of(format)
    if format.type != "grammar":
        violations.add(f"{path}.format.type", f'is "{shortened(format.type)}"; it must be text or grammar')
    elif grammar is None:
        violations.add(f"{path}.format", "has no grammar; set its syntax and its definition")
    elif grammar.syntax not in ("regex", "lark"):
        violations.add(f"{path}.format.syntax", f'is "{shortened(grammar.syntax)}"; it must be regex or lark')
    elif grammar.syntax == "lark" and is_forced:
        violations.add(
            f"{path}.format.syntax",
            "is lark, which is not enforced in a call that tool_choice requires; use regex, or tool_choice auto",
        )


def custom_tool(tool: CustomDefinition) -> Tool:
    """A checked custom tool as the function that the model sees."""
    text: dict[str, Any] = {"type": "string"}
    description, grammar = tool.description, None if tool.format is None else _grammar_of(tool.format)
    if grammar is not None and grammar.syntax == "regex":
        text["pattern"] = f"^(?:{grammar.definition})$"
    elif grammar is not None:
        described = f"The input must match this Lark grammar:\n{grammar.definition}"
        description = described if description is None else f"{description}\n\n{described}"
    schema = {"type": "object", "properties": {_INPUT: text}, "required": [_INPUT], "additionalProperties": False}
    return make_tool(tool.name, description, schema, None)


def custom_call(call_id: str, name: str, text: str) -> ToolCall:
    """A call in an earlier answer, as a call of the function."""
    return ToolCall(id=call_id, name=name, arguments=json.dumps({_INPUT: text}, ensure_ascii=False))


def custom_input(arguments: str) -> str:
    """The input in a call's arguments, which may be cut off; arguments of another form are returned unchanged."""
    try:
        found = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = found.get(_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments


class InputPieces:
    """Extracts the input of a call piece by piece, as its arguments arrive."""

    def __init__(self) -> None:
        self._waiting = ""
        self._has_begun = False

    def push(self, arguments: str) -> str:
        """The next piece of the input, from the next piece of the arguments."""
        self._waiting += arguments
        if not self._has_begun:
            if (begin := _BEGIN.match(self._waiting)) is None:
                return ""
            self._has_begun, self._waiting = True, self._waiting[begin.end() :]
        whole = _CHARACTERS.match(self._waiting)
        text, self._waiting = ("", "") if whole is None else (whole.group(), self._waiting[whole.end() :])
        return json.loads(f'"{text}"', strict=False)

    @property
    def rest(self) -> str:
        """The remaining input at the end: arguments that do not begin with an input are returned unchanged."""
        return "" if self._has_begun else self._waiting


def _grammar_of(format: CustomFormat) -> Grammar | None:
    if format.grammar is not None:
        return format.grammar
    if format.syntax is None or format.definition is None:
        return None
    return Grammar(syntax=format.syntax, definition=format.definition)
