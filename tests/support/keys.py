"""Files of API keys for tests."""

from dataclasses import dataclass
from pathlib import Path

from gateway.auth.account import Limits
from gateway.auth.api_key import hash_of, make_key
from gateway.auth.caller import Access
from gateway.auth.keys_file import KeyEntry, write_keys


@dataclass
class KeysFile:
    """A file that grows key by key."""

    path: Path

    def __post_init__(self) -> None:
        self._entries: dict[str, KeyEntry] = {}
        self._write()

    def add(self, tenant: str, *, access: Access | None = None, limits: Limits | None = None, **fields) -> str:
        """A new key of the tenant."""
        key = make_key()
        entry = KeyEntry(
            f"k-{len(self._entries)}", hash_of(key), tenant, access or Access(), limits or Limits(), **fields
        )
        self._entries[key] = entry
        self._write()
        return key

    def revoke(self, key: str) -> None:
        del self._entries[key]
        self._write()

    def _write(self) -> None:
        write_keys(self.path, self._entries.values())
