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
    of_tags = partial(_of_tags, no_white_space=_no_white_space_path(body) is not None)
    match body.response_format:
        case ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(schema_=schema)) if schema is not None:
            yield "response_format.json_schema.schema", partial(_of_schema, schema)
        case ResponseFormat(type="json_schema" | "json_object", schema_=schema) if schema:
            yield "response_format.schema", partial(_of_schema, schema)
        case ResponseFormat(type="json_object" | "json", value=schema) if schema:
            yield "response_format.value", partial(_of_schema, schema)
        case ResponseFormat(type="json_object"):
            yield "response_format", _of_object
        case ResponseFormat(type="regex", pattern=str(regex)):
            yield "response_format.pattern", partial(_of_regex, regex)
        case ResponseFormat(type="regex", value=str(regex)):
            yield "response_format.value", partial(_of_regex, regex)
        case ResponseFormat(type="grammar", grammar=str(grammar)):
            yield "response_format.grammar", partial(_of_grammar, grammar)
        case ResponseFormat(type="structural_tag") as format:
            yield "response_format", partial(of_tags, format)
    outputs = body.structured_outputs or StructuredOutputs()
    if outputs.json_object:
        yield "structured_outputs.json_object", _of_object
    for path, value, make in (
        ("structured_outputs.json", outputs.json_, _of_schema),
        ("structured_outputs.regex", outputs.regex, _of_regex),
        ("structured_outputs.choice", outputs.choice, _of_choice),
        ("structured_outputs.grammar", outputs.grammar, _of_grammar),
        ("structured_outputs.structural_tag", outputs.structural_tag, of_tags),
        ("guided_json", body.guided_json, _of_schema),
        ("guided_regex", body.guided_regex, _of_regex),
        ("guided_choice", body.guided_choice, _of_choice),
        ("guided_grammar", body.guided_grammar, _of_grammar),
        ("structural_tag", body.structural_tag, of_tags),
        # Clients of these servers send an empty text for no constraint.
        ("regex", body.regex or None, _of_regex),
        ("ebnf", body.ebnf or None, _of_grammar),
        ("grammar", body.grammar or None, _of_grammar),
        ("json_schema", body.json_schema or None, _of_schema),
    ):
        if value is not None:
            yield path, partial(make, value)


def _of_schema(schema: JsonSchema | str) -> Constraint:
    return Constraint(json_schema=schema if isinstance(schema, str) else schema_text(schema))


def _of_object() -> Constraint:
    return Constraint(json_object=AnyJsonObject())


def _of_regex(regex: str) -> Constraint:
    return Constraint(regex=regex)


def _of_choice(texts: list[str]) -> Constraint:
    return Constraint(choice=Choice(texts=texts))


def _of_grammar(grammar: str) -> Constraint:
    return Constraint(lark=grammar)


def _of_tags(format: ResponseFormat, *, no_white_space: bool) -> Constraint:
    tags = [_tag(each, format.triggers or (), no_white_space=no_white_space) for each in format.structures or ()]
    return Constraint(structural_tags=StructuralTags(tags=tags))


def _tag(structure: TagStructure, triggers: Sequence[str], *, no_white_space: bool) -> StructuralTag:
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
