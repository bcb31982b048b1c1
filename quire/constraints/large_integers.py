"""Schemas with constants beyond 2^53 as grammars in Lark, since the engine holds the numbers of a schema as doubles.

The grammar spells the path to such a constant: objects of named properties, lists and alternatives. All other parts of
them stay schemas.
"""

import json
from collections.abc import Mapping
from typing import Any

from quire.constraints.numbers import is_large

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None), "array": list,
    "object": dict,
}  # fmt: skip


class LargeIntegers:
    """Makes the grammar of a schema. `options` are `x-guidance` of schemas in it, `white_space` is a regular expression
    of what may stand between tokens of JSON; empty for nothing.

    Attributes:
        num_spelled: Number of large constants that the grammar has.
    """

    def __init__(self, root: dict[str, Any], options: Mapping[str, Any], white_space: str) -> None:
        self.num_spelled = 0
        self._shared = {"x-guidance": options} | {each: root[each] for each in ("$defs", "definitions") if each in root}
        self._w = "w" if white_space else ""
        self._lines = [f"w: /{white_space}/?"] if white_space else []
        self.lark = "\n".join([f"start: {self._rule(root)}", *self._lines])

    def _rule(self, schema: Any) -> str:
        return self._named(self._expression(schema))

    def _named(self, expression: str) -> str:
        self._lines.append(f"r_{len(self._lines)}: {expression}")
        return f"r_{len(self._lines) - 1}"

    def _expression(self, schema: Any) -> str:
        keys = schema.keys() - self._shared.keys() - {"$id", "$anchor"} if isinstance(schema, dict) else set[str]()
        kind = schema.get("type") if keys else None
        if keys - {"type"} in ({"const"}, {"enum"}):
            return self._constants(schema.get("enum", [schema.get("const")]), schema.get("type", list(_TYPES)))
        if keys == {"anyOf"}:
            return " | ".join(map(self._rule, schema["anyOf"]))
        if kind == "array" and keys <= {"type", "items", "minItems", "maxItems"} and schema.get("items") is not False:
            least, most = schema.get("minItems", 0), schema.get("maxItems")
            if isinstance(least, int) and (most is None or isinstance(most, int)):
                return self._list(schema.get("items", True), least, most)
        if kind == "object" and keys <= {"type", "properties", "required", "additionalProperties"}:
            names, required = schema.get("properties", {}), schema.get("required", ())
            if (
                schema.get("additionalProperties") is False
                and set(required) <= names.keys()
                and False not in names.values()
            ):
                return self._object(names, required)
        return self._schema(schema)

    def _schema(self, schema: Any) -> str:
        return f"%json {json.dumps(self._shared | (schema if isinstance(schema, dict) else {}), ensure_ascii=False)}"

    def _constants(self, values: list[Any], kinds: Any) -> str:
        kinds = kinds if isinstance(kinds, list) else [kinds]
        admitted = [each for each in values if any(_is_of(each, kind) for kind in kinds)]
        self.num_spelled += sum(map(is_large, values))
        return " | ".join(f'"{each}"' if is_large(each) else self._schema({"const": each}) for each in admitted)

    def _list(self, schema: Any, least: int, most: int | None) -> str:
        item = self._rule(schema)
        further = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        items = f'{item} ({self._w} "," {self._w} {item}){further}'
        return f'"[" {self._w} {items if least else f"({items})?"} {self._w} "]"' if most != 0 else f'"[" {self._w} "]"'

    def _object(self, properties: dict[str, Any], required: Any) -> str:
        # From the last property to the first: the rule for the rest after a property, and the rule before any.
        after, first = "", '""'
        for name, value in reversed(properties.items()):
            key = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
            pair = self._named(f'{key} {self._w} ":" {self._w} {self._rule(value)}')
            first = self._named(f"{pair} {after}" if name in required else f"{pair} {after} | {first}")
            after = self._named(f'({self._w} "," {self._w} {pair}){"" if name in required else "?"} {after}')
        return f'"{{" {self._w} {first} {self._w} "}}"'


def _is_of(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))
