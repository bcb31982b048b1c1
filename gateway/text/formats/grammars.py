"""Constraints for tool calls: calls are well-formed, and their arguments match the schemas of the tools.

The variable parts of a call have schemas; the rest is fixed text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from gateway.text.formats.answer import HARMONY, JSON_LIST
from quire.common.v1.common_pb2 import Constraint, StructuralTag, StructuralTags
from quire.constraints.program import SCHEMA_OPTIONS

_ANY_OBJECT = '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """A tool, and the JSON schema of its arguments as text."""

    name: str
    schema: str = _ANY_OBJECT


Tags = Callable[[Sequence[CallGrammar], str], list[StructuralTag]]
"""The tags of calls of some tools, for a chat template."""


def constrained_calls(
    tool_format: str | None, calls: Sequence[CallGrammar], template: str, *, is_forced: bool, is_single: bool
) -> Constraint | None:
    """The constraint of an answer that consists of calls, or that may contain calls; None if the format has no
    grammar."""
    tags = _TAGS.get(tool_format or "")
    if tags is None:
        return _json_list(calls, is_single=is_single) if is_forced else None
    structural = StructuralTags(tags=tags(calls, template))
    structural.required = structural.no_free_text = is_forced
    # A list has all calls; an answer in Harmony ends with its call.
    structural.single = is_single or tool_format == HARMONY or _is_mistral_list(tool_format, template)
    if is_single and _is_mistral_list(tool_format, template):
        structural.tags[0].json_schema = _list_schema(calls, "arguments", is_single=True)
    return Constraint(structural_tags=structural)


def format_of_forced_calls(tool_format: str | None) -> str:
    """The format of forced calls: the model's own, or a plain list if that has no grammar."""
    return tool_format if tool_format is not None and tool_format in _TAGS else JSON_LIST


def calls_or_answer(
    tool_format: str | None,
    calls: Sequence[CallGrammar],
    template: str,
    answer: Constraint,
    special_tokens: Mapping[str, int],
    *,
    is_single: bool,
) -> Constraint | None:
    """The constraint of an answer that either matches `answer` or consists of calls; None if it cannot be expressed."""
    tags = _TAGS.get(tool_format or "")
    body = _lark_of(answer)
    if tags is None or body is None:
        return None
    rules = ["start: answer | calls", f"answer: {body}"]
    alternatives: list[str] = []
    for tag in tags(calls, template):
        if tag.WhichOneof("content") != "json_schema":
            return None
        parts = [_literals(tag.begin, special_tokens), _json_rule(tag.json_schema), _literals(tag.end, special_tokens)]
        alternatives.append(f"call_{len(alternatives)}")
        rules.append(f"{alternatives[-1]}: {' '.join(part for part in parts if part)}")
    many = "" if is_single or tool_format == HARMONY or _is_mistral_list(tool_format, template) else "+"
    rules.append(f"calls: ({' | '.join(alternatives)}){many}")
    return Constraint(lark="\n".join(rules))


def _hermes(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    return [
        StructuralTag(begin="<tool_call>\n", json_schema=_envelope(call, "arguments"), end="\n</tool_call>")
        for call in calls
    ]


def _llama3(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    return [
        StructuralTag(begin=f'{{"name": "{call.name}", "parameters": ', json_schema=call.schema, end="}")
        for call in calls
    ]


def _mistral(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    if not _is_mistral_list("mistral", template):
        return [StructuralTag(begin=f"[TOOL_CALLS]{call.name}[ARGS]", json_schema=call.schema) for call in calls]
    begin = "[TOOL_CALLS] " if "[TOOL_CALLS] [" in template else "[TOOL_CALLS]"
    return [StructuralTag(begin=begin, json_schema=_list_schema(calls, "arguments", is_single=False))]


def _deepseek_v3(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    begin = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n"
    end = "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    return [StructuralTag(begin=begin.format(call.name), json_schema=call.schema, end=end) for call in calls]


def _deepseek_v31(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    begin = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>"
    end = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    return [StructuralTag(begin=begin.format(call.name), json_schema=call.schema, end=end) for call in calls]


def _harmony(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    begin = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>"
    return [StructuralTag(begin=begin.format(call.name), json_schema=call.schema) for call in calls]


def _qwen3_coder(calls: Sequence[CallGrammar], template: str) -> list[StructuralTag]:
    end = "</function>\n</tool_call>"
    return [
        StructuralTag(begin=f"<tool_call>\n<function={call.name}>\n", lark=_tagged_arguments(call.schema), end=end)
        for call in calls
    ]


_TAGS: Mapping[str, Tags] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "mistral": _mistral,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "qwen3_coder": _qwen3_coder,
    HARMONY: _harmony,
}


def _is_mistral_list(tool_format: str | None, template: str) -> bool:
    return tool_format == "mistral" and "[ARGS]" not in template


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
        elif name not in ("const", "enum", "default", "examples"):
            moved[name] = _moved(value, path)
        else:
            moved[name] = value
    return moved


def text_parameters(schema: str) -> frozenset[str]:
    """The parameters that the schema of the arguments restricts to strings."""
    try:
        properties: Any = json.loads(schema).get("properties", {}) if schema else {}
    except (ValueError, AttributeError, RecursionError):
        return frozenset()
    if not isinstance(properties, dict):
        return frozenset()
    return frozenset(name for name, value in cast(dict[str, Any], properties).items() if _is_text(value))


def _is_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    fields = cast(dict[str, Any], schema)
    if "type" in fields:
        return fields["type"] == "string"
    values: Any = fields.get("enum", [fields["const"]] if "const" in fields else None)
    return isinstance(values, list) and all(isinstance(value, str) for value in cast(list[Any], values))


def _tagged_arguments(schema: str) -> str:
    """The arguments in tags of Qwen3-Coder, in the order of the schema."""
    root: dict[str, Any] = json.loads(schema)
    texts, required = text_parameters(schema), root.get("required", ())
    shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
    rules: list[str] = []
    names: list[str] = []
    for position, (name, value) in enumerate(root.get("properties", {}).items()):
        begin = _quoted(f"<parameter={name}>\n")
        names.append(f"argument_{position}" + ("" if name in required else "?"))
        choices = value.get("enum") if isinstance(value, dict) and name in texts else None
        if choices:
            ends = " | ".join(_quoted(f"{choice}\n</parameter>\n") for choice in choices)
            rules.append(f"argument_{position}: {begin} ({ends})")
        elif name in texts:
            rules.append(f"argument_{position}: {begin} text_{position}")
            rules.append(f'text_{position}[suffix="\\n</parameter>\\n"]: /(.|\\n)*/')
        else:
            inner = json.dumps(shared | value if isinstance(value, dict) else {}, ensure_ascii=False)
            rules.append(f'argument_{position}: {begin} {_json_rule(inner)} "\\n</parameter>\\n"')
    return "\n".join([f"start: {' '.join(names)}" if names else 'start: ""', *rules])


def _lark_of(answer: Constraint) -> str | None:
    """A constraint as a Lark expression; None if it cannot be one."""
    match answer.WhichOneof("kind"):
        case "json_schema":
            return _json_rule(answer.json_schema)
        case "json_object":
            return _json_rule(_ANY_OBJECT)
        case "choice":
            return " | ".join(_quoted(text) for text in answer.choice.texts)
        case _:
            return None


def _json_rule(schema: str) -> str:
    """A Lark expression for JSON that matches a schema, with the usual limits on white space."""
    value: Any = json.loads(schema)
    fields = cast(dict[str, Any], value) if isinstance(value, dict) else {}
    return f"%json {json.dumps(fields | {'x-guidance': SCHEMA_OPTIONS}, ensure_ascii=False)}"


def _literals(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text in Lark: special tokens by their ids, the rest quoted."""
    found = [(position, token) for token in special_tokens if (position := text.find(token)) >= 0]
    if not found:
        return _quoted(text) if text else ""
    position, token = min(found, key=lambda each: (each[0], -len(each[1])))
    parts = [_quoted(text[:position]) if position else "", f"<[{special_tokens[token]}]>"]
    return " ".join(part for part in (*parts, _literals(text[position + len(token) :], special_tokens)) if part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
