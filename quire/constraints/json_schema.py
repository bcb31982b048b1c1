"""JSON schemas as constraints: the enforced keywords, and errors for all others.

A schema is read to a limited depth, so a deeply nested one is refused and not a crash.
"""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from decimal import Decimal
from itertools import count
from typing import Any
from urllib.parse import unquote

from quire.constraints.large_integers import LargeIntegers
from quire.constraints.numbers import (
    BOUNDS,
    Number,
    can_be_intersected,
    is_exact,
    is_large,
    move_apart,
    move_bounds,
    read_float,
    step_of,
)
from quire.constraints.patterns import CONTROL, names_control, sound_pattern

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 50_000
MAX_REGEX_CHARACTERS = 8_192
"""The time to compile a regex grows with the square of its length, and the time of each mask with the text that it
forces: half a second for `(a?)` 8,000 times. A worker compiles while it streams for other requests."""


class ConstraintError(ValueError):
    """A constraint that cannot be enforced.

    Attributes:
        field: The invalid field, relative to the constraint; empty for the constraint itself.
        description: The reason, and what to do instead.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field or 'constraint'} {description}")
        self.field = field
        self.description = description


# If alternatives or references meet keywords of objects, or alternatives exclude each other, additional properties may
# be needed to match all of them or to distinguish them.
_COMBINED = frozenset(("allOf", "anyOf", "oneOf", "$ref"))
# Annotations that the compiler needs, since references use them. Without a draft it reads the keywords of all drafts.
_NAMES = frozenset(("$id", "$anchor"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties", "patternProperties", "minProperties"))
# Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = frozenset(("items", "additionalProperties", "additionalItems"))
_LIST = frozenset(("anyOf", "oneOf", "allOf", "prefixItems"))
BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions"))
"""Keywords whose value is an object of schemas, by names of the author's choice."""

ENFORCED = frozenset(
    (
        *_ONE, *_LIST, *BY_NAME, "$ref", "const", "enum", "type", "minItems", "maxItems", "required", "minProperties",
        "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
        "exclusiveMaximum", "multipleOf",
    )
)  # fmt: skip
"""Keywords that are enforced in the generated text."""

ANNOTATIONS = frozenset(
    (
        "$anchor", "$comment", "$id", "$schema", "contentEncoding", "contentMediaType", "default", "deprecated",
        "description", "discriminator", "example", "examples", "externalDocs", "id", "readOnly", "strict", "title",
        "uniqueItems", "writeOnly", "xml",
    )
)  # fmt: skip
"""Keywords that are allowed and have no effect, like names that begin with "x-". Only `uniqueItems` influences
validity; generators of schemas often write it, and models rarely repeat an item."""

FORMATS = frozenset(("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"))
"""Values of `format` that are enforced, to the extent that a regular expression can express them."""

REFUSED = frozenset(
    (
        "$dynamicAnchor", "$dynamicRef", "$recursiveAnchor", "$recursiveRef", "$vocabulary", "contains",
        "contentSchema", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
        "minContains", "not", "nullable", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
    )
)  # fmt: skip
"""Keywords of JSON schema or OpenAPI that are not enforced, and therefore refused by name."""

_HINTS = {
    "nullable": 'use "type": [..., "null"]',
    "dependentRequired": "use anyOf of objects with other lists of required properties",
    "if": "use anyOf",
    "not": "say what is allowed instead",
    "propertyNames": "use patternProperties and additionalProperties: false",
}
# Values with which a refused keyword has no effect.
_NEUTRAL = {"nullable": False, "unevaluatedProperties": True, "unevaluatedItems": True, "propertyNames": True}
_TYPES = frozenset(("null", "boolean", "object", "array", "number", "integer", "string"))
_SHARED = ("#/$defs/", "#/definitions/")
# Some libraries write this for a value of any type.
_ANY_TYPE = "any"

# A space, or a line break with indentation, as programs write JSON. If more were allowed, a small model could generate
# white space until it has no tokens left.
_WHITE_SPACE = r" |\n {0,32}|\n\t{1,16}"
_FREELY_SPACED = {"whitespace_pattern": _WHITE_SPACE}
_NOT_SPACED = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
# In the names of additional properties the engine allows any character as a code (\uXXXX), and compares the spelling
# only: the name of a property could be written in another one, and escape its schema. Without codes each has just one.
_NO_CODES = {"json_allowed_escapes": 'nrbtf\\"'}
# Maximum characters of the path of a subschema in errors.
_SHOWN_PATH = 120


@contextmanager
def errors_of(field: str) -> Iterator[None]:
    """Makes the ValueErrors of a field ConstraintErrors."""
    try:
        yield
    except ConstraintError:
        raise
    except ValueError as error:
        raise ConstraintError(field, str(error)) from error


def read_schema(field: str, text: str, *, large_allowed: bool = False) -> dict[str, Any]:
    """The schema in a text, without annotations. Objects whose properties it names have no others, unless it allows
    them by `additionalProperties`: a model that may invent properties rarely comes to an end. `large_allowed`: whether
    constants may be integers beyond 2^53.

    Raises:
        ConstraintError: it is not a schema, is nested too deeply, or uses a keyword that is not enforced.
    """
    with errors_of(field):
        return _clean(_loaded(text), large_allowed=large_allowed)[0]


def enforced_schema(field: str, text: str, *, no_white_space: bool = False) -> dict[str, Any]:
    """`read_schema`, with how JSON is written: `x-guidance` of the schema, by which llguidance takes it."""
    with errors_of(field):
        schema, subschemas = _clean(_loaded(text))
        return schema | {"x-guidance": _options(subschemas, no_white_space=no_white_space)}


def schema_grammar(text: str, *, no_white_space: bool = False) -> dict[str, Any]:
    """One grammar of llguidance's list of grammars: `enforced_schema`, or Lark where constants are beyond 2^53.

    Raises:
        ValueError: as `read_schema`, but for constants that it can spell.
    """
    schema, subschemas = _clean(_loaded(text), large_allowed=True)
    options = _options(subschemas, no_white_space=no_white_space)
    num_large = sum(is_large(number) for each in subschemas for number in _constants(each))
    if not num_large:
        return {"json_schema": schema | {"x-guidance": options}}
    grammar = LargeIntegers(schema, options, "" if no_white_space else _WHITE_SPACE)
    references = [each["$ref"] for each in subschemas if "$ref" in each]
    if grammar.num_spelled < num_large or not all(each.startswith(_SHARED) for each in references):
        raise ValueError(
            "has an integer beyond 2^53 where it is not enforced; it may be a const or in an enum, within lists, anyOf "
            "and objects that have only named properties, not behind a $ref"
        )
    return {"lark_grammar": grammar.lark}


def _options(subschemas: Sequence[dict[str, Any]], *, no_white_space: bool) -> dict[str, Any]:
    options = _NOT_SPACED if no_white_space else _FREELY_SPACED
    if any(map(_names_some_properties, subschemas)):
        for each in subschemas:
            _check_codes(each)
        options = options | _NO_CODES
    return options


def _loaded(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_float=read_float, parse_constant=float)
    except RecursionError as error:
        raise ValueError(f"is nested too deeply; the max is {MAX_DEPTH} levels of schemas") from error
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from error
    if "\\ud" in text.lower() and re.search("[\ud800-\udfff]", json.dumps(schema, ensure_ascii=False, default=str)):
        raise ValueError("has half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError(f"is {_shown(schema)}; it must be a JSON object")
    return schema


def _clean(root: dict[str, Any], *, large_allowed: bool = False) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The schema as it is enforced, and all schemas in it."""
    results: list[dict[str, Any]] = []
    numbers = count(1)

    def read(path: str, depth: int, schema: Any) -> Any:
        if next(numbers) > MAX_SUBSCHEMAS:
            raise ValueError(f"has more than {MAX_SUBSCHEMAS:,} subschemas")
        if depth > MAX_DEPTH:
            raise ValueError(f"is nested more than {MAX_DEPTH} levels deep at {path}")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"has {_shown(schema)} at {path}, where a schema is expected")
        result = {name: value for name, value in schema.items() if not _says_nothing(name, value)}
        results.append(result)
        for name in result:
            if name not in ENFORCED and name not in _NAMES:
                raise _not_enforced(name, path)
        _check_values(path, result)
        for name, value in result.items():
            if name in BY_NAME:
                # Keeps the order of the schema, which becomes the order of the answer's properties.
                keys = {each: _sound(path, each) if name == "patternProperties" else each for each in value}
                result[name] = {keys[key]: read(_place(path, name, key), depth + 1, value[key]) for key in value}
            elif isinstance(value, list) and (name in _LIST or name == "items"):
                result[name] = [read(_place(path, name, str(at)), depth + 1, each) for at, each in enumerate(value)]
            elif name in _ONE:
                result[name] = read(_place(path, name), depth + 1, value)
        return result

    cleaned = read("#", 0, root)
    for each in results:
        for number in _constants(each):
            if not (is_exact(number) or (large_allowed and is_large(number))):
                raise ValueError(
                    f"has the constant {number!s:.60}, which is not enforced exactly; use integers up to 2^53, other "
                    "numbers of up to 15 digits and below it, or strings"
                )
    _check_references(cleaned, results)
    _check_steps(results)
    move_apart(results)
    _close_objects(results)
    return cleaned, results


def _says_nothing(name: str, value: Any) -> bool:
    """Whether a keyword is an annotation, or admits everything, as generators of schemas write it by default."""
    if name.startswith("x-") or (name in ANNOTATIONS and name not in _NAMES):
        return True
    if name == "type":
        return value == _ANY_TYPE or (isinstance(value, list) and _ANY_TYPE in value)
    if name == "propertyNames" and isinstance(value, dict):
        # Every name is a string.
        return all(key in ANNOTATIONS or (key == "type" and kind == "string") for key, kind in value.items())
    return (name == "required" and value is None) or value is _NEUTRAL.get(name, ...)


def _check_references(root: dict[str, Any] | bool, schemas: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError for a reference to a missing schema."""
    known = set(map(id, schemas))
    for reference in {each["$ref"] for each in schemas if isinstance(each.get("$ref"), str)}:
        if reference.startswith("#/"):
            place = _target(root, reference)
            if not isinstance(place, bool) and id(place) not in known:
                raise ValueError(f"has $ref {_shown(reference)}, which leads to no schema")


def _target(root: Any, reference: str) -> Any:
    place = root
    for step in reference.removeprefix("#").split("/")[1:]:
        key = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(place, dict) and key in place:
            place = place[key]
        elif isinstance(place, list) and key.isdecimal() and len(key) < 6 and int(key) < len(place):
            place = place[int(key)]
        else:
            raise ValueError(f"has $ref {_shown(reference)}, which is nowhere in the schema")
    return place


def _leaves(schema: dict[str, Any]) -> Iterator[Any]:
    """The texts, numbers and other plain values in the constants of a schema, without recursion."""
    pending: list[Any] = [schema.get("const"), schema.get("enum")]
    while pending:
        match pending.pop():
            case list() as values:
                pending += values
            case dict() as values:
                pending += values.values()
            case value:
                yield value


def _constants(schema: dict[str, Any]) -> Iterator[Number]:
    return (each for each in _leaves(schema) if isinstance(each, Number) and not isinstance(each, bool))


def _check_steps(schemas: Sequence[dict[str, Any]]) -> None:
    """Raises ValueError if the engine may have to compute common multiples, and cannot."""
    steps = [step for each in schemas if "multipleOf" in each and (step := step_of(each["multipleOf"])) is not None]
    is_combined = any(each.keys() & _COMBINED and (len(each) > 1 or "allOf" in each) for each in schemas)
    if is_combined and not can_be_intersected(steps):
        raise ValueError(
            "combines values of multipleOf by allOf, anyOf, oneOf or $ref, which have too many digits together"
        )


def _close_objects(schemas: Sequence[dict[str, Any]]) -> None:
    """Excludes properties that the schemas do not name, if the remaining texts stay valid and there are any."""
    if any(
        "allOf" in each or "oneOf" in each or (each.keys() & _COMBINED and each.keys() & _OF_OBJECTS)
        for each in schemas
    ):
        return
    for schema in schemas:
        names = schema.get("properties")
        if names is None or schema.keys() & {"additionalProperties", "patternProperties", "const", "enum"}:
            continue
        if all(name in names for name in schema.get("required", ())):
            schema["additionalProperties"] = False


def _names_some_properties(schema: dict[str, Any]) -> bool:
    """Whether objects have properties of several kinds: by name, by a pattern, others."""
    kinds = schema.keys() & {"properties", "required", "patternProperties"}
    return len(kinds - {"required"}) > 1 or bool(kinds and schema.get("additionalProperties") is not False)


def _check_codes(schema: dict[str, Any]) -> None:
    """Raises ValueError for a text with characters that JSON writes as codes: the engine would leave them out."""
    patterns = [schema.get("pattern"), *schema.get("patternProperties", ())]
    shown = [f"the text {_shown(each)}" for each in _leaves(schema) if isinstance(each, str) and CONTROL.search(each)]
    shown += [f"the pattern {_shown(each)}" for each in patterns if isinstance(each, str) and names_control(each)]
    if shown:
        raise ValueError(
            f"has {shown[0]}, whose control characters are not enforced in a schema whose objects have named "
            "properties and others; set additionalProperties: false"
        )


def _place(path: str, *steps: str) -> str:
    """The path of a subschema as errors show it, cut off: each of many subschemas has one, and a step may be long."""
    return "/".join((path, *(step[:_SHOWN_PATH] for step in steps)))[:_SHOWN_PATH]


def _check_values(path: str, schema: dict[str, Any]) -> None:
    for name, value in schema.items():
        if name in BY_NAME and not isinstance(value, dict):
            raise ValueError(f"has {_shown(value)} as {name} at {path}; it must be an object")
        is_list = name in _LIST or (name == "items" and isinstance(value, list))
        if is_list and (not isinstance(value, list) or (not value and name != "prefixItems")):
            raise ValueError(f"has {_shown(value)} as {name} at {path}; it must be a list of schemas")
    reference = schema.get("$ref")
    if "$ref" in schema and not (isinstance(reference, str) and reference.startswith("#")):
        raise ValueError(
            f"has $ref {_shown(reference)} at {path}; only references within the schema (#/...) are followed"
        )
    if not isinstance(schema.get("enum", []), list):
        raise ValueError(f"has {_shown(schema['enum'])} as enum at {path}; it must be a list")
    types = schema.get("type", "string")
    types = types if isinstance(types, list) else [types]
    for each in types:
        if not isinstance(each, str) or each not in _TYPES:
            known = ", ".join(sorted(_TYPES))
            raise ValueError(f"has type {_shown(each)} at {path}; it must be one of {known}")
    if "string" not in types:
        # `format` applies to strings only.
        schema.pop("format", None)
    format_name = schema.get("format")
    if format_name is not None and not (isinstance(format_name, str) and format_name in FORMATS):
        known = ", ".join(sorted(FORMATS))
        raise ValueError(f"has format {_shown(format_name)} at {path}, which is not enforced; enforced are {known}")
    if isinstance(pattern := schema.get("pattern"), str):
        schema["pattern"] = _sound(path, pattern)
    _check_numbers(path, schema)
    if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), list)):
        raise ValueError(f"has prefixItems with the keywords of earlier drafts at {path}; use items")
    fewest, required = schema.get("minProperties", 0), schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise ValueError(f"has required {_shown(required)} at {path}; it must be a list of names")
    if isinstance(fewest, int) and fewest > max(1, len(required)):
        raise ValueError(
            f"has minProperties {fewest} at {path}, which is not enforced above 1 and the number of required "
            "properties; list them in required"
        )


def _sound(path: str, pattern: str) -> str:
    check_regex(pattern, f" in the pattern at {path}")
    try:
        return sound_pattern(pattern)
    except ValueError as error:
        raise ValueError(f"has the pattern {_shown(pattern)} at {path}; {error}") from error


def _check_numbers(path: str, schema: dict[str, Any]) -> None:
    """Moves bounds inwards that the engine does not hold exactly; refuses a `multipleOf` that it does not hold."""
    for keyword in sorted((BOUNDS | {"multipleOf"}) & schema.keys()):
        value = schema[keyword]
        # In draft 4 exclusive bounds are true or false.
        is_number = not isinstance(value, bool) or keyword.startswith("exclusive")
        if not (is_number and isinstance(value, int | float | Decimal)):
            raise ValueError(f"has {_shown(schema[keyword])} as {keyword} at {path}; it must be a number")
    try:
        move_bounds(schema)
    except ValueError as error:
        raise ValueError(f"has at {path} {error}") from error
    step = schema.get("multipleOf")
    if isinstance(step, int | float | Decimal) and step_of(step) is None:
        raise ValueError(f"has multipleOf {step!s:.60} at {path}, which is not enforced; it has up to 8 digits")
    for name, value in schema.items():
        if isinstance(value, Decimal):
            raise ValueError(f"has {value!s:.60} as {name} at {path}, which no double holds exactly")


def check_regex(regex: str, where: str = "") -> None:
    """Raises ValueError if a regular expression is too long."""
    if len(regex) > MAX_REGEX_CHARACTERS:
        raise ValueError(
            f"has {len(regex):,} characters{where}; a regular expression has at most {MAX_REGEX_CHARACTERS:,} "
            "(MAX_REGEX_CHARACTERS)"
        )


def _not_enforced(name: str, path: str) -> ValueError:
    if name in REFUSED:
        hint = f"; {_HINTS[name]}" if name in _HINTS else "; leave it out"
        return ValueError(f'uses "{name}" at {path}, which is not enforced{hint}')
    return ValueError(
        f'uses "{name:.64}" at {path}, which is not a known keyword; names of annotations begin with "x-"'
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
