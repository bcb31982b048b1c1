"""Files of API keys for tests."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.auth.caller import Access
from gateway.auth.keys import KeyEntry, hash_of, make_key, write_keys
from gateway.auth.quota import Limits


def make_entry(
    key_id: str, key: str, tenant: str, access: Access | None = None, limits: Limits | None = None, **fields: Any
) -> KeyEntry:
    """The file's entry of a key with these permissions."""
    allowed = dataclasses.asdict(access or Access())
    models = allowed.pop("models")
    fields |= allowed | dataclasses.asdict(limits or Limits())
    fields["models"] = None if models is None else tuple(sorted(models))
    return KeyEntry(id=key_id, sha256=hash_of(key).hex(), tenant=tenant, **fields)


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
        entry = make_entry(f"k-{len(self._entries)}", key, tenant, access or Access(), limits or Limits(), **fields)
        self._entries[key] = entry
        self._write()
        return key

    def revoke(self, key: str) -> None:
        del self._entries[key]
        self._write()

    def _write(self) -> None:
        write_keys(self.path, self._entries.values())
