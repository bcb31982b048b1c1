"""The file that holds what is known of the keys: never the keys themselves, only their hashes.

It is JSON: `quire keys` writes it as often as people do, and Python reads and writes that by itself, while it can only
read TOML. Each key has a `note` for people instead of comments.

    {"keys": [{"id": "k-1f4c2a90", "sha256": "9f86...", "tenant": "acme", "note": "batch jobs",
               "requests_per_minute": 60, "models": ["quire-tiny"], "expires_at": "2027-01-31T00:00:00+00:00"}]}
"""

import json
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.auth.account import Limits
from gateway.auth.api_key import KeyHash
from gateway.auth.caller import HIGHEST_PRIORITY, Access
from quire.settings import ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_HIGHEST_LIMIT = 10**12
_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")
_PRIORITIES = ("priority", "max_priority")
_FLAGS = ("may_pin", "is_operator")
_FIELDS = frozenset(
    {"id", "sha256", "tenant", "note", "models", "created_at", "expires_at", *_LIMITS, *_PRIORITIES, *_FLAGS}
)
_DEFAULTS = Access()


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key, as the file has it.

    Attributes:
        key_id: What people call the key by; it opens nothing.
        hash: What `hash_of` makes of the key.
        tenant: Whose key it is.
        expires_at: From when on it is refused; None is never.
    """

    key_id: str
    hash: KeyHash
    tenant: str
    access: Access = _DEFAULTS
    limits: Limits = field(default_factory=Limits)
    created_at: datetime | None = None
    expires_at: datetime | None = None
    note: str = ""


def read_keys(path: Path) -> list[KeyEntry]:
    """All keys of a file.

    Raises:
        ConfigurationError: it cannot be read, or an entry or a field of it is wrong, in one line that names it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"cannot read the keys file {path}: {reason}") from error
    try:
        return parse_keys(text)
    except ValueError as error:
        raise ConfigurationError(f"keys file {path}: {error}") from error


def parse_keys(text: str) -> list[KeyEntry]:
    """Raises ValueError with one line that names entry and field."""
    try:
        content = json.loads(text, object_pairs_hook=_without_repetitions)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(content, dict) or set(content) != {"keys"} or not isinstance(content["keys"], list):
        raise ValueError('it must be an object with the one field "keys", a list')
    entries = [_entry(f"keys[{position}]", each) for position, each in enumerate(content["keys"])]
    check_distinct(entries)
    return entries


def write_keys(path: Path, entries: Iterable[KeyEntry]) -> None:
    """Replaces the file at once, so that nobody reads half of it. A new file is readable by its owner alone.

    Raises:
        ConfigurationError: it cannot be written.
    """
    text = json.dumps({"keys": [_as_json(entry) for entry in entries]}, indent=2, ensure_ascii=False) + "\n"
    # The file may be a link to where it is kept.
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                os.fchmod(file.fileno(), mode)
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as error:
        raise ConfigurationError(f"cannot write the keys file {path}: {error.strerror}") from error


def check_distinct(entries: Iterable[KeyEntry]) -> None:
    """Raises ValueError when two entries have one id, or are of one key."""
    ids: set[str] = set()
    by_hash: dict[KeyHash, str] = {}
    for entry in entries:
        if entry.key_id in ids:
            raise ValueError(f'two keys have the id "{entry.key_id}"')
        if entry.hash in by_hash:
            raise ValueError(f'"{by_hash[entry.hash]}" and "{entry.key_id}" have the same sha256: they are one key')
        ids.add(entry.key_id)
        by_hash[entry.hash] = entry.key_id


def check_name(what: str, name: object) -> str:
    """A tenant's name or a key's id. Raises ValueError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{what} is {_shown(name)}; it must be 1 to 64 characters of [A-Za-z0-9._-]")
    return name


def _entry(where: str, value: object) -> KeyEntry:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}; it must be an object")
    key_id = check_name(f"{where}.id", value.get("id"))
    where = f'{where} ("{key_id}")'
    if unknown := sorted(set(value) - _FIELDS):
        raise ValueError(f"{where} has the unknown field {_shown(unknown[0])}")
    hexadecimal = value.get("sha256")
    if not isinstance(hexadecimal, str) or not _HASH.fullmatch(hexadecimal):
        # It may be the key itself, put there by mistake.
        raise ValueError(f"{where}.sha256 must be 64 hexadecimal digits in lower case")
    note = value.get("note", "")
    if not _is_text(note):
        raise ValueError(f"{where}.note is {_shown(note)}; it must be a text of one line")
    return KeyEntry(
        key_id=key_id,
        hash=KeyHash(bytes.fromhex(hexadecimal)),
        tenant=check_name(f"{where}.tenant", value.get("tenant")),
        access=_access(where, value),
        limits=Limits(*(_integer(where, name, value.get(name), 1, _HIGHEST_LIMIT) for name in _LIMITS)),
        created_at=_time(where, "created_at", value.get("created_at")),
        expires_at=_time(where, "expires_at", value.get("expires_at")),
        note=note,
    )


def _access(where: str, value: Mapping[str, Any]) -> Access:
    priority, highest = (
        _integer(where, name, value.get(name), -HIGHEST_PRIORITY, HIGHEST_PRIORITY) for name in _PRIORITIES
    )
    priority = _DEFAULTS.priority if priority is None else priority
    highest = max(priority, _DEFAULTS.max_priority) if highest is None else highest
    if priority > highest:
        raise ValueError(f"{where}.priority is {priority}; it must be at most max_priority, {highest}")
    for name in _FLAGS:
        if not isinstance(value.get(name, False), bool):
            raise ValueError(f"{where}.{name} is {_shown(value[name])}; it must be true or false")
    models = value.get("models")
    if models is not None and not (isinstance(models, list) and all(map(_is_text, models))):
        raise ValueError(f"{where}.models is {_shown(models)}; it must be a list of names")
    return Access(
        models=None if models is None else frozenset(models),
        priority=priority,
        max_priority=highest,
        may_pin=value.get("may_pin", False),
        is_operator=value.get("is_operator", False),
    )


def _integer(where: str, name: str, value: object, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{where}.{name} is {_shown(value)}; it must be an integer in [{low}, {high}]")
    return value


def _time(where: str, name: str, value: object) -> datetime | None:
    if value is None:
        return None
    try:
        parsed = datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        parsed = None
    if parsed is None or parsed.tzinfo is None:
        raise ValueError(f"{where}.{name} is {_shown(value)}; it must be a time such as 2027-01-31T00:00:00+00:00")
    return parsed.astimezone(UTC)


def _as_json(entry: KeyEntry) -> dict[str, Any]:
    """Without what is as it is by default."""
    access, limits = entry.access, entry.limits
    fields = {
        "id": entry.key_id,
        "sha256": entry.hash.hex(),
        "tenant": entry.tenant,
        "note": entry.note or None,
        "created_at": _iso(entry.created_at),
        "expires_at": _iso(entry.expires_at),
        **{name: getattr(limits, name) for name in _LIMITS},
        "models": None if access.models is None else sorted(access.models),
        "priority": access.priority or None,
        "max_priority": access.max_priority if access.max_priority != max(access.priority, 0) else None,
        **{name: getattr(access, name) or None for name in _FLAGS},
    }
    return {name: value for name, value in fields.items() if value is not None}


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="seconds")


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object; a field that is there twice would silently win over the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(name for name in found if sum(name == each for each, _ in pairs) > 1)
        raise ValueError(f"an object has the field {_shown(repeated)} twice")
    return found


def _is_text(value: object) -> bool:
    """Lists are shown in terminals, so what would steer one is no text."""
    return isinstance(value, str) and value.isprintable()


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]
