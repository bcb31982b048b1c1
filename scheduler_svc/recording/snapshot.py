"""A core as data: a JSON list with an entry for each object, which names other objects by their numbers.

Reading it makes objects of the core's classes and sets their attributes. The data names no other code, so a file from
elsewhere cannot run any. It fits the version of the core that wrote it.
"""

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from types import MethodType
from typing import Any

import numpy as np

from scheduler_svc.core.scheduler import Scheduler

_MODULES = ("scheduler_svc.core.", "quire.messages.logprob_columns")
_PLAIN = (type(None), bool, int, float, str)
_KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (bytes, bytearray, tuple, frozenset, list, deque, set, dict, OrderedDict, Counter)
}


def dump(core: Scheduler) -> bytes:
    """The core as data."""
    objects: list[object] = [core]
    numbers = {id(core): 0}

    def refer(value: object) -> object:
        """A plain value itself; a list with the number of any other object."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in numbers:
            numbers[id(value)] = len(objects)
            objects.append(value)
        return [numbers[id(value)]]

    # The list grows while it is read.
    return json.dumps([_describe(each, refer) for each in objects]).encode()


def _describe(value: Any, refer: Callable[[object], object]) -> list[object]:
    """The entry of an object: its kind, and what it is made of."""
    kind = type(value)
    name = kind.__name__ if kind in _KINDS.values() else _name_of(kind)
    match value:
        case bytes() | bytearray():
            return [name, value.hex()]
        case np.ndarray() if value.dtype.hasobject:
            return ["objects", *map(refer, value)]
        case np.ndarray() | np.generic():
            return ["numbers", value.dtype.str, value.shape, value.tobytes().hex()]
        case MethodType(__self__=owner):
            return ["method", _name_of(owner) if isinstance(owner, type) else refer(owner), value.__name__]
        case Enum():
            return [name, value.name]
        case dict():
            return [name, *([refer(key), refer(each)] for key, each in value.items())]
        case list() | deque() | set() | tuple() | frozenset():
            return [name, *map(refer, value)]
        case _:
            slots = (slot for each in kind.__mro__ for slot in vars(each).get("__slots__", ()))
            names = (each for each in (*getattr(value, "__dict__", ()), *slots) if hasattr(value, each))
            return [name, {each: refer(getattr(value, each)) for each in names}]


def load(data: bytes) -> Any:
    """The object that `dump` wrote. Raises an error of any class for data that is not of this version's core."""
    entries = json.loads(data)
    made: dict[int, Any] = {}

    def resolve(reference: Any) -> Any:
        """The object of a reference, which may have to be filled yet: objects may refer to each other in circles."""
        if not isinstance(reference, list):
            return reference
        (number,) = reference
        if number not in made:
            made[number] = _make(resolve, *entries[number])
        return made[number]

    contents = [(resolve([number]), content) for number, (_, *content) in enumerate(entries)]
    # Attributes come first: keys of tables are hashed by theirs.
    for each, content in contents:
        for name, value in content[0].items() if content and isinstance(content[0], dict) else ():
            object.__setattr__(each, name, resolve(value))
    for each, content in contents:
        if isinstance(each, dict):
            for key, value in content:
                each[resolve(key)] = resolve(value)
        elif isinstance(each, set):
            each.update(map(resolve, content))
        elif isinstance(each, list | deque):
            each.extend(map(resolve, content))
    return made[0]


def _make(resolve: Callable[[Any], Any], kind: str, *content: Any) -> Any:
    """The object of an entry; a table, a list and one with attributes is empty."""
    match kind, *content:
        case "bytes" | "bytearray", digits:
            return _KINDS[kind].fromhex(digits)
        case "tuple" | "frozenset", *values:
            return _KINDS[kind](map(resolve, values))
        case "objects", *values:
            return np.array([*map(resolve, values)], object)
        case "numbers", dtype, shape, digits if np.dtype(dtype).kind in "biuf":
            array = np.frombuffer(bytearray.fromhex(digits), dtype).reshape(shape)
            return array if shape else array[()]
        case "method", owner, name if not name.startswith("_"):
            return getattr(_class_of(owner) if isinstance(owner, str) else resolve(owner), name)
        case _, dict():
            return object.__new__(_class_of(kind))
        case _ if kind in _KINDS:
            return _KINDS[kind]()
        case _, member if issubclass(enum := _class_of(kind), Enum):
            return enum[member]
        case _, *values:
            return tuple.__new__(_class_of(kind), map(resolve, values))


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _class_of(name: str) -> type:
    """A class of the core. Raises ValueError for another name."""
    module, _, kind = name.rpartition(".")
    found = getattr(import_module(module), kind, None) if module.startswith(_MODULES) else None
    if not isinstance(found, type) or found.__module__ != module:
        raise ValueError(f"it names {name}")
    return found
