"""Typed access to config.json, as transformers 4 and 5 write it."""

from collections.abc import Mapping
from typing import Any

from quire.settings import ConfigurationError


class ConfigFields:
    """A section of config.json whose fields are checked as they are read.

    Each method returns `default` when the field is absent or null, and raises ConfigurationError when it has no default
    or the value is of another type or out of range.
    """

    def __init__(self, values: Mapping[str, Any], section: str = "config.json") -> None:
        self.values = values
        self.section = section

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, value, f"an integer of at least {minimum}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, value, "a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.error(name, value, "a string")
        return value

    def numbers(self, name: str, count: int) -> list[float]:
        value = self._value(name, None)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(x, int | float) for x in value):
            raise self.error(name, value, f"a list of {count} numbers")
        return [float(x) for x in value]

    def error(self, name: str, value: object, expected: str) -> ConfigurationError:
        return ConfigurationError(f"{self.section}: {name} is {value!r}; expected {expected}")

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise ConfigurationError(f"{self.section}: {name} is missing")
        return value
