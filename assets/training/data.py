"""Reads the words and wordings in `data`: TOML files whose longer strings are lists."""

import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "data"


def load(name: str) -> dict[str, Any]:
    """A file of `data`, by its name without the ending."""
    return tomllib.loads((DIRECTORY / f"{name}.toml").read_text())


@lru_cache(4096)
def items(text: str) -> tuple[str, ...]:
    """What ` | ` and line ends separate; `_` is an empty item."""
    return tuple("" if item == "_" else item for line in text.strip().splitlines() for item in line.split(" | "))


def lists(table: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    return {name: items(text) for name, text in table.items()}


def pairs(text: str) -> tuple[tuple[str, str], ...]:
    """Items of the form `left: right`."""
    return tuple((left, right) for left, _, right in (item.partition(": ") for item in items(text)))


def weights(text: str) -> dict[str, float]:
    return {left: float(right) for left, right in pairs(text)}
