"""Schemas of arguments as grammars in Lark, for formats of calls whose arguments are not JSON: values between tags,
Gemma's notation, and keyword arguments in Python."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from gateway.text.formats.rendered import TagShape
from gateway.text.formats.scanning import SPACE
from quire.constraints.json_schema import ConstraintError, enforced_schema, read_schema
from quire.constraints.program import MAX_CONSTRAINT_BYTES, literals, quoted

_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
# Keywords that are enforced in a notation that is not JSON, by type.
_KEYWORDS: Mapping[str, frozenset[str]] = {
    "string": frozenset(("minLength", "maxLength", "pattern")),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
_PYTHON_TYPES: Mapping[str, Any] = {
    "string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip
# Keywords that do not restrict a value by themselves.
_NEUTRAL = frozenset(("type", "$defs", "definitions", "$id", "$anchor", "$schema"))
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# An anchor of a regex that is neither escaped nor a negation in brackets.
_ANCHOR = re.compile(r"(?<![\\\[])[\^$]")
_SHORT_CLASS = re.compile(r"\\.", re.DOTALL)
_ASCII = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_BARE_KEY = re.compile(r"[\w.-]+", re.ASCII)


def json_rule(schema: Any, *, no_white_space: bool = False) -> str:
    """JSON of a schema in Lark, with the usual bounded white space, or none."""
    written = json.dumps(enforced_schema("", json.dumps(schema), no_white_space=no_white_space))
    # A slash would begin a regular expression.
    return "%json " + written.replace("/", "\\u002f")


def text_parameters(schema: str) -> frozenset[str]:
    """The parameters that the schema of the arguments restricts to strings."""
    try:
        root: Any = json.loads(schema or "{}")
        properties = cast(dict[str, Any], _followed(root, root).get("properties", {}))
        return frozenset(name for name, value in properties.items() if _is_text(root, value))
    except (ValueError, AttributeError, RecursionError):
        return frozenset()


def _is_text(root: Any, schema: Any) -> bool:
    try:
        meant = _followed(root, schema)
    except ConstraintError:
        return False
    if not isinstance(meant, dict):
        return False
    fields = cast(dict[str, Any], meant)
    if "type" in fields:
        return fields["type"] == "string"
    values: Any = fields.get("enum", [fields["const"]] if "const" in fields else None)
    return isinstance(values, list) and all(isinstance(value, str) for value in cast(list[Any], values))


def _followed(root: Any, schema: Any) -> Any:
    """The schema, or the referenced schema if it is a reference. Raises ConstraintError for a dangling reference."""
    for _ in range(64):
        if not isinstance(schema, Mapping) or "$ref" not in schema:
            return schema
        reference: Any = schema["$ref"]
        found = root
        try:
            for step in reference.removeprefix("#").split("/")[1:]:
                step = step.replace("~1", "/").replace("~0", "~")
                found = found[int(step) if isinstance(found, list) else step]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConstraintError("", f"has the $ref {reference!r:.80}, which leads nowhere") from error
        schema = found
    raise ConstraintError("", "has a $ref that leads to itself")


class Rules:
    """Builds the rules of a grammar, whose names begin with `prefix`. Their size is limited as a constraint's size is,
    since each parameter of a short schema may repeat a long part of it."""

    def __init__(self, prefix: str, special_tokens: Mapping[str, int]) -> None:
        self.lines: list[str] = []
        self.special_tokens = special_tokens
        self._prefix = prefix
        self._num_characters = 0

    def add(self, expression: str, attributes: str = "") -> str:
        """Adds a rule; returns its name."""
        name = self.reserve()
        self.define(name, expression, attributes)
        return name

    def reserve(self) -> str:
        """A name for a rule that is defined later."""
        name = f"{self._prefix}_{len(self.lines)}"
        self.lines.append("")
        return name

    def define(self, name: str, expression: str, attributes: str = "") -> None:
        """Defines a reserved rule. Raises ConstraintError if all rules together are too long."""
        self._num_characters += len(expression)
        if self._num_characters > MAX_CONSTRAINT_BYTES:
            raise ConstraintError("", f"takes more than {MAX_CONSTRAINT_BYTES:,} characters as a grammar")
        self.lines[int(name.rpartition("_")[2])] = f"{name}{attributes}: {expression}"

    def terminal(self, expression: str) -> str:
        name = self.reserve().upper()
        self.define(name, expression)
        return name

    def text_before(self, end: str, schema: Mapping[str, Any]) -> str:
        """A text of a schema up to and with the first `end`. Raises ConstraintError if it cannot be enforced."""
        inside = f"/(.|\\n){_bounds(schema)}/"
        if "pattern" in schema:
            inside += f" & /{_whole_pattern(schema['pattern'])}/"
        mark = end.lstrip(SPACE)
        escaped = re.escape(mark).replace("/", "\\/")
        without = f" & ~/(.|\\n)*{escaped}(.|\\n)*/"
        if all(token not in end for token in self.special_tokens):
            # The mark ends the text, also without a line break before it.
            return self.add(inside + (without if mark != end else ""), f"[suffix={quoted(end)}]")
        text = self.terminal(inside + without)
        if mark != end:
            text = self.terminal(f"{text} {quoted(end.removesuffix(mark))}")
        return f"{text} {literals(mark, self.special_tokens)}"


def tagged_arguments(schema: str, rules: Rules, tags: TagShape) -> str:
    """The expression of arguments between tags, in the order of the schema."""
    whole = read_schema("", schema)
    shared = {name: whole[name] for name in ("$defs", "definitions") if name in whole}
    root = _followed(whole, whole)
    _check_names(root)
    _refuse(root.keys() - _KEYWORDS["object"] - _NEUTRAL - {"description"})
    if isinstance(root.get("additionalProperties"), dict):
        _refuse({"additionalProperties"})
    texts, required = text_parameters(schema), root.get("required", ())
    end = tags.close.rstrip(SPACE)
    after = literals(tags.close[len(end) :], rules.special_tokens)
    if "properties" not in root and root.get("additionalProperties") is not False:
        before = literals(tags.open, rules.special_tokens)
        closes = dict.fromkeys(literals(close, rules.special_tokens) for close in (tags.key_close, tags.other_close))
        behind = f"({' | '.join(closes)})"
        parts = before, rules.terminal("/[^<>\\n]{1,128}/"), behind, rules.text_before(end, {}), after
        return f"{rules.add(' '.join(filter(None, parts)))}*"
    closed = literals(end, rules.special_tokens)
    arguments: list[str] = []
    for name, value in root.get("properties", {}).items():
        if name in texts:
            _refuse(value.keys() - {"$ref"} - _NEUTRAL - {"description", "default"} if "$ref" in value else ())
            value = _followed(whole, value)
        choices = _listed(value) if name in texts else None
        if choices is not None:
            inner = f"({' | '.join(filter(None, (quoted(choice) for choice in choices)))}) {closed}"
        elif name in texts:
            _refuse(value.keys() - _KEYWORDS["string"] - _NEUTRAL)
            inner = rules.text_before(end, value)
        else:
            in_json = json_rule(shared | value if isinstance(value, dict) else {})
            written = {quoted(tags.spelled[constant]) for constant in _constants_of(value)}
            inner = f"({' | '.join((in_json, *sorted(written)))}) {closed}"
        close = tags.key_close if name in texts else tags.other_close
        opened = literals(f"{tags.open}{name}{close}", rules.special_tokens)
        rule = rules.add(" ".join(part for part in (opened, inner, after) if part))
        arguments.append(rule if name in required else f"{rule}?")
    return " ".join(arguments) or '""'


def _constants_of(schema: Any) -> set[str]:
    """The constants of JSON that a schema allows, in JSON."""
    if not isinstance(schema, dict):
        return set()
    fields = cast(dict[str, Any], schema)
    if "enum" in fields or "const" in fields:
        listed = cast(list[Any], fields.get("enum", [fields.get("const")]))
        return {json.dumps(value) for value in listed if value is None or isinstance(value, bool)}
    kinds = fields.get("type", ())
    allowed = {"true", "false"} if "boolean" in kinds else set[str]()
    allowed |= {"null"} if "null" in kinds else set[str]()
    return allowed.union(*(_constants_of(each) for word in ("anyOf", "oneOf") for each in fields.get(word, ())))


class Notation:
    """Writes values of schemas in a notation.

    Attributes:
        separator: The expression between values, arguments and pairs.
    """

    separator = '","'

    def __init__(self, schema: str, rules: Rules, tags: TagShape) -> None:
        """Raises ConstraintError if the schema cannot be enforced in JSON."""
        self._root = read_schema("", schema)
        self._rules = rules
        self._quote = tags.quote
        # Constants as JSON has them, and as the template writes them.
        self._constants = {
            name: f"({' | '.join(map(quoted, sorted({name, own})))})" for name, own in tags.spelled.items()
        }
        # Rules of referenced schemas by their place, and the rule of any value.
        self._known: dict[str, str] = {}

    def arguments(self) -> str:
        """The expression of the arguments. Raises ConstraintError if they cannot be enforced."""
        root = _followed(self._root, self._root)
        _refuse(root.keys() - _KEYWORDS["object"] - _NEUTRAL)
        return self._members(root, is_top=True)

    def _text(self, schema: Mapping[str, Any]) -> str:
        raise NotImplementedError

    def _literal(self, text: str) -> str:
        raise NotImplementedError

    def _key(self, name: str | None, *, is_top: bool) -> str:
        """The expression of a key up to its value; None stands for any key."""
        raise NotImplementedError

    def _value(self, schema: Any) -> str:
        if schema is False:
            raise ConstraintError("", "has a value that nothing matches")
        if schema is True or ("type" not in schema and not schema.keys() - _NEUTRAL):
            return self._any()
        if "$ref" in schema:
            return self._referred(schema)
        if "enum" in schema or "const" in schema:
            return f"({' | '.join(self._constant(value) for value in _listed(schema) or ())})"
        if alternatives := schema.get("anyOf") or schema.get("oneOf"):
            if "oneOf" in schema and not _exclude_each_other(alternatives):
                _refuse({"oneOf"})
            _refuse(schema.keys() - {"anyOf" if "anyOf" in schema else "oneOf"} - _NEUTRAL)
            return f"({' | '.join(self._value(each) for each in alternatives)})"
        kinds = schema.get("type", list(_KEYWORDS))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return f"({' | '.join(self._typed(schema, kind, is_one=len(kinds) == 1) for kind in kinds)})"

    def _typed(self, schema: Mapping[str, Any], kind: str, *, is_one: bool) -> str:
        known = _KEYWORDS.get(kind, frozenset()) if is_one else frozenset().union(*_KEYWORDS.values())
        _refuse(schema.keys() - known - _NEUTRAL)
        match kind:
            case "string":
                return self._text(schema)
            case "boolean":
                return f"({self._constants['true']} | {self._constants['false']})"
            case "null":
                return self._constants["null"]
            case "array":
                return self._list(schema)
            case "object":
                return f'"{{" {self._members(schema, is_top=False)} "}}"'
            case _:
                numeric = {name: value for name, value in schema.items() if name in _NUMBERS}
                return self._rules.add(json_rule({"type": kind} | numeric))

    def _list(self, schema: Mapping[str, Any]) -> str:
        if isinstance(schema.get("items"), list):
            raise ConstraintError("", "has a list of items")
        item = self._rules.add(self._value(schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[" "]"'
        further = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = item if most == 1 else f"{item} ({self.separator} {item}){further}"
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'

    def _members(self, schema: Mapping[str, Any], *, is_top: bool) -> str:
        """The pairs of an object, in the order of the schema."""
        _check_names(schema)
        if "properties" not in schema:
            return self._any_members(schema.get("additionalProperties", True), is_top=is_top)
        if schema.get("additionalProperties", False) not in (False, True):
            raise ConstraintError("", "has both properties and additionalProperties with a schema")
        required = schema.get("required", ())
        # From the last to the first: the rule for the rest after at least one pair, and the rule before any pair.
        after, first = "", '""'
        for name, value in reversed(schema["properties"].items()):
            pair = self._rules.add(f"{self._key(name, is_top=is_top)} {self._value(value)}")
            beginning = f"{pair} {after}".strip()
            first = self._rules.add(beginning if name in required else f"{beginning} | {first}")
            more = f"({self.separator} {pair})" + ("" if name in required else "?")
            after = self._rules.add(f"{more} {after}".strip())
        return first

    def _any_members(self, value: Any, *, is_top: bool) -> str:
        if value is False:
            return '""'
        pair = self._rules.add(f"{self._key(None, is_top=is_top)} {self._value(value)}")
        return f"({pair} ({self.separator} {pair})*)?"

    def _any(self) -> str:
        if (name := self._known.get("")) is None:
            name = self._known[""] = self._rules.reserve()
            kinds = [self._typed({}, kind, is_one=True) for kind in ("string", "number", "boolean", "null")]
            kinds += [self._list({}), f'"{{" {self._any_members(True, is_top=False)} "}}"']
            self._rules.define(name, " | ".join(kinds))
        return name

    def _constant(self, value: Any) -> str:
        match value:
            case str():
                return self._literal(value)
            case None | bool():
                return self._constants[json.dumps(value)]
            case int() | float():
                return quoted(json.dumps(value))
            case _:
                raise ConstraintError("", "has a const or an enum of lists or objects")

    def _referred(self, schema: Mapping[str, Any]) -> str:
        _refuse(schema.keys() - {"$ref"} - _NEUTRAL)
        place = f"#{schema['$ref'].removeprefix('#')}"
        if place not in self._known:
            name = self._known[place] = self._rules.reserve()
            self._rules.define(name, self._value(_followed(self._root, schema)))
        return self._known[place]


def _refuse(keywords: Sequence[str] | set[str]) -> None:
    """Raises ConstraintError for keywords that are not enforced."""
    if keywords:
        raise ConstraintError("", f'uses "{min(keywords)}"')


def _check_names(schema: Mapping[str, Any]) -> None:
    """Raises ConstraintError if a schema requires properties that it does not describe."""
    if set(schema.get("required", ())) - set(schema.get("properties", ())):
        raise ConstraintError("", "has required properties that it does not name")


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a schema that lists them; None if it does not."""
    if "enum" not in schema and "const" not in schema:
        return None
    _refuse(schema.keys() - {"enum", "const"} - _NEUTRAL)
    kinds = schema.get("type", list(_PYTHON_TYPES))
    types = tuple(_PYTHON_TYPES[each] for each in (kinds if isinstance(kinds, list) else [kinds]))
    values = schema.get("enum", [schema.get("const")])
    if "const" in schema:
        values = [each for each in values if json.dumps(each) == json.dumps(schema["const"])]
    is_boolean = "boolean" in kinds
    admitted = [each for each in values if isinstance(each, types) and (is_boolean or not isinstance(each, bool))]
    if not admitted:
        raise ConstraintError("", "has a value that nothing matches")
    return admitted


def _exclude_each_other(schemas: Sequence[Any]) -> bool:
    """Whether no value matches two of these schemas, as their types or constants say."""
    kinds = [each.get("type") if isinstance(each, Mapping) else None for each in schemas]
    if all(isinstance(kind, str) for kind in kinds):
        return len({"number" if kind == "integer" else kind for kind in kinds}) == len(kinds)
    return False


def _bounds(schema: Mapping[str, Any]) -> str:
    """The length of a text, as in a regular expression."""
    if "minLength" not in schema and "maxLength" not in schema:
        return "*"
    return f"{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}"


def _whole_pattern(pattern: str) -> str:
    """Converts a regular expression of a schema, which may match anywhere, to one that matches the whole text."""
    begin = "" if pattern.startswith("^") else "(.|\\n)*"
    end = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(.|\\n)*"
    # In JSON schema, digits and words are ASCII.
    pattern = _SHORT_CLASS.sub(lambda found: _ASCII.get(found.group(), found.group()), pattern)
    inner = pattern.removeprefix("^")
    inner = inner.removesuffix("$") if not end else inner
    if _ANCHOR.search(inner) or "/" in inner:
        raise ConstraintError("", f"has the pattern {pattern!r:.80}")
    return f"{begin}({inner}){end}"


class BracedNotation(Notation):
    """Writes bare keys, texts between quotes of the format, and JSON for all else."""

    def _text(self, schema: Mapping[str, Any]) -> str:
        return f"{literals(self._quote, self._rules.special_tokens)} {self._rules.text_before(self._quote, schema)}"

    def _literal(self, text: str) -> str:
        if self._quote in text:
            raise ConstraintError("", f"has a text with {self._quote}")
        mark = literals(self._quote, self._rules.special_tokens)
        return f"{mark} {quoted(text)} {mark}" if text else f"{mark} {mark}"

    def _key(self, name: str | None, *, is_top: bool) -> str:
        if name is None:
            return f'{self._rules.terminal("/[A-Za-z0-9_.-]+/")} ":"'
        return quoted(f"{name}:") if _BARE_KEY.fullmatch(name) else f'{self._literal(name)} ":"'


class PythonNotation(Notation):
    """Writes keyword arguments of Python, whose values are literals."""

    separator = '"," " "?'

    def _text(self, schema: Mapping[str, Any]) -> str:
        _refuse(schema.keys() & {"pattern"})
        either = (rf"{mark}([^{mark}\\\x00-\x1f\x7f]|\\[{mark}\\nrt]){_bounds(schema)}{mark}" for mark in "\"'")
        return self._rules.terminal(f"/{'|'.join(either)}/")

    def _literal(self, text: str) -> str:
        return f"({' | '.join(map(quoted, sorted({repr(text), json.dumps(text, ensure_ascii=False)})))})"

    def _key(self, name: str | None, *, is_top: bool) -> str:
        if not is_top:
            return f'{self._text({}) if name is None else self._literal(name)} ":" " "?'
        if name is None:
            return f'{self._rules.terminal("/[A-Za-z_][A-Za-z0-9_]*/")} "="'
        if not _IDENTIFIER.fullmatch(name):
            raise ConstraintError("", f"has a property {name!r:.80}")
        return quoted(f"{name}=")
