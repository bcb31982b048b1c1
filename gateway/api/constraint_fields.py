"""Constraints of an answer: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*` fields,
SGLang's `regex`, `ebnf` and `json_schema`, and llama.cpp's `grammar` and `json_schema`.

Each field becomes a quire.common.v1.Constraint, which is enforced with and without `strict`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError, from_json

from gateway.api import field_rule
from gateway.api.field_rule import Part, Unread
from gateway.api.fields import schema_text
from gateway.request.counting import MAX_VALUES_OF_TEXTS, num_values_in
from gateway.request.violations import Violations, shortened
from quire.common.v1.common_pb2 import AnyJsonObject, Choice, Constraint, StructuralTag, StructuralTags
from quire.constraints.program import MAX_TAGS

Texts = Annotated[list[str], Field(fail_fast=True)]
JsonSchema = dict[str, Any]


class JsonSchemaFormat(Part):
    """The model does not see `name` and `description`. The schema is enforced with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    strict: bool | None = None


class TagStructure(Part):
    begin: str
    schema_: Annotated[JsonSchema, Field(alias="schema")]
    end: str


class ResponseFormat(Part):
    """`type` is text, json_object, json_schema or, as in vLLM, structural_tag: after one of the `triggers` the text
    continues with one of the `structures` that begin with it. Other types and fields come from llama.cpp, Together
    (`schema`, regex with its `pattern`), Fireworks (`schema`, grammar) and TGI (json and regex with a `value`)."""

    unread: ClassVar[Unread] = field_rule.RESPONSE_FORMAT

    type: str
    json_schema: JsonSchemaFormat | None = None
    structures: Annotated[list[TagStructure] | None, Field(fail_fast=True)] = None
    triggers: Texts | None = None
    schema_: Annotated[JsonSchema | None, Field(alias="schema")] = None
    pattern: str | None = None
    grammar: str | None = None
    value: JsonSchema | str | None = None


# The fields of each type. The first one that is set constrains the answer.
_FIELDS_OF_FORMATS: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "schema"),
    "structural_tag": ("structures", "triggers"),
    "regex": ("pattern", "value"),
    "grammar": ("grammar",),
    "json": ("value",),
}


def _parsed(value: Any) -> Any:
    """Parses the JSON in a text, whose values are counted first, as in all JSON."""
    if not isinstance(value, str) or num_values_in(value) > MAX_VALUES_OF_TEXTS:
        raise PydanticCustomError("json_text", "a text of JSON with at most {max} values", {"max": MAX_VALUES_OF_TEXTS})
    try:
        return from_json(value)
    except ValueError as error:
        raise PydanticCustomError("json_text", "JSON: {error}", {"error": str(error)}) from error


TagsInText = Annotated[
    ResponseFormat,
    BeforeValidator(_parsed),
    WithJsonSchema({"type": "string", "contentMediaType": "application/json"}),
]


class StructuredOutputs(Part):
    """vLLM's constraints. Exactly one is set; `disable_any_whitespace` may be set in addition to a JSON constraint."""

    unread: ClassVar[Unread] = field_rule.STRUCTURED_OUTPUTS

    json_: Annotated[JsonSchema | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: TagsInText | None = None
    disable_any_whitespace: bool | None = None


class ConstraintFields(BaseModel):
    """The fields of a body that constrain its answer. At most one constraint may be set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    structural_tag: TagsInText | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: JsonSchema | str | None = None
    guided_decoding_disable_any_whitespace: bool | None = None
    # Selects a library in vLLM. Quire has only one implementation.
    guided_decoding_backend: str | None = None


def check_constraints(violations: Violations, body: ConstraintFields) -> None:
    """Adds violations for unknown and missing fields, and for more than one constraint."""
    outputs = body.structured_outputs or StructuredOutputs()
    for path, format in (
        ("response_format", body.response_format),
        ("structured_outputs.structural_tag", outputs.structural_tag),
        ("structural_tag", body.structural_tag),
    ):
        if format is not None:
            _check_format(violations, path, format, tags_only=path != "response_format")
    found = dict(_found(body))
    paths = [*found]
    # Some clients send the same constraint under its older and its newer name.
    if len(paths) > 1 and not violations.found and len({make().SerializeToString() for make in found.values()}) > 1:
        violations.add(paths[1], f"is set, and so is {paths[0]}; an answer can match only one of them")
    if body.structured_outputs is not None and not any(path.startswith("structured") for path in paths):
        names = (field.alias or name for name, field in StructuredOutputs.model_fields.items())
        kinds = ", ".join(name for name in names if name != "disable_any_whitespace")
        violations.add("structured_outputs", f"has no constraint; set one of {kinds}")
    if (path := _no_white_space_path(body)) is not None and not any(map(_is_of_json, paths)):
        found = f"{paths[0]} is not about JSON" if paths else "no field constrains the answer to JSON"
        violations.add(path, f"is true, and {found}; leave it out")


def constraint_path(body: ConstraintFields) -> str | None:
    """The path of the field that constrains the answer; None if no field does."""
    return next((path for path, _ in _found(body)), None)


def constraint_of(body: ConstraintFields) -> Constraint | None:
    """The constraint of a checked body."""
    constraint = next((make() for _, make in _found(body)), None)
    if constraint is not None and _no_white_space_path(body) is not None:
        constraint.no_white_space = True
    return constraint


def _no_white_space_path(body: ConstraintFields) -> str | None:
    """The path of the field that excludes white space from JSON; None if no field does."""
    if body.structured_outputs is not None and body.structured_outputs.disable_any_whitespace:
        return "structured_outputs.disable_any_whitespace"
    return "guided_decoding_disable_any_whitespace" if body.guided_decoding_disable_any_whitespace else None


def _is_of_json(path: str) -> bool:
    return not path.endswith(("regex", "choice", "grammar", "ebnf", "pattern"))


def _found(body: ConstraintFields) -> Iterator[tuple[str, Callable[[], Constraint]]]:
    """The path of each constraint in a body, with the function that makes the constraint."""
    for path, kind, value in _values(body):
        if value is not None:
            yield path, partial(_constraint, kind, value)


def _values(body: ConstraintFields) -> Iterator[tuple[str, str, Any]]:
    """The path of each constraint in a body, its field in the message, and its value; None if it is absent."""
    match body.response_format:
        case ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema_=schema)) if schema is not None:
            yield "response_format.json_schema.schema", "json_schema", schema
        case ResponseFormat(type="json_schema" | "json_object", schema_=schema) if schema:
            yield "response_format.schema", "json_schema", schema
        case ResponseFormat(type="json_object" | "json", value=schema) if schema:
            yield "response_format.value", "json_schema", schema
        case ResponseFormat(type="json_object"):
            yield "response_format", "json_object", AnyJsonObject()
        case ResponseFormat(type="regex", pattern=str(regex)):
            yield "response_format.pattern", "regex", regex
        case ResponseFormat(type="regex", value=str(regex)):
            yield "response_format.value", "regex", regex
        case ResponseFormat(type="grammar", grammar=str(grammar)):
            yield "response_format.grammar", "lark", grammar
        case ResponseFormat(type="structural_tag") as format:
            yield "response_format", "structural_tags", format
    if (outputs := body.structured_outputs) is not None:
        yield "structured_outputs.json_object", "json_object", AnyJsonObject() if outputs.json_object else None
        yield "structured_outputs.json", "json_schema", outputs.json_
        yield "structured_outputs.regex", "regex", outputs.regex
        yield "structured_outputs.choice", "choice", outputs.choice
        yield "structured_outputs.grammar", "lark", outputs.grammar
        yield "structured_outputs.structural_tag", "structural_tags", outputs.structural_tag
    yield "guided_json", "json_schema", body.guided_json
    yield "guided_regex", "regex", body.guided_regex
    yield "guided_choice", "choice", body.guided_choice
    yield "guided_grammar", "lark", body.guided_grammar
    yield "structural_tag", "structural_tags", body.structural_tag
    # Clients of these servers send an empty text for no constraint.
    yield "regex", "regex", body.regex or None
    yield "ebnf", "lark", body.ebnf or None
    yield "grammar", "lark", body.grammar or None
    yield "json_schema", "json_schema", body.json_schema or None


def _constraint(kind: str, value: Any) -> Constraint:
    match value:
        case dict():
            return Constraint(json_schema=schema_text(value))
        case list():
            return Constraint(choice=Choice(texts=value))
        case ResponseFormat():
            tags = [_tag(each, value.triggers or ()) for each in value.structures or ()]
            return Constraint(structural_tags=StructuralTags(tags=tags))
        case _:
            return Constraint(**{kind: value})


def _tag(structure: TagStructure, triggers: Sequence[str]) -> StructuralTag:
    """The trigger is the `begin` of the tag; the constrained part begins with the rest of the structure's `begin`."""
    trigger = next(each for each in triggers if structure.begin.startswith(each))
    rest = structure.begin.removeprefix(trigger)
    if not rest:
        return StructuralTag(begin=trigger, json_schema=schema_text(structure.schema_), end=structure.end)
    grammar = f"start: {json.dumps(rest)} arguments\narguments: %json {schema_text(structure.schema_)}\n"
    return StructuralTag(begin=trigger, lark=grammar, end=structure.end)


def _check_format(violations: Violations, path: str, format: ResponseFormat, *, tags_only: bool) -> None:
    known = ("structural_tag",) if tags_only else tuple(_FIELDS_OF_FORMATS)
    if format.type not in known:
        violations.add(f"{path}.type", f'is "{shortened(format.type)}"; it must be {" or ".join(known)}')
        return
    own = _FIELDS_OF_FORMATS[format.type]
    for name, field in ResponseFormat.model_fields.items():
        shown = field.alias or name
        if shown not in ("type", *own) and getattr(format, name) is not None:
            violations.add(f"{path}.{shown}", f'is set, and the type "{format.type}" does not have it')
    if format.type == "json_schema" and format.schema_ is None:
        if format.json_schema is None or format.json_schema.schema_ is None:
            violations.add(f"{path}.json_schema.schema", "is missing")
    elif format.type in ("regex", "grammar", "json") and not any(getattr(format, name) for name in own):
        violations.add(f"{path}.{own[0]}", "is missing")
    if format.type == "regex" and isinstance(format.value, dict):
        violations.add(f"{path}.value", "must be a string")
    if format.type == "structural_tag":
        if not format.structures:
            violations.add(f"{path}.structures", "is missing or empty")
        # Each structure is compared with each trigger.
        lists = {"structures": format.structures or (), "triggers": format.triggers or ()}
        if not all(violations.check_count(f"{path}.{name}", each, MAX_TAGS) for name, each in lists.items()):
            return
        for position, structure in enumerate(format.structures or ()):
            if not any(each and structure.begin.startswith(each) for each in format.triggers or ()):
                description = f'is "{shortened(structure.begin)}"; it must begin with one of the triggers'
                violations.add(f"{path}.structures[{position}].begin", description)
