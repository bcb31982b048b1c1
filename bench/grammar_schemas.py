"""JSON schemas of usual shapes: extraction, tools, settings, trees, unions, long lists of names."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

_TEXT = {"type": "string"}
_SHORT = {"type": "string", "minLength": 1, "maxLength": 24}
_NUMBER = {"type": "number"}
_COUNT = {"type": "integer", "minimum": 0, "maximum": 10_000}
_FLAG = {"type": "boolean"}
_DATE = {"type": "string", "format": "date"}


def closed(properties: Mapping[str, Any], optional: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """An object with only these properties; all but the optional ones are required."""
    required = [name for name in properties if name not in optional]
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
        **more,
    }


def list_of(items: Any, low: int = 0, high: int | None = None) -> dict[str, Any]:
    sizes = {"minItems": low} if high is None else {"minItems": low, "maxItems": high}
    return {"type": "array", "items": items, **sizes}


def _scalars() -> Iterator[tuple[str, Schema]]:
    yield "string", _TEXT
    yield "short-string", _SHORT
    yield "integer", {"type": "integer"}
    yield "bounded-integer", {"type": "integer", "minimum": -40, "maximum": 125}
    yield "bounded-number", {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
    yield "multiple", {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100}
    yield "boolean", _FLAG
    yield "nullable", {"type": ["string", "null"], "maxLength": 16}
    yield "enum-of-texts", {"enum": ["positive", "neutral", "negative"]}
    yield "enum-of-kinds", {"enum": ["a", 1, None, True, {"k": [1, 2]}]}
    yield "const", {"const": {"version": 2, "tags": ["x", "y"]}}
    for name in ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "hostname", "duration"):
        yield name, {"type": "string", "format": name}
    yield "pattern-of-phone", {"type": "string", "pattern": r"^\+[1-9][0-9]{1,2} [0-9]{3,4} [0-9]{4,8}$"}
    yield "pattern-of-plate", {"type": "string", "pattern": "^[A-Z]{1,3}-[A-Z]{1,2} [1-9][0-9]{0,3}$"}
    yield "pattern-and-length", {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "maxLength": 12}


def _objects() -> Iterator[tuple[str, Schema]]:
    yield "person", closed({"name": _SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 120}, "email": _SHORT})
    yield (
        "sentiment",
        closed({"label": {"enum": ["good", "bad"]}, "score": {"type": "number", "minimum": 0, "maximum": 1}}),
    )
    yield "optional-fields", closed({"a": _COUNT, "b": _FLAG, "c": _SHORT, "d": _COUNT}, ("b", "c", "d"))
    yield "all-optional", closed({"x": _COUNT, "y": _COUNT, "z": _COUNT}, ("x", "y", "z"))
    yield "many-fields", closed({f"field_{index}": (_COUNT, _FLAG, _SHORT)[index % 3] for index in range(24)})
    yield "nested", closed({"a": closed({"b": closed({"c": closed({"d": _FLAG})})})})
    yield "open-object", {"type": "object", "properties": {"id": _COUNT}, "required": ["id"], "maxProperties": 1}
    yield "map-of-numbers", {"type": "object", "additionalProperties": _COUNT, "maxProperties": 4}
    yield (
        "names-by-pattern",
        {
            "type": "object",
            "patternProperties": {"^x_[a-z]{1,6}$": _COUNT},
            "additionalProperties": False,
            "maxProperties": 3,
        },
    )
    yield "at-least-one", {"type": "object", "additionalProperties": _FLAG, "minProperties": 1, "maxProperties": 2}
    yield "unicode-names", closed({"größe": _COUNT, "名前": _SHORT, "prénom": _SHORT})
    yield "escaped-names", closed({'a "quoted" name': _FLAG, "back\\slash": _FLAG, "tab\tname": _FLAG})
    yield (
        "address",
        closed(
            {
                "street": _SHORT,
                "city": _SHORT,
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "IT", "JP", "US"]},
            }
        ),
    )
    yield (
        "invoice",
        closed(
            {
                "number": _SHORT,
                "date": _DATE,
                "lines": list_of(closed({"item": _SHORT, "count": _COUNT, "price": _NUMBER}), 1, 3),
                "total": _NUMBER,
                "paid": _FLAG,
            }
        ),
    )
    yield (
        "recipe",
        closed(
            {
                "title": _SHORT,
                "minutes": _COUNT,
                "ingredients": list_of(closed({"name": _SHORT, "grams": _COUNT}), 1, 4),
                "steps": list_of(_SHORT, 1, 4),
            }
        ),
    )
    yield (
        "event",
        closed({"title": _SHORT, "start": {"type": "string", "format": "date-time"}, "guests": list_of(_SHORT, 0, 3)}),
    )
    yield (
        "settings",
        closed(
            {
                "theme": {"enum": ["light", "dark"]},
                "font_size": {"type": "integer", "minimum": 8, "maximum": 32},
                "plugins": {"type": "object", "additionalProperties": _FLAG, "maxProperties": 3},
                "proxy": {"type": ["null", "string"], "maxLength": 20},
            }
        ),
    )


def _arrays() -> Iterator[tuple[str, Schema]]:
    yield "texts", list_of(_SHORT, 1, 5)
    yield "matrix", list_of(list_of({"type": "integer", "minimum": -9, "maximum": 9}, 3, 3), 3, 3)
    yield "pair", {"type": "array", "prefixItems": [_SHORT, _COUNT], "items": False, "minItems": 2}
    yield (
        "tagged-tuple",
        {"type": "array", "prefixItems": [{"const": "v1"}], "items": _COUNT, "minItems": 1, "maxItems": 4},
    )
    yield (
        "entities",
        list_of(closed({"text": _SHORT, "type": {"enum": ["PERSON", "PLACE", "ORG"]}, "start": _COUNT}), 0, 4),
    )
    yield "exactly-ten", list_of(_FLAG, 10, 10)
    yield "nested-lists", list_of(list_of(list_of(_COUNT, 0, 2), 0, 2), 0, 2)


def _unions() -> Iterator[tuple[str, Schema]]:
    circle = closed({"shape": {"const": "circle"}, "radius": _COUNT})
    square = closed({"shape": {"const": "square"}, "side": _COUNT})
    yield "union-by-tag", {"anyOf": [circle, square]}
    yield "one-of-by-tag", {"oneOf": [circle, square]}
    yield "union-of-types", {"anyOf": [_COUNT, _SHORT, list_of(_FLAG, 0, 2), {"type": "null"}]}
    yield (
        "all-of",
        {
            "allOf": [
                {"type": "object", "properties": {"a": _COUNT}, "required": ["a"]},
                {"type": "object", "properties": {"b": _FLAG}, "required": ["b"]},
            ],
            "maxProperties": 2,
        },
    )
    yield "optional-union", closed({"value": {"anyOf": [circle, {"type": "null"}]}})
    yield "bounded-all-of", {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}
    yield (
        "commands",
        {
            "anyOf": [
                closed({"do": {"const": name}, "to": _SHORT})
                for name in ("open", "close", "copy", "move", "delete", "rename", "list", "find")
            ]
        },
    )


def _references() -> Iterator[tuple[str, Schema]]:
    yield (
        "definitions",
        {
            "$defs": {"point": closed({"x": _COUNT, "y": _COUNT})},
            **closed({"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}}),
        },
    )
    tree = closed({"value": _COUNT, "children": list_of({"$ref": "#/$defs/node"}, 0, 2)})
    yield "tree", {"$defs": {"node": tree}, "$ref": "#/$defs/node"}
    linked = closed({"value": _COUNT, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}})
    yield "linked-list", linked
    expression = {
        "anyOf": [
            _COUNT,
            closed({"op": {"enum": ["+", "*"]}, "left": {"$ref": "#/$defs/e"}, "right": {"$ref": "#/$defs/e"}}),
        ]
    }
    yield "expression", {"$defs": {"e": expression}, "$ref": "#/$defs/e"}
    yield (
        "old-definitions",
        {
            "definitions": {"id": {"type": "string", "pattern": "^[a-f0-9]{8}$"}},
            **closed({"ids": list_of({"$ref": "#/definitions/id"}, 1, 3)}),
        },
    )


def _tools() -> Iterator[tuple[str, Schema]]:
    arguments = {
        "get_weather": closed({"city": _SHORT, "unit": {"enum": ["celsius", "fahrenheit"]}}, ("unit",)),
        "search": closed({"query": _SHORT, "limit": {"type": "integer", "minimum": 1, "maximum": 50}}, ("limit",)),
        "send_mail": closed({"to": list_of({"type": "string", "format": "email"}, 1, 2), "subject": _SHORT}),
    }
    calls = [closed({"name": {"const": name}, "arguments": schema}) for name, schema in arguments.items()]
    yield "tool-call", calls[0]
    yield "tool-calls", list_of({"anyOf": calls}, 1, 2)
    yield "thought-and-call", closed({"thought": _SHORT, "call": {"anyOf": calls}})


def _large() -> Iterator[tuple[str, Schema]]:
    names = [
        f"{first}-{second}-{number}"
        for first in ("alpha", "beta", "gamma", "delta")
        for second in ("red", "green", "blue", "black", "white")
        for number in range(50)
    ]
    yield "enum-of-1000", {"enum": names}
    yield (
        "hundred-optional-fields",
        closed({f"option_{index}": _FLAG for index in range(100)}, tuple(f"option_{index}" for index in range(100))),
    )
    yield (
        "fifty-kinds",
        {"anyOf": [closed({"kind": {"const": f"kind_{index}"}, f"only_{index}": _COUNT}) for index in range(50)]},
    )
    yield "long-text", closed({"text": {"type": "string", "minLength": 10, "maxLength": 2000}})


def all_schemas() -> dict[str, Schema]:
    """All schemas by name."""
    groups = (_scalars, _objects, _arrays, _unions, _references, _tools, _large)
    return {name: schema for group in groups for name, schema in group()}
