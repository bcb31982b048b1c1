"""Constraints for tool calls: calls are well-formed, and their arguments match the schemas of the tools.

The variable parts of a call have schemas; the rest is fixed text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from gateway.text.formats.answer import HARMONY, JSON_LIST
from gateway.text.formats.notations import (
    FunctionGemmaNotation,
    GemmaNotation,
    Notation,
    PythonNotation,
    Rules,
    json_rule,
    tagged_arguments,
)
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
    """What a grammar must know of the model: its chat template, and its special tokens by their text."""

    template: str = ""
    special_tokens: Mapping[str, int] = field(default_factory=dict[str, int])


Tags = Callable[[Sequence[CallGrammar], ModelText], list[StructuralTag]]
"""The tags of calls of some tools."""


def constrained_calls(
    tool_format: str | None, calls: Sequence[CallGrammar], model: ModelText, *, is_forced: bool, is_single: bool
) -> Constraint | None:
    """The constraint of an answer that consists of calls, or that may contain calls; None if the format is unknown.

    Raises:
        ConstraintError: the schema of a tool cannot be enforced in this format. See `check_arguments`.
    """
    if is_forced and format_of_forced_calls(tool_format) == JSON_LIST:
        return _json_list(calls, is_single=is_single)
    tags = _TAGS.get(tool_format or "")
    if tags is None:
        return None
    template = model.template
    structural = StructuralTags(tags=tags(calls, model))
    structural.required = structural.no_free_text = is_forced
    # A list has all calls; an answer in Harmony ends with its call.
    structural.single = is_single or tool_format == HARMONY or _is_list(tool_format, template)
    if is_single and _is_list(tool_format, template):
        structural.tags[0].json_schema = _list_schema(calls, "arguments", is_single=True)
    if is_single and tool_format == "pythonic":
        for tag in structural.tags:
            tag.end = ")]"
    return Constraint(structural_tags=structural)


def format_of_forced_calls(tool_format: str | None) -> str:
    """The format of forced calls: the model's own, or a plain list if not all schemas can be enforced in that."""
    has_all_schemas = tool_format in _TAGS and tool_format not in _NOTATIONS
    return tool_format if tool_format is not None and has_all_schemas else JSON_LIST


def check_arguments(tool_format: str | None, schema: str) -> None:
    """Raises ConstraintError if a schema that JSON can have cannot be enforced in a format."""
    if tool_format in _NOTATIONS or tool_format in _TAGGED:
        try:
            _TAGS[tool_format]([CallGrammar("a", schema)], ModelText())
        except ConstraintError as error:
            description = (
                f"{error.description}, which cannot be enforced in the format in which this model writes calls"
            )
            raise ConstraintError(error.field, description) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ConstraintError("", f"is no JSON schema, since a keyword has a wrong value: {error}") from error


def calls_or_answer(
    tool_format: str | None, calls: Sequence[CallGrammar], model: ModelText, answer: Constraint, *, is_single: bool
) -> Constraint | None:
    """The constraint of an answer that either matches `answer` or consists of calls; None if it cannot be expressed."""
    tags = _TAGS.get(tool_format or "")
    body = _lark_of(answer)
    # A list of calls in Python has no tag of its own around each of them.
    if tags is None or body is None or tool_format == "pythonic":
        return None
    template = model.template
    rules = ["start: answer | calls", f"answer: {body}"]
    alternatives: list[str] = []
    for tag in tags(calls, model):
        name = f"call_{len(alternatives)}"
        content, *further = _content_of(tag).split("\n")
        parts = [literals(tag.begin, model.special_tokens), f"({content})", literals(tag.end, model.special_tokens)]
        rules += [f"{name}: {' '.join(part for part in parts if part)}", *further]
        alternatives.append(name)
    many = "" if is_single or tool_format == HARMONY or _is_list(tool_format, template) else "+"
    rules.append(f"calls: ({' | '.join(alternatives)}){many}")
    return Constraint(lark="\n".join(rules))


def _named(begin: str, end: str = "") -> Tags:
    """Tags around the arguments as JSON; `begin` has a place for the name of the tool."""
    return lambda calls, model: [
        StructuralTag(begin=begin.format(call.name), json_schema=call.schema, end=end) for call in calls
    ]


def _ruled(begin: str, end: str, start: Callable[[CallGrammar, Rules, ModelText], str]) -> Tags:
    """Tags around arguments in a notation of their own: `start` adds its rules and returns the expression. `begin` may
    have a place for the name of the tool."""

    def tags(calls: Sequence[CallGrammar], model: ModelText) -> list[StructuralTag]:
        made: list[StructuralTag] = []
        for number, call in enumerate(calls):
            # Of the tool at a position, so that the grammars of several can be one.
            rules = Rules(f"c{number}", model.special_tokens)
            lark = "\n".join([f"start: {start(call, rules, model)}", *rules.lines])
            made.append(StructuralTag(begin=begin.format(call.name), lark=lark, end=end))
        return made

    return tags


def _hermes(calls: Sequence[CallGrammar], model: ModelText) -> list[StructuralTag]:
    return [
        StructuralTag(begin="<tool_call>\n", json_schema=_envelope(call, "arguments"), end="\n</tool_call>")
        for call in calls
    ]


def _mistral(calls: Sequence[CallGrammar], model: ModelText) -> list[StructuralTag]:
    if not _is_list("mistral", model.template):
        return _named("[TOOL_CALLS]{}[ARGS]")(calls, model)
    begin = "[TOOL_CALLS] " if "[TOOL_CALLS] [" in model.template else "[TOOL_CALLS]"
    return _list_after(begin)(calls, model)


def _list_after(begin: str) -> Tags:
    return lambda calls, model: [
        StructuralTag(begin=begin, json_schema=_list_schema(calls, "arguments", is_single=False))
    ]


def _kimi_k2(call: CallGrammar, rules: Rules, model: ModelText) -> str:
    header = f"/[0-9]{{1,3}}/ {literals('<|tool_call_argument_begin|>', model.special_tokens)}"
    return f"{header} {json_rule(json.loads(call.schema))}"


def _qwen3_coder(call: CallGrammar, rules: Rules, model: ModelText) -> str:
    return tagged_arguments(call.schema, rules, "<parameter={}>\n", "\n</parameter>\n", "")


def _glm(call: CallGrammar, rules: Rules, model: ModelText) -> str:
    # Some models of the family write each tag on a line of its own, others none.
    begin = "<arg_key>{}</arg_key>" + ("\n" if "</arg_key>\\n" in model.template else "") + "<arg_value>"
    arguments = tagged_arguments(call.schema, rules, begin, "</arg_value>", '"\\n"?')
    return f'{quoted(call.name)} "\\n"? {arguments}'


def _gemma(begin: str, end: str, notation: type[Notation]) -> Tags:
    def start(call: CallGrammar, rules: Rules, model: ModelText) -> str:
        return f'{quoted(f"call:{call.name}{{")} {notation(call.schema, rules).arguments()} "}}"'

    return _ruled(begin, end, start)


def _pythonic(calls: Sequence[CallGrammar], model: ModelText) -> list[StructuralTag]:
    """The first call of a list, and the further ones. What is between them is free: the list itself is no tag."""

    def start(call: CallGrammar, rules: Rules, model: ModelText) -> str:
        return PythonNotation(call.schema, rules).arguments()

    first, further = (_ruled(f"{before}{{}}(", ")", start)(calls, model) for before in ("[", ", "))
    return [tag for pair in zip(first, further, strict=True) for tag in pair]


def _content_of(tag: StructuralTag) -> str:
    """The expression of what is in a tag; its further lines are the rules that it needs."""
    return tag.lark.removeprefix("start: ") if tag.HasField("lark") else json_rule(json.loads(tag.json_schema))


_TAGS: Mapping[str, Tags] = {
    "hermes": _hermes,
    "llama3_json": _named('{{"name": "{}", "parameters": ', "}"),
    "mistral": _mistral,
    "deepseek_v3": _named(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _named(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>", "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "qwen3_coder": _ruled("<tool_call>\n<function={}>\n", "</function>\n</tool_call>", _qwen3_coder),
    "kimi_k2": _ruled(
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.{}:",
        "<|tool_call_end|><|tool_calls_section_end|>",
        _kimi_k2,
    ),
    "granite": _list_after("<|tool_call|>"),
    "phi4_mini_json": _list_after("functools"),
    "glm45": _ruled("<tool_call>", "</tool_call>", _glm),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", GemmaNotation),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", FunctionGemmaNotation),
    "pythonic": _pythonic,
    HARMONY: _named("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"),
}
# Formats in which not all schemas can be enforced.
_NOTATIONS = frozenset(("gemma4", "functiongemma", "pythonic"))
# In which all but those of some texts can.
_TAGGED = frozenset(("qwen3_coder", "glm45"))
# Formats in which all calls are one list of JSON.
_LISTS = frozenset(("granite", "phi4_mini_json"))


def _is_list(tool_format: str | None, template: str) -> bool:
    """Whether one tag has all calls."""
    return tool_format in _LISTS or (tool_format == "mistral" and "[ARGS]" not in template)


def _json_list(calls: Sequence[CallGrammar], *, is_single: bool) -> Constraint:
    return Constraint(json_schema=_list_schema(calls, "arguments", is_single=is_single))


def _list_schema(calls: Sequence[CallGrammar], key: str, *, is_single: bool) -> str:
    items = [_call_schema(call, key, f"#/items/anyOf/{position}") for position, call in enumerate(calls)]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
    if is_single:
        schema["maxItems"] = 1
    return json.dumps(schema, ensure_ascii=False)


def _envelope(call: CallGrammar, key: str) -> str:
    return json.dumps(_call_schema(call, key, "#"), ensure_ascii=False)


def _call_schema(call: CallGrammar, key: str, path: str) -> dict[str, Any]:
    """The schema of an object with the name and the arguments of a call, which stands at `path`."""
    arguments = _moved(json.loads(call.schema), f"{path}/properties/{key}")
    return {
        "type": "object",
        "properties": {"name": {"const": call.name}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


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
            # The names in it are the caller's, and not keywords.
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
