"""The key by which `quire serve` asks its own gateway whether requests succeed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gateway.auth.api_key import hash_of, make_key
from gateway.auth.keys_file import KeyEntry, write_keys

_NAME = "quire-serve-probe"


@dataclass(frozen=True, slots=True)
class ProbeKey:
    """A key of a tenant of its own, valid as long as its file is there."""

    key: str
    keys_file: Path

    @classmethod
    def make(cls, directory: Path) -> Self:
        """`directory` is private, and gone when the server is. Raises ConfigurationError when it cannot be written."""
        key, keys_file = make_key(), directory / "probe-keys.json"
        write_keys(keys_file, [KeyEntry(_NAME, hash_of(key), _NAME)])
        return cls(key, keys_file)
