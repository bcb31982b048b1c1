"""Draws JSON schemas and values, and compares the texts that a schema's grammar accepts with `jsonschema_rs`.

A text that is accepted and invalid is always a fault. A text that is valid and not accepted is a fault only if it is
written as docs/structured-output.md says: see `plain_texts`.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from random import Random
from typing import Any

from jsonschema_rs import Draft202012Validator

from quire.common.v1.common_pb2 import Constraint
from quire.constraints.json_schema import read_schema
from quire.constraints.matcher import Template
from tests.support.constraints import accepts_text, make_template, write

NAMES = ("a", "b", 'a"b', "é", "a/b", "n\n", "😀", "\\", "\x7f", "")
# Characters that JSON escapes, or may, and neighbours of the borders of classes.
CHARACTERS = tuple('ab01 -_."\\/<>[]^$?*|\n\r\t\b\x00\x01\x1f\x7fKk\u017fé\u07c0\u0661\u2028\ufeff😀\U0010ffff')
_ITEMS = (
    "a", "b", "1", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\s\S]", '[^"]', r"[^\\]", r'[^"\\]',
    r'[^<>:"/\\|?*]',
    "[a-c]", "[^a-c]", r"[^\n]", r'[^"\n]', r'[^\n\r"]', r"[^\s]", r'[^\s"]', r"[\x00-\x1f]", r"[\x01-\x21]", '["-~]',
    r'[^\x00-\x1f"]', r'[^"\x00-\x1f]', r"[\w.-]", r"[^\w]", r"[^\d\\]", r"\\", '"', r"\/", "/", r"\.", "é", "[é-ü]",
    "[^é]", "😀", r"\n", r"\t", "-", r'(?:[^"\n]|\n)', r'(?:\s|[^\s"])', r"(?i:k)", r'(?i:[^k"])', r"(?s:.)", "[*-]",
)  # fmt: skip
_NUMBERS = (0, 1, -1, 2, 3, 7, 10, 12, 99, 100, 101, -100, 0.5, 1.5, -1.5, 0.1, 0.01, 2.25, 1e-7, 1e3, 1e20, 123456.789)
_LARGE = (2**53, 2**53 + 1, -(2**53) - 1, 1234567890123456789, 2**63 - 1, -(2**63), 2**64 - 1, 2**63, 10**19, 10**30)
_DIFFERENCE = r"\[(\[\^?(?:\\.|[^\\\[\]])*\])--\[\\\\x00\\\\x01\]\]"


class SchemaDrawer:
    """Draws schemas of enforced keywords, and values that are close to valid ones."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def schema(self) -> dict[str, Any]:
        schema = self._schema(0)
        if self.random.random() < 0.1 or "$ref" in json.dumps(schema):
            schema["$defs"] = {"x": self._schema(1), "a/b": self._schema(2)}
        return schema if isinstance(schema, dict) else {}

    def _schema(self, depth: int) -> Any:
        random = self.random
        leaf = ("string", "string", "number", "constants")
        kind = random.choice(
            leaf if depth >= 3 else (*leaf, "object", "object", "array", "any", "all", "one", "ref", "types")
        )
        return getattr(self, f"_{kind}")(depth)

    def _some(self, drawn: dict[str, Any], chance: float) -> dict[str, Any]:
        return {name: value() for name, value in drawn.items() if self.random.random() < chance}

    def _string(self, _depth: int) -> dict[str, Any]:
        low = self.random.randint(0, 3)
        drawn: dict[str, Any] = {
            "minLength": lambda: low,
            "maxLength": lambda: low + self.random.randint(0, 3),
            "pattern": self.pattern,
        }
        if self.random.random() < 0.1:
            drawn["format"] = lambda: self.random.choice(("date", "ipv4", "uuid", "email"))
        return ({} if self.random.random() < 0.1 else {"type": "string"}) | self._some(drawn, 0.4)

    def pattern(self) -> str:
        random = self.random
        parts = ["".join(self._item() for _ in range(random.randint(1, 3))) for _ in range(random.choice((1, 1, 1, 2)))]
        ends = [(random.choice(("^", "^", "")), random.choice(("$", "$", ""))) for _ in parts]
        text = "|".join(f"{begin}{part}{end}" for part, (begin, end) in zip(parts, ends, strict=True))
        return f"^({text})$" if random.random() < 0.1 and "^" not in text and "$" not in text else text

    def _item(self) -> str:
        item = self.random.choice(_ITEMS)
        return item + self.random.choice(("", "", "", "*", "+", "?", "{2}", "{0,2}"))

    def number(self) -> int | float:
        return self.random.choice(_LARGE if self.random.random() < 0.15 else _NUMBERS)

    def _number(self, _depth: int) -> dict[str, Any]:
        drawn: dict[str, Any] = dict.fromkeys(
            ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), self.number
        )
        several = {"multipleOf": lambda: self.random.choice((2, 3, 7, 10, 997, 65539, 0.1, 0.5, 0.01, 2.5))}
        schema = self._some(drawn, 0.3) | self._some(several, 0.25)
        return schema | {"type": self.random.choice(("integer", "number"))} if self.random.random() < 0.9 else schema

    def _constants(self, _depth: int) -> dict[str, Any]:
        values = [self.value() for _ in range(self.random.randint(1, 3))]
        typed = {"type": self.random.choice(("string", "integer", "number"))} if self.random.random() < 0.2 else {}
        return typed | ({"const": values[0]} if self.random.random() < 0.4 else {"enum": values})

    def value(self, depth: int = 0) -> Any:
        match self.random.choice("snnbl" if depth < 2 else "snb"):
            case "s":
                return self.text()
            case "n":
                return self.number()
            case "b":
                return self.random.choice((True, False, None))
            case _ if self.random.random() < 0.5:
                return [self.value(depth + 1) for _ in range(self.random.randint(0, 2))]
            case _:
                return {self.random.choice(NAMES): self.value(depth + 1) for _ in range(self.random.randint(0, 2))}

    def text(self) -> str:
        return "".join(self.random.choices(CHARACTERS, k=self.random.choice((0, 1, 1, 2, 3, 4))))

    def _object(self, depth: int) -> dict[str, Any]:
        random = self.random
        names = random.sample(NAMES, random.randint(0, 3))
        drawn: dict[str, Any] = {
            "required": lambda: [name for name in names if random.random() < 0.5] + ["z"] * (random.random() < 0.1),
            "additionalProperties": lambda: random.choice((True, False, self._schema(depth + 1))),
            "maxProperties": lambda: random.randint(0, 3),
            "minProperties": lambda: 1,
        }
        schema: dict[str, Any] = {"type": "object"} if random.random() < 0.8 else {}
        if names:
            schema["properties"] = {name: self._schema(depth + 1) for name in names}
        if random.random() < 0.25:
            schema["patternProperties"] = {
                self.pattern(): self._schema(depth + 1) for _ in range(random.choice((1, 1, 2)))
            }
        for name, value in self._some(drawn, 0.35).items():
            schema[name] = value
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        random = self.random
        low = random.randint(0, 2)
        drawn: dict[str, Any] = {
            "items": lambda: random.choice((True, False, self._schema(depth + 1), self._schema(depth + 1))),
            "prefixItems": lambda: [self._schema(depth + 1) for _ in range(random.randint(1, 2))],
            "minItems": lambda: low,
            "maxItems": lambda: low + random.randint(0, 2),
        }
        return {"type": "array"} | self._some(drawn, 0.5)

    def _combined(self, keyword: str, depth: int) -> dict[str, Any]:
        schema = {keyword: [self._schema(depth + 1) for _ in range(self.random.randint(1, 3))]}
        return schema | (self._schema(depth + 1) if self.random.random() < 0.4 else {})

    def _any(self, depth: int) -> dict[str, Any]:
        return self._combined("anyOf", depth)

    def _all(self, depth: int) -> dict[str, Any]:
        # Schemas of one kind, since schemas of two kinds have no values.
        kind = self.random.choice(("string", "number", "object", "array"))
        schema = {"allOf": [getattr(self, f"_{kind}")(depth + 1) for _ in range(self.random.randint(1, 3))]}
        return schema | (getattr(self, f"_{kind}")(depth + 1) if self.random.random() < 0.4 else {})

    def _one(self, depth: int) -> dict[str, Any]:
        return self._combined("oneOf", depth)

    def _ref(self, depth: int) -> dict[str, Any]:
        sibling = self._schema(depth + 1) if self.random.random() < 0.3 else {}
        return {"$ref": self.random.choice(("#/$defs/x", "#/$defs/a~1b"))} | sibling

    def _types(self, depth: int) -> dict[str, Any]:
        schema = self._object(depth) | self._array(depth) | self._number(depth) | self._string(depth)
        kept = {name: value for name, value in schema.items() if self.random.random() < 0.4}
        kinds = ("object", "array", "string", "integer", "number", "null", "boolean")
        return kept | {"type": self.random.sample(kinds, 2)}

    def changed(self, value: Any) -> Any:
        """A value that differs a little."""
        random = self.random
        if random.random() < 0.05:
            return self.value()
        match value:
            case dict():
                names = random.sample(sorted(value), len(value))
                fields = {name: value[name] for name in names[random.random() < 0.2 :]}
                if random.random() < 0.3:
                    fields[random.choice(NAMES)] = self.value(1)
                return {name: self.changed(each) if random.random() < 0.4 else each for name, each in fields.items()}
            case list():
                kept = value[: len(value) - (random.random() < 0.2)] + [self.value(1)] * (random.random() < 0.2)
                return [self.changed(each) if random.random() < 0.4 else each for each in kept]
            case str():
                place, text = random.randint(0, len(value)), random.choice(("", self.text(), random.choice(CHARACTERS)))
                return value[:place] + text + value[place + random.randint(0, 1) :]
            case bool() | None:
                return self.value(1)
            case _:
                step = random.choice((0, 1, -1, 100, Decimal("0.5"), Decimal("-0.01")))
                return (
                    self.number()
                    if random.random() < 0.2
                    else Decimal(repr(value) if isinstance(value, float) else value) + step
                )


def plain_texts(value: Any) -> Iterator[str]:
    """Spellings that a model may always use: numbers without an exponent, characters as they are, little white space,
    properties in some order."""
    for ordered in itertools.islice(_orders(value), 24):
        yield _plain(ordered)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for names in itertools.permutations(value):
            for values in itertools.islice(
                itertools.product(*(list(itertools.islice(_orders(value[each]), 6)) for each in names)), 12
            ):
                yield dict(zip(names, values, strict=True))
    elif isinstance(value, list):
        yield from map(
            list, itertools.islice(itertools.product(*(list(itertools.islice(_orders(each), 6)) for each in value)), 12)
        )
    else:
        yield value


def _number_text(value: Any) -> str:
    text = format(Decimal(repr(value)) if isinstance(value, float) else value, "f")
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def _text(value: Any, string: Callable[[str], str], number: Callable[[Any], str], comma: str, colon: str) -> str:
    def inner(each: Any) -> str:
        return _text(each, string, number, comma, colon)

    match value:
        case str():
            return string(value)
        case None | bool():
            return json.dumps(value)
        case list():
            return f"[{comma.join(map(inner, value))}]"
        case dict():
            return f"{{{comma.join(f'{string(name)}{colon}{inner(each)}' for name, each in value.items())}}}"
        case _:
            return number(value)


def _plain(value: Any) -> str:
    def in_quotes(text: str) -> str:
        return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

    return _text(value, in_quotes, _number_text, ", ", ": ")


def _spelled(random: Random, value: Any) -> str:
    def string(text: str) -> str:
        return f'"{"".join(_spelled_character(random, each) for each in text)}"'

    def number(value: Any) -> str:
        text = _number_text(value)
        zero = text if value else "-0"
        return random.choice((text, text, text + ("0" if "." in text else ".0"), f"{text}e0", f"{text}E+00", zero))

    return _text(value, string, number, random.choice((",", ", ", ",\n  ")), random.choice((":", ": ")))


def _spelled_character(random: Random, character: str) -> str:
    way = random.choice("raaulc")
    if way == "r" and character not in '"\\' and character >= " ":
        return character
    if way == "a":
        return json.dumps(character, ensure_ascii=False)[1:-1]
    if character == "/" and way == "c":
        return "\\/"
    units = character.encode("utf-16-be")
    escaped = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return escaped if way != "u" else escaped.replace("\\u", "\n").upper().replace("\n", "\\u")


def read_exactly(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


def written_text(random: Random, template: Template) -> str | None:
    """A text that the grammar allows; None if no text was complete within a few tokens."""
    tokens = template.vocabulary.token_bytes
    closing = {at for at, token in enumerate(tokens) if token in (b'"', b"}", b"]")} | set(template.vocabulary.eos)
    escaping = {at for at, token in enumerate(tokens) if token in (b'"', b"\\", b"u", b"0", b"-", b".")}
    tries = itertools.count()

    def choose(allowed: Any) -> int:
        for wanted, chance in ((closing, 0.1 + next(tries) / 40), (escaping, 0.3)):
            if random.random() < chance and (some := wanted.intersection(map(int, allowed))):
                return random.choice(sorted(some))
        return int(random.choice(allowed))

    try:
        written, is_whole = write(template, choose, max_tokens=120)
    except AssertionError:  # The text came to a place where the grammar is too large for a mask.
        return None
    text = b"".join(tokens[each] for each in written).decode() if is_whole else ""
    return text if text and not re.search(r"[eE][+-]?\d{4}", text) else None


def faults(drawer: SchemaDrawer, schema: dict[str, Any], *, num_values: int = 14) -> list[tuple[str, str]]:
    """Faults of the grammar of a schema: "weakened" or "rejected", each with a text.

    Raises:
        ConstraintError: the schema is refused.
    """
    random, written = drawer.random, json.dumps(schema)
    template = make_template(Constraint(json_schema=written))
    validator = Draft202012Validator(read_exactly(written))
    # Objects are closed, and bounds moved inwards. Differences of classes are the engine's own notation.
    narrow = re.sub(_DIFFERENCE, r"\1", json.dumps(read_schema("", written, large_allowed=True)))
    narrowed = Draft202012Validator(read_exactly(narrow))
    found: list[tuple[str, str]] = []
    for _ in range(num_values):
        text = written_text(random, template)
        value = drawer.value() if text is None else read_exactly(text)
        if text is not None and not validator.is_valid(value):
            found.append(("weakened", text))
        value = drawer.changed(value)
        plain = list(dict.fromkeys(plain_texts(value)))
        texts = dict.fromkeys([*plain, *(_spelled(random, value) for _ in range(3))])
        accepted = [each for each in texts if accepts_text(template, each)]
        found += [("weakened", each) for each in accepted if not validator.is_valid(read_exactly(each))]
        # Formats are not checked, control characters are not written in all strings, and 0.8 is written 0.80
        # below a bound of 0.84.
        is_known = '"format"' not in written and len(plain) < 24 and not re.search(r"\\u00|\d\.\d", plain[0])
        if is_known and not set(accepted) & set(plain) and narrowed.is_valid(read_exactly(plain[0])):
            found.append(("rejected", plain[0]))
    return found
