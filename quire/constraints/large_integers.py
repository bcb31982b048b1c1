"""Schemas with constants beyond 2^53 as grammars in Lark, since the engine holds the numbers of a schema as doubles.

The grammar spells what leads to such a constant: objects of named properties, lists, alternatives and references. All
other parts stay schemas.
"""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from quire.constraints.numbers import is_exact, numbers_of

# Which say nothing of a value by themselves.
_NEUTRAL = frozenset(("$defs", "definitions", "$id", "$anchor"))
_TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def is_large(value: Any) -> bool:
    """Whether a constant is an integer that only its digits express."""
    return isinstance(value, int) and not isinstance(value, bool) and not is_exact(value)


class LargeIntegers:
    """Makes the grammar of a schema.

    Args:
        schemas: All schemas in `root`.
        resolve: Finds the schema of a reference.
        options: `x-guidance` of the schemas that remain.
        white_space: A regular expression of what may stand between tokens of JSON; empty for none.
    """

    def __init__(
        self,
        root: dict[str, Any],
        schemas: Collection[dict[str, Any]],
        resolve: Callable[[str], Any],
        options: Mapping[str, Any],
        white_space: str,
    ) -> None:
        self._root, self._resolve, self._options = root, resolve, options
        self._space = " w " if white_space else " "
        self._lines = [f"w: /{white_space}/?"] if white_space else []
        self._names: dict[int, str] = {}
        self._spelled = self._leading(schemas)

    def lark(self) -> str:
        """Raises ValueError: a constant stands where this cannot spell it."""
        start = self._rule(self._root)
        return "\n".join([f"start: {start}", *self._lines])

    def _leading(self, schemas: Collection[dict[str, Any]]) -> set[int]:
        """The schemas that have a large constant, in any depth."""
        found = {id(each) for each in schemas if any(map(is_large, numbers_of([each.get("const"), each.get("enum")])))}
        size = -1
        while size != len(found):
            size = len(found)
            found |= {id(each) for each in schemas if any(id(inner) in found for inner in self._inner(each))}
        return found

    def _inner(self, schema: dict[str, Any]) -> list[Any]:
        pending, found = [value for name, value in schema.items() if name not in ("const", "enum")], list[Any]()
        if isinstance(schema.get("$ref"), str):
            pending.append(self._resolve(schema["$ref"]))
        for value in pending:
            found.append(value)
            found += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
        return found

    def _rule(self, schema: Any) -> str:
        if (name := self._names.get(id(schema))) is None:
            name = self._names[id(schema)] = f"r_{len(self._names)}"
            self._lines.append(f"{name}: {self._expression(schema)}")
        return name

    def _expression(self, schema: Any) -> str:
        if id(schema) not in self._spelled:
            return self._schema(schema)
        keys = schema.keys() - _NEUTRAL
        if "enum" in keys or "const" in keys:
            return self._constants(schema, keys)
        if keys == {"$ref"}:
            return self._rule(self._resolve(schema["$ref"]))
        if keys == {"anyOf"}:
            return " | ".join(map(self._rule, schema["anyOf"]))
        if schema.get("type") == "array" and keys <= {"type", "items", "minItems", "maxItems"}:
            return self._list(schema)
        if schema.get("type") == "object" and keys <= {"type", "properties", "required", "additionalProperties"}:
            return self._object(schema)
        raise ValueError(min(keys - {"type"}))

    def _schema(self, schema: Any) -> str:
        shared = {
            name: {key: value for key, value in self._root[name].items() if id(value) not in self._spelled}
            for name in ("$defs", "definitions") if name in self._root
        }  # fmt: skip
        inner = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
        written = json.dumps(shared | inner | {"x-guidance": self._options}, ensure_ascii=False)
        if any(f'"$ref": "#{rest}' in written for rest in ('"', "/properties", "/items", "/anyOf")):
            raise ValueError("$ref")
        return f"%json {written}"

    def _constants(self, schema: dict[str, Any], keys: Collection[str]) -> str:
        if set(keys) - {"type", "enum", "const"}:
            raise ValueError(min(set(keys) - {"type", "enum", "const"}))
        values = schema.get("enum", [schema.get("const")])
        if "const" in schema:
            values = [each for each in values if _same(each, schema["const"])]
        kinds = schema.get("type", list(_TYPES))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        admitted = [each for each in values if any(_is_of(each, kind) for kind in kinds)]
        if any(not isinstance(each, int) and any(map(is_large, numbers_of(each))) for each in admitted):
            raise ValueError("enum of lists or objects")
        return " | ".join(f'"{each}"' if is_large(each) else self._schema({"const": each}) for each in admitted)

    def _list(self, schema: dict[str, Any]) -> str:
        item, space = self._rule(schema.get("items", True)), self._space
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        further = f"{{{max(least - 1, 0)},{'' if most is None else max(most - 1, 0)}}}"
        items = f'{item} ({space}","{space}{item}){further}'
        return f'"["{space}{items if least else f"({items})?"}{space}"]"' if most != 0 else f'"["{space}"]"'

    def _object(self, schema: dict[str, Any]) -> str:
        required, properties = schema.get("required", []), schema.get("properties", {})
        if schema.get("additionalProperties") is not False or not set(required) <= properties.keys():
            raise ValueError("additionalProperties")
        # From the last property to the first: what follows where one was written before, and where none was.
        after, first = "", '""'
        for name, value in reversed(properties.items()):
            if value is False:
                continue
            key = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
            pair = f'{key}{self._space}":"{self._space}{self._rule(value)}'
            numbered = f"{self._names[id(schema)]}_{len(self._lines)}"
            self._lines.append(f"{numbered}_p: {pair}")
            begun = f"{numbered}_p {after}".strip()
            self._lines.append(f"{numbered}_f: {begun if name in required else f'{begun} | {first}'}")
            more = f'({self._space}","{self._space}{numbered}_p)' + ("" if name in required else "?")
            self._lines.append(f"{numbered}_a: {more} {after}".rstrip())
            after, first = f"{numbered}_a", f"{numbered}_f"
        return f'"{{"{self._space}{first}{self._space}"}}"'


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _is_of(value: Any, kind: str) -> bool:
    is_whole = kind == "integer" and isinstance(value, float) and value.is_integer()
    return is_whole or (isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)))
