"""What the tables of a process hold: dicts, lists, sets and queues that the objects of our packages have.

Whatever outlives a request, a link or a session belongs to somebody who takes it out again, on every path. So when all
is quiet, a table is empty, or it is one of `KEPT`, which says why it is not.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

_PACKAGES = ("gateway.", "scheduler_svc.", "worker_svc.", "quire.")
_TABLES = (dict, list, set, deque)

KEPT: dict[str, str] = {}


def held_by(*roots: object) -> dict[str, int]:
    """How many entries tables have that are to be empty, by class and attribute."""
    counts = Counter[str]()
    seen, waiting = set[int](), list[object](roots)
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        for name, value in _attributes(each):
            if isinstance(value, asyncio.Queue):
                counts[name] += value.qsize()
            elif isinstance(value, _TABLES):
                counts[name] += len(value)
                waiting += value.values() if isinstance(value, dict) else value
            else:
                waiting.append(value)
    return {name: count for name, count in sorted(counts.items()) if count and name not in KEPT}


def _attributes(owner: object) -> Iterator[tuple[str, Any]]:
    """The attributes of an object of ours, each with the name of its class."""
    kind = next((each for each in type(owner).__mro__ if each.__module__.startswith(_PACKAGES)), None)
    if kind is None or isinstance(owner, type) or kind.__module__.endswith(("_pb2", "_pb2_grpc")):
        return
    slots = (name for each in type(owner).__mro__ for name in getattr(each, "__slots__", ()))
    for name in dict.fromkeys((*getattr(owner, "__dict__", ()), *slots)):
        if (value := getattr(owner, name, None)) is not None:
            yield f"{kind.__name__}.{name}", value
