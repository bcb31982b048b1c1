"""Each keyword of JSON schema is enforced, an annotation, or refused by name; instances as in the official suite."""

import json
import tracemalloc
from typing import Any

import jsonschema
import pytest

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import (
    ANNOTATIONS,
    ENFORCED,
    FORMATS,
    MAX_DEPTH,
    REFUSED,
    ConstraintError,
    read_schema,
)
from tests.support.constraints import accepts, make_template

OBJECT = {"type": "object", "additionalProperties": False}
TWO = {"a": {"type": "integer"}, "b": {"type": "boolean"}}

# Keyword, schema, valid instances, invalid instances.
CASES: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type", {"type": "integer"}, [0, -12, 100], [1.5, "1", None, True, [], {}]),
    ("type", {"type": "number"}, [0, 1.5, -2e10], ["1", None]),
    ("type", {"type": "string"}, ["", "a", 'quote " and \\', "naïve\n"], [1, None]),
    ("type", {"type": "boolean"}, [True, False], [0, "true"]),
    ("type", {"type": "null"}, [None], [0, False, ""]),
    ("type", {"type": "array"}, [[], [1, "a", {}]], [{}, 1]),
    ("type", {"type": "object"}, [{}, {"x": 1}], [[], 1]),
    ("type", {"type": ["string", "null"]}, ["x", None], [1, []]),
    ("enum", {"enum": ["a", 1, None, {"k": [True]}]}, ["a", 1, None, {"k": [True]}], ["b", 2, {"k": [False]}]),
    ("enum", {"enum": ["a", 1], "type": "string"}, ["a"], [1]),
    ("const", {"const": {"a": [1, "x"]}}, [{"a": [1, "x"]}], [{"a": [1]}, 1]),
    ("properties", {"properties": TWO, **OBJECT}, [{}, {"a": 1}, {"a": 1, "b": True}, {"b": False}], [{"a": "x"}]),
    ("required", {"properties": TWO, "required": ["b"], **OBJECT}, [{"b": True}, {"a": 1, "b": True}], [{}, {"a": 1}]),
    ("additionalProperties", {"properties": TWO, **OBJECT}, [{"a": 1}], [{"c": 1}, {"a": 1, "c": 1}]),
    ("additionalProperties", {"type": "object", "additionalProperties": {"type": "null"}}, [{"x": None}], [{"x": 1}]),
    (
        "patternProperties",
        {"patternProperties": {"^x_": {"type": "integer"}}, **OBJECT},
        [{"x_a": 1}],
        [{"x_a": "s"}, {"y": 1}],
    ),
    ("maxProperties", {"type": "object", "maxProperties": 1}, [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("minProperties", {"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    ("items", {"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["a"], [1, None]]),
    (
        "items",
        {"items": [{"type": "integer"}, {"type": "null"}], "type": "array"},
        [[1], [1, None, "x"]],
        [["a"], [1, 2]],
    ),
    ("additionalItems", {"type": "array", "items": [{"const": 1}], "additionalItems": False}, [[], [1]], [[1, 2], [2]]),
    ("prefixItems", {"type": "array", "prefixItems": [{"const": 1}], "items": False}, [[], [1]], [[2], [1, 1]]),
    ("minItems", {"type": "array", "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ("maxItems", {"type": "array", "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "äö", "abc"], ["", "a", "ä"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "ab", "äö", "😀😀"], ["abc", "😀😀😀"]),
    ("pattern", {"type": "string", "pattern": "^a+$"}, ["a", "aaa"], ["", "ab", "ba"]),
    ("pattern", {"type": "string", "pattern": "b"}, ["b", "abc"], ["", "ac"]),
    ("minimum", {"type": "integer", "minimum": -3}, [-3, 0, 1000], [-4]),
    ("minimum", {"type": "number", "minimum": 1.5}, [1.5, 1.6, 2], [1.4, -2]),
    ("maximum", {"type": "integer", "maximum": 12}, [12, 0, -100], [13, 100]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    ("exclusiveMaximum", {"type": "number", "exclusiveMaximum": 1}, [0.9, -3], [1, 1.0]),
    ("multipleOf", {"type": "integer", "multipleOf": 3}, [0, 3, 99], [1, 100]),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, [3, 9], [2, 10]),
    ("$ref", {"$defs": {"x": {"type": "null"}}, "type": "array", "items": {"$ref": "#/$defs/x"}}, [[None]], [[1]]),
    ("$ref", {"type": "array", "items": {"$ref": "#"}}, [[], [[], [[]]]], [[1]]),
    ("$defs", {"$defs": {"x": {"type": "null"}}, "$ref": "#/$defs/x"}, [None], [1]),
    ("definitions", {"definitions": {"x": {"type": "null"}}, "$ref": "#/definitions/x"}, [None], [1]),
    ("format", {"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "x"]),
    ("format", {"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29"]),
    ("format", {"type": "string", "format": "time"}, ["10:00:00Z"], ["25:00:00Z"]),
    ("format", {"type": "string", "format": "duration"}, ["P1D", "PT2H"], ["1 day"]),
    ("format", {"type": "string", "format": "email"}, ["a@b.org"], ["ab.org"]),
    ("format", {"type": "string", "format": "hostname"}, ["a.example.org"], ["-a-", "a b"]),
    ("format", {"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["256.0.0.1", "1.2.3"]),
    ("format", {"type": "string", "format": "ipv6"}, ["::1", "fe80::1"], ["1.2.3.4", "x"]),
    ("format", {"type": "string", "format": "uri"}, ["https://example.org/x?y#z"], ["no uri"]),
    ("format", {"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
]


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), CASES)
def test_an_enforced_keyword_admits_valid_instances_alone(keyword, schema, valid, invalid) -> None:
    constraint = Constraint(json_schema=json.dumps(schema))
    for instance in valid:
        assert accepts(constraint, json.dumps(instance, ensure_ascii=False)), instance
    for instance in invalid:
        assert not accepts(constraint, json.dumps(instance, ensure_ascii=False)), instance
    if keyword not in ("format", "items", "additionalItems"):
        validator = jsonschema.Draft202012Validator(schema)
        assert all(map(validator.is_valid, valid))
        assert not any(map(validator.is_valid, invalid))


@pytest.mark.parametrize(
    ("schema", "admits_others"),
    [
        ({"properties": TWO}, False),
        ({"properties": {"a": {"properties": TWO}}, "additionalProperties": True}, True),
        ({"anyOf": [{"properties": TWO, "type": "object"}, {"type": "null"}]}, False),
        ({"$defs": {"x": {"type": "object", "properties": TWO}}, "$ref": "#/$defs/x"}, False),
        ({"type": "object", "required": ["c"], "properties": TWO}, True),
        ({"type": "object", "patternProperties": {"^c": {"type": "integer"}}, "properties": TWO}, True),
        ({"allOf": [{"properties": TWO}, {"properties": {"c": {"type": "integer"}}}], "type": "object"}, True),
        ({"oneOf": [{"type": "object", "properties": TWO}, {"type": "null"}]}, True),
    ],
)
def test_objects_have_the_properties_that_the_schema_names(schema, admits_others) -> None:
    constraint = Constraint(json_schema=json.dumps({"type": ["object", "null"]} | schema))
    assert accepts(constraint, '{"c": 1}') == admits_others


def test_each_enforced_keyword_and_format_has_instances() -> None:
    assert {keyword for keyword, *_ in CASES} == ENFORCED
    assert {schema["format"] for keyword, schema, *_ in CASES if keyword == "format"} == FORMATS


def test_the_keywords_of_the_standard_are_enforced_annotations_or_refused() -> None:
    known = ENFORCED | ANNOTATIONS | REFUSED
    for name in ("draft3", "draft4", "draft6", "draft7", "draft201909", "draft202012"):
        validator = getattr(jsonschema, f"{name.replace('draft', 'Draft')}Validator")
        missing = set(validator.VALIDATORS) - known - {"extends", "disallow", "divisibleBy"}
        assert not missing, name
    assert not ENFORCED & REFUSED
    assert not ANNOTATIONS & (ENFORCED | REFUSED)


@pytest.mark.parametrize("keyword", sorted(REFUSED))
def test_a_keyword_that_is_not_enforced_is_refused_by_name_and_place(keyword) -> None:
    schema = {"type": "object", "properties": {"inner": {keyword: {"minimum": 1}}}}
    with pytest.raises(ConstraintError, match="not enforced") as refused:
        read_schema("json_schema", json.dumps(schema))
    assert f'uses "{keyword}" at #/properties/inner' in refused.value.description


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS | {"x-order"}))
def test_an_annotation_changes_nothing(keyword) -> None:
    schema = {"type": "integer", keyword: "https://example.org/x"}
    assert accepts(Constraint(json_schema=json.dumps(schema)), "12")


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "must be a JSON object"),
        ('"string"', "must be a JSON object"),
        ('{"type": "integr"}', "integr"),
        ('{"type": ["string", 3]}', "has type 3 at #"),
        ('{"$ref": "#/$defs/none"}', '$ref "#/$defs/none", which is nowhere in the schema'),
        ('{"anyOf": [{"$ref": "#/anyOf/1"}]}', "nowhere"),
        ('{"type": "object", "propertyNames": {"pattern": "^a"}}', "propertyNames"),
        ('{"requried": []}', '"requried" at #, which is not a known keyword'),
        ('{"properties": []}', "properties at #; it must be an object"),
        ('{"anyOf": []}', "anyOf at #; it must be a list of schemas"),
        ('{"items": 3}', "3 at #/items, where a schema is expected"),
        ('{"$ref": "https://example.org/schema"}', "only references within the schema"),
        ('{"type": "string", "format": "idn-email"}', 'format "idn-email" at #, which is not enforced'),
        ('{"type": "string", "format": ["date"]}', 'format ["date"] at #, which is not enforced'),
        ('{"type": "string", "format": {}}', "format {} at #"),
        ('{"type": "object", "minProperties": 3}', "minProperties 3 at #"),
        ('{"properties": {"a": {}}, "required": [["a"]]}', 'required [["a"]] at #; it must be a list of names'),
        ('{"required": "a"}', 'required "a" at #'),
        (r'{"type": "string", "pattern": "^(?!\\.)a"}', r'pattern "^(?!\\.)a" at #; look-around'),
        (r'{"type": "string", "pattern": "(a)\\1"}', "back references"),
        (r'{"type": "string", "pattern": "[[]\\bfoo"}', r"\b"),
        ('{"type": "object", "patternProperties": {"(?<=a)b": true}}', "look-around"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        ("false", "must be a JSON object"),
    ],
)
def test_a_schema_that_says_nothing_enforceable_is_refused(schema, problem) -> None:
    with pytest.raises(ConstraintError) as refused:
        make_template(Constraint(json_schema=schema))
    assert problem in refused.value.description
    assert refused.value.field == "json_schema"


def test_characters_that_only_resemble_look_around_are_enforced() -> None:
    constraint = Constraint(json_schema=json.dumps({"type": "string", "pattern": r"^\\b[(?!k]\(\?=$"}))
    assert accepts(constraint, json.dumps(r"\b!(?="))
    assert not accepts(constraint, json.dumps(r"\b!(?"))


def test_what_only_looks_like_a_keyword_or_changes_nothing_is_allowed() -> None:
    schema = {"type": "object", "properties": {"not": {"const": {"if": 1}}}, "required": ["not"], "default": {"not": 1}}
    assert accepts(Constraint(json_schema=json.dumps(schema)), '{"not": {"if": 1}}')
    schema = {"type": "array", "uniqueItems": False, "items": {"type": "integer", "format": "int64", "nullable": False}}
    assert accepts(Constraint(json_schema=json.dumps(schema)), "[1, 1]")
    names = {"type": "string", "title": "Name"}
    schema = {"type": "object", "properties": {"a": {"type": "any"}, "b": {"type": ["any", "null"]}}, "required": None}
    for instance in ('{"a": 1}', '{"b": [true]}', "{}"):
        assert accepts(Constraint(json_schema=json.dumps(schema | {"propertyNames": names})), instance)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 10_000, 200_000])
def test_depth_is_bounded(depth) -> None:
    text = '{"items":' * depth + "true" + "}" * depth
    with pytest.raises(ConstraintError, match="nested") as refused:
        read_schema("json_schema", text)
    assert len(refused.value.description) < 400


def test_places_of_subschemas_take_no_memory_of_the_length_of_their_names() -> None:
    inner = {"type": "object", "properties": {f"a{number}": {} for number in range(2000)}}
    text = json.dumps({"type": "object", "properties": {"k" * 20_000: inner}})
    tracemalloc.start()
    try:
        read_schema("json_schema", text)
        assert tracemalloc.get_traced_memory()[1] < 100 * len(text)
    finally:
        tracemalloc.stop()


def test_properties_are_written_in_the_order_of_the_schema() -> None:
    schema = {"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}, "required": ["a", "z"]}
    constraint = Constraint(json_schema=json.dumps({**schema, "additionalProperties": False}))
    assert accepts(constraint, '{"z": 1, "a": 2}')
    assert not accepts(constraint, '{"a": 2, "z": 1}')
