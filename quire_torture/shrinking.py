"""Finds the few parts of a story that its failure needs."""

from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

T = TypeVar("T")


def fewest(parts: tuple[T, ...], fails: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """The parts without which the story does not fail: removes halves first, then ever smaller pieces."""
    search = _search(parts)
    try:
        rest = next(search)
        while True:
            rest = search.send(fails(rest))
    except StopIteration as end:
        return end.value


async def fewest_of_runs(parts: tuple[T, ...], fails: Callable[[tuple[T, ...]], Awaitable[bool]]) -> tuple[T, ...]:
    """As `fewest`, for stories that are run again to see whether they fail."""
    search = _search(parts)
    try:
        rest = next(search)
        while True:
            rest = search.send(await fails(rest))
    except StopIteration as end:
        return end.value


def _search(parts: tuple[T, ...]) -> Generator[tuple[T, ...], bool, tuple[T, ...]]:
    size = len(parts)
    while size:
        start = 0
        while start < len(parts):
            rest = parts[:start] + parts[start + size :]
            if (yield rest):
                parts = rest
            else:
                start += size
        size //= 2
    return parts
