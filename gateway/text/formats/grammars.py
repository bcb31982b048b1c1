"""Constraints for tool calls: calls are well-formed, and their arguments match the schemas of the tools.

The variable parts of a call have schemas; the rest is fixed text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gateway.text.formats.notations import BracedNotation, PythonNotation, Rules, json_rule, tagged_arguments
from gateway.text.formats.rendered import ID, INDEX, CallShape, Layout, Slot
from gateway.text.formats.scanning import MARK, SPACE
from gateway.text.formats.shapes import HARMONY, JSON_LIST, SHAPES
from quire.common.v1.common_pb2 import Constraint, StructuralTag, StructuralTags
from quire.constraints.json_schema import BY_NAME, ConstraintError
from quire.constraints.program import literals, quoted

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A tool, and the JSON schema of its arguments as text."""

    name: str
    schema: str = _ANY_OBJECT


@dataclass(frozen=True, slots=True)
class ModelText:
    """A model's texts that a grammar needs: the shape in which its template writes calls, None for the usual shape of
    its format, and its special tokens by their text."""

    shape: CallShape | None = None
    special_tokens: Mapping[str, int] = field(default_factory=dict[str, int])


def constrained_calls(
    tool_format: str | None, calls: Sequence[CallGrammar], model: ModelText, *, is_forced: bool, is_single: bool
) -> Constraint | None:
    """The constraint of an answer that consists of calls, or that may contain calls; None if the format is unknown, or
    if its calls do not begin differently from other text.

    Raises:
        ConstraintError: the schema of a tool cannot be enforced in this format. See `check_arguments`.
    """
    if is_forced and format_of_forced_calls(tool_format) == JSON_LIST:
        return Constraint(json_schema=_list_schema(calls, is_single=is_single))
    shape = model.shape or SHAPES.get(tool_format or "")
    if shape is None:
        return None
    if tool_format == HARMONY:
        tags = _harmony(calls, model)
        required = StructuralTags(tags=tags, required=is_forced, no_free_text=is_forced, single=True)
        return Constraint(structural_tags=required)
    grammar = _CallRules(shape, calls, model.special_tokens)
    if is_forced:
        return Constraint(lark=grammar.lark(f"{_SPACE}? {grammar.section(is_single=is_single)}"))
    if (marker := grammar.marker) is not None:
        content = grammar.section(is_single=is_single or not shape.section_open, after=len(marker))
        tags = [StructuralTag(begin=marker, lark=grammar.lark(content))]
    else:
        tags = grammar.unmarked(is_single=is_single)
    if not tags:
        return None
    return Constraint(
        structural_tags=StructuralTags(
            tags=tags, required=False, no_free_text=False, single=is_single or bool(marker and shape.section_open)
        )
    )


def format_of_forced_calls(tool_format: str | None) -> str:
    """The format of forced calls: the model's own, or a plain list if that cannot enforce all schemas."""
    shape = SHAPES.get(tool_format or "")
    return JSON_LIST if tool_format is None or shape is None or shape.layout in _NOTATIONS else tool_format


def check_arguments(tool_format: str | None, schema: str) -> None:
    """Raises ConstraintError if a schema that JSON can have cannot be enforced in a format."""
    shape = SHAPES.get(tool_format or "")
    if shape is None or shape.tags is None:
        return
    try:
        _CallRules(shape, [CallGrammar("a", schema)], {})
    except ConstraintError as error:
        description = f"{error.description}, which cannot be enforced in the format in which this model writes calls"
        raise ConstraintError(error.field, description) from error
    except (TypeError, ValueError, AttributeError) as error:
        raise ConstraintError("", f"is no JSON schema, since a keyword has a wrong value: {error}") from error


def calls_or_answer(
    tool_format: str | None, calls: Sequence[CallGrammar], model: ModelText, answer: Constraint, *, is_single: bool
) -> Constraint | None:
    """The constraint of an answer that either matches `answer` or consists of calls; None if it cannot be expressed."""
    shape = model.shape or SHAPES.get(tool_format or "")
    body = _lark_of(answer)
    if shape is None or body is None or tool_format == HARMONY:
        return None
    grammar = _CallRules(shape, calls, model.special_tokens)
    section = grammar.section(is_single=is_single)
    return Constraint(lark=grammar.lark(f"answer | calls\nanswer: {body}\ncalls: {section}"))


class _CallRules:
    """The rules of the calls of some tools in Lark, as a template writes them.

    Attributes:
        marker: The text by which an answer shows that calls begin; None if there is no distinctive one.
    """

    def __init__(self, shape: CallShape, calls: Sequence[CallGrammar], special_tokens: Mapping[str, int]) -> None:
        """Raises ConstraintError for a schema that cannot be enforced in this shape."""
        self._shape = shape
        self._special_tokens = special_tokens
        self._cores: list[str] = []
        self._calls = calls
        self._lines: list[str] = []
        for number, call in enumerate(calls):
            rules = Rules(f"c{number}", special_tokens)
            self._cores.append(_core(shape, call, rules))
            self._lines += rules.lines
        opening = f"{shape.section_open}{shape.call_open}"
        found = MARK.search(opening)
        # Spaces and brackets often share a token with what follows.
        marker = opening[: found.end()] if found is not None else opening.rstrip(SPACE + '[{"')
        self.marker = marker if any(each.isalpha() for each in marker) else None

    def lark(self, start: str) -> str:
        return "\n".join((f"start: {start}", f"core: {' | '.join(self._cores)}", *self._lines))

    def section(self, *, is_single: bool, after: int = 0) -> str:
        """The expression of the calls from a character on."""
        shape = self._shape
        first = self._text(f"{shape.section_open}{shape.call_open}"[after:])
        close, end = self._text(shape.call_close), self._text(shape.section_close if shape.section_open else "")
        more = "" if is_single else f"({self._text(shape.separator + shape.call_open)} core {close})*"
        return " ".join(filter(None, (first, "core", close, more, end)))

    def unmarked(self, *, is_single: bool) -> list[StructuralTag]:
        """Tags for first and further calls, each beginning with a tool's name. Text between the tags is free."""
        shape, made = self._shape, list[StructuralTag]()
        end = shape.call_close + (shape.section_close if is_single else "")
        befores = dict.fromkeys(
            (shape.section_open, *(() if is_single else (shape.separator if shape.section_open else "",)))
        )
        for number, call in enumerate(self._calls):
            rules = Rules(f"c{number}", self._special_tokens)
            if shape.layout is Layout.ENVELOPE and [slot for _, slot in shape.fields] == _NAME_FIRST:
                (name, _), (arguments, _) = shape.fields
                head = f'{{"{name}": "{call.name}", "{arguments}":'
                body, close = f'" "? {json_rule(json.loads(call.schema))}', "}" + end
            elif shape.layout in _NOTATIONS:
                head, close = f"{call.name}{shape.name_close}", end
                body = _arguments(shape, call, rules)
            else:
                return []
            lark = "\n".join((f"start: {body}", *rules.lines))
            made += [StructuralTag(begin=before + shape.call_open + head, lark=lark, end=close) for before in befores]
        return made

    def _text(self, text: str) -> str:
        return _places(text, self._special_tokens)


def _core(shape: CallShape, call: CallGrammar, rules: Rules) -> str:
    """The expression of the variable part of a call."""
    if shape.layout is Layout.ENVELOPE:
        return json_rule(_call_schema(call, shape.fields, "#"))
    name = _places(call.name + shape.name_close, rules.special_tokens)
    return f"{name} {_arguments(shape, call, rules)}"


def _arguments(shape: CallShape, call: CallGrammar, rules: Rules) -> str:
    if shape.tags is None:
        return json_rule(json.loads(call.schema))
    if shape.layout is Layout.TAGS:
        return tagged_arguments(call.schema, rules, shape.tags)
    notation = PythonNotation if shape.layout is Layout.PYTHON else BracedNotation
    return notation(call.schema, rules, shape.tags).arguments()


def _places(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text of a shape in Lark, with patterns in the places of ids and positions."""
    parts = re.split(f"([{ID}{INDEX}])", text)
    written = (_PLACES.get(part) or literals(part, special_tokens) for part in parts)
    return " ".join(filter(None, written))


def _harmony(calls: Sequence[CallGrammar], model: ModelText) -> list[StructuralTag]:
    """Tags for Harmony. The recipient stands after the channel, or before it as templates write past calls."""
    constrain, message = (literals(f"<|{name}|>", model.special_tokens) for name in ("constrain", "message"))
    kind = f'(" "? {constrain} "json"? | " json")? {message}'
    named = [f"{quoted(call.name)} {kind} {json_rule(json.loads(call.schema))}" for call in calls]
    after_channel = StructuralTag(begin="<|channel|>commentary to=functions.", lark=f"start: {' | '.join(named)}")
    return [after_channel] + [
        StructuralTag(
            begin=f" to=functions.{call.name}<|channel|>commentary",
            lark=f"start: {kind} {json_rule(json.loads(call.schema))}",
        )
        for call in calls
    ]


# Layouts in which not all schemas can be enforced.
_NOTATIONS = frozenset((Layout.PYTHON, Layout.BRACED))
_PLACES = {ID: "/[A-Za-z0-9_.-]{1,64}/", INDEX: "/[0-9]{1,3}/"}
_NAME_FIRST = [Slot.NAME, Slot.ARGUMENTS]
# Models put white space after their reasoning, and some before a call.
_SPACE = "/[ \\n]{1,4}/"


def _list_schema(calls: Sequence[CallGrammar], *, is_single: bool) -> str:
    fields = SHAPES[JSON_LIST].fields
    items = [_call_schema(call, fields, f"#/items/anyOf/{position}") for position, call in enumerate(calls)]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
    if is_single:
        schema["maxItems"] = 1
    return json.dumps(schema, ensure_ascii=False)


def _call_schema(call: CallGrammar, fields: Sequence[tuple[str, Slot | str]], path: str) -> dict[str, Any]:
    """The schema of an object with the name and the arguments of a call, which stands at `path`."""
    properties: dict[str, Any] = {}
    for key, slot in fields:
        match slot:
            case Slot.NAME:
                properties[key] = {"const": call.name}
            case Slot.ARGUMENTS:
                key = key or call.name
                properties[key] = _moved(json.loads(call.schema), f"{path}/properties/{key}")
            case Slot.ID:
                properties[key] = {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"}
            case Slot.INDEX:
                properties[key] = {"anyOf": [{"type": "string", "pattern": "^[0-9]{1,3}$"}, {"type": "integer"}]}
            case str():
                properties[key] = {"const": json.loads(slot)}
    # Models leave out the ids that templates show.
    required = [key or call.name for key, slot in fields if slot is not Slot.ID]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _moved(schema: Any, path: str) -> Any:
    """A schema as a part of another one: its references begin at `path`."""
    if isinstance(schema, list):
        return [_moved(each, path) for each in cast(list[Any], schema)]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for name, value in cast(dict[str, Any], schema).items():
        if name == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[name] = path + value[1:]
        elif name in BY_NAME and isinstance(value, dict):
            # Its names are chosen by the caller and are not keywords.
            moved[name] = {key: _moved(each, path) for key, each in cast(dict[str, Any], value).items()}
        elif name not in ("const", "enum", "default", "examples"):
            moved[name] = _moved(value, path)
        else:
            moved[name] = value
    return moved


def _lark_of(answer: Constraint) -> str | None:
    """A constraint as a Lark expression; None if it cannot be one."""
    match answer.WhichOneof("kind"):
        case "json_schema":
            return json_rule(json.loads(answer.json_schema), no_white_space=answer.no_white_space)
        case "json_object":
            return json_rule(json.loads(_ANY_OBJECT), no_white_space=answer.no_white_space)
        case "choice":
            return " | ".join(quoted(text) for text in answer.choice.texts)
        case _:
            return None
