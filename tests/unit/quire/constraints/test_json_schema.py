"""Each keyword of JSON schema is enforced, an annotation, or refused by name; instances as in the official suite."""

import contextlib
import json
import tracemalloc
from random import Random
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
from tests.support.constraints import accepts, accepts_text, make_template
from tests.support.drawn_schemas import SchemaDrawer, faults

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


OPEN = {"type": "object", "properties": {'a"b': {"type": "integer"}}, "additionalProperties": {"type": "string"}}
IDS = (1234567890123456789, 987654321098765432, -(2**63))
# Schemas with what the engine by itself would weaken: texts that are valid, and texts that are not.
EXACT: list[tuple[Any, list[str], list[str]]] = [
    # Sets of characters; some have all control characters and not the two that JSON escapes.
    ({"type": "string", "pattern": r"^[^\\]{3}$"}, ['"abc"', r'"a\"\n"'], [r'"\\\\\\"', r'"ab\\"']),
    ({"type": "string", "pattern": '^[^"]$'}, ['"a"', r'"\\"', r'"\u001f"'], [r'"\""', r'"\u0022"']),
    ({"type": "string", "pattern": r'^[^"\\]+$'}, ['"ab"', r'"\n"'], [r'"\\"', r'"a\""']),
    ({"type": "string", "pattern": r'^[^<>:"/\\|?*]{3}$'}, ['"abc"'], [r'"ab\\"', r'"ab\""', '"ab/"']),
    ({"type": "string", "pattern": r'^([^"\n]|\n|\p{Cc})$'}, ['"a"', r'"\n"'], [r'"\""']),
    ({"type": "string", "pattern": r"^\P{Po}$"}, ['"a"'], [r'"\""', r'"\\"']),
    ({"type": "string", "pattern": r"^[\s\S][.]$"}, [r'"\"."', r'"\u0000."'], ['"a"']),
    ({"type": "string", "pattern": r'^[^\S"]$'}, ['" "', r'"\n"'], ['"a"', r'"\""']),
    ({"type": "string", "pattern": "^[[a&&b~~]$"}, ['"["', '"&"', '"~"'], ['"c"', '"]"']),
    ({"type": "string", "pattern": r"^(?P<stop>a)b$"}, ['"ab"'], ['"a"']),
    ({"patternProperties": {'^[^"]$': {"type": "null"}}, **OBJECT}, ['{"a": null}'], [r'{"\"": null}']),
    # Names in another spelling.
    (OPEN, [r'{"a\"b": 1}', '{"ab": "x"}'], [r'{"a\u0022b": "x"}', r'{"\u0061\"b": "x"}', r'{"a\"b": "x"}']),
    ({**OPEN, "properties": {"a": {}}}, ['{"a": 1}', '{"é": "x"}'], [r'{"\u0061": 1}', '{"b": 1}']),
    ({"properties": {"a\nb": {"type": "null"}}}, [r'{"a\nb": null}'], [r'{"a\u000ab": 1}']),
    ({**OPEN, "properties": {"é/": {}}}, ['{"é/": 1}'], [r'{"\u00e9/": 1}', r'{"é\/": 1}']),
    # Numbers that a double does not hold.
    ({"enum": list(IDS)}, [str(each) for each in IDS], ["1234567890123456768", "1234567890123456800", "1", '"a"']),
    (
        {"type": "object", "properties": {"a": {"type": ["integer", "null"], "enum": [IDS[0], None, "x"]}, "b": {}}},
        [f'{{"a": {IDS[0]}, "b": []}}', '{"a": null}', '{"b": 1}', "{}", f'{{"a":{IDS[0]}}}'],
        ['{"a": 1234567890123456788}', '{"a": "x"}', f'{{"b": 1, "a": {IDS[0]}}}'],
    ),
    (
        {"type": "array", "items": {"anyOf": [{"const": IDS[1]}, {"type": "null"}]}, "minItems": 2, "maxItems": 3},
        [f"[{IDS[1]}, null]", f"[null,null,{IDS[1]}]"],
        ["[]", f"[{IDS[1]}]", "[null, null, null, null]", "[null, 987654321098765433]"],
    ),
    ({"type": "integer", "minimum": 1234567890123456789}, ["1234567890123470000"], ["1234567890123456788", "-5"]),
    ({"type": "number", "maximum": -(2**53) - 1}, ["-9007199254741000"], ["-9007199254740992", "0"]),
    ({"type": "integer", "exclusiveMinimum": 2**53}, ["9007199254741000"], ["9007199254740992"]),
    ({"type": "integer", "maximum": 2**64 - 1}, ["9000000000000000000", "-1"], ["18446744073709551616"]),
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "0.0", "0.6"]),
    ({"type": "number", "exclusiveMaximum": 0, "minimum": -0.5}, ["-0.1"], ["0", "-0", "-0.0"]),
    ({"const": -0.0}, ["0"], ["1"]),
    # Keywords of several drafts.
    ({"$schema": "http://json-schema.org/draft-04/schema#", "const": 5}, ["5"], ["6"]),
    ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{"const": 1}]}, ["[1]"], ['["a"]']),
    ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6"], ["5"]),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), EXACT)
def test_what_the_engine_would_weaken_is_enforced(schema, valid, invalid) -> None:
    template = make_template(Constraint(json_schema=json.dumps(schema)))
    assert [text for text in valid if not accepts_text(template, text)] == []
    assert [text for text in invalid if accepts_text(template, text)] == []


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ('{"const": 1e400}', "has 1E+400 as const at #, which no double holds exactly"),
        ('{"enum": [0.12345678901234567890]}', "the constant 0.12345678901234567890"),
        ('{"const": 1e25}', "the constant 1e+25"),
        ('{"allOf": [{"const": 1234567890123456789}]}', "an integer beyond 2^53 where it is not enforced"),
        ('{"enum": [[1234567890123456789]]}', "an integer beyond 2^53"),
        ('{"type": "integer", "minimum": 1e19}', "has at # minimum 1e+19; numbers are enforced up to 9,223,"),
        ('{"minimum": NaN}', "minimum nan"),
        ('{"minimum": "1"}', 'has "1" as minimum at #; it must be a number'),
        ('{"enum": 5}', "has 5 as enum at #; it must be a list"),
        ('{"$ref": null}', "has $ref null at #"),
        ('{"multipleOf": true}', "has true as multipleOf at #; it must be a number"),
        ('{"multipleOf": "3"}', 'has "3" as multipleOf at #; it must be a number'),
        ('{"type": "array", "items": {"const": 1234567890123456789}, "minItems": "x"}', "an integer beyond 2^53"),
        ('{"multipleOf": 4000000007}', "multipleOf 4000000007 at #"),
        ('{"multipleOf": 0.7000000001}', "multipleOf 0.7000000001"),
        ('{"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}', "too many digits together"),
        ('{"minLength": 2.00000000000000000001}', "2.00000000000000000001 as minLength"),
        ('{"enum": ["\\ud800"]}', "half of a surrogate pair"),
        ('{"pattern": "[[:alpha:]]"}', "[: in a class is not enforced"),
        ('{"pattern": "[a--b]"}', "-- in a class"),
        ('{"pattern": "a++"}', "the repetition ++"),
        ('{"pattern": "(?x)a b"}', "the flag x"),
        ('{"pattern": "[a"}', "a class does not end"),
        (r'{"pattern": "\\x00|\\x01"}', "both U+0000 and U+0001"),
        ('{"prefixItems": [{}], "additionalItems": false}', "prefixItems with the keywords of earlier drafts"),
        ('{"properties": {"a": {}}, "$ref": "#/properties"}', '$ref "#/properties", which leads to no schema'),
        (r'{"required": ["a"], "properties": {"a": {"const": "\u001b[0m"}}, "additionalProperties": true}', "control"),
        (r'{"properties": {"a": {"pattern": "\\x1b"}}, "additionalProperties": true}', "control characters"),
        # Schemas that say nothing that can be enforced.
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
def test_what_is_not_enforced_is_refused_by_name(schema, problem) -> None:
    with pytest.raises(ConstraintError) as refused:
        make_template(Constraint(json_schema=schema))
    assert problem in refused.value.description
    assert refused.value.field == "json_schema"


def test_a_schema_within_lark_is_read_as_one_by_itself() -> None:
    pattern = {"type": "string", "pattern": '^[^"]$'}
    constraint = Constraint(lark=f"start: /a/ b\nb: %json {json.dumps(pattern)}\n")
    assert accepts(constraint, 'a"b"')
    assert not accepts(constraint, r'a"\""')
    with pytest.raises(ConstraintError, match='uses "not" at #, which is not enforced') as refused:
        make_template(Constraint(lark='start: %json {"not": {}}'))
    assert refused.value.field == "lark"


@pytest.mark.parametrize("seed", range(40))
def test_drawn_schemas_are_enforced_as_jsonschema_reads_them(seed) -> None:
    drawer = SchemaDrawer(Random(seed))
    with contextlib.suppress(ConstraintError):
        assert faults(drawer, drawer.schema(), num_values=4) == []


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
