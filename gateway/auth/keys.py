"""API keys: their form, the file that lists them, and the set of keys that a gateway accepts.

A key is 32 random bytes and cannot be guessed, so one SHA-256, which takes a microsecond, protects it as well as a slow
hash. Keys are looked up by their hash, so the time of the lookup reveals nothing about the key.

The file holds hashes, never keys. It is JSON because `quire keys` writes it, and Python's library cannot write TOML. A
key has a `note` in place of comments.

    {"keys": [{"id": "k-1f4c2a90", "sha256": "9f86...", "tenant": "acme", "note": "batch jobs",
               "requests_per_minute": 60, "models": ["quire-tiny"], "expires_at": "2027-01-31T00:00:00+00:00"}]}
"""

import asyncio
import json
import logging
import re
import stat
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, NewType, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gateway.auth.caller import DEFAULT_TENANT, HIGHEST_PRIORITY, Access, Caller, anyone
from gateway.auth.quota import Account, Limits
from quire.rpc.errors import Unauthenticated
from quire.runtime import clock, entropy
from quire.runtime.replacement import replace_file
from quire.runtime.settings import ConfigurationError

KeyHash = NewType("KeyHash", bytes)

_PREFIX = "quire-"
_RANDOM_BYTES = 32
_SHOWN = re.compile(r"bearer +([\x21-\x7e]{1,512})", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME_IS = "1 to 64 characters of [A-Za-z0-9._-]"
_MAX_LIMIT = 10**12
_POLL_INTERVAL_S = 1.0
_logger = logging.getLogger(__name__)


def make_key() -> str:
    return _PREFIX + urlsafe_b64encode(entropy.random_bytes(_RANDOM_BYTES)).rstrip(b"=").decode()


def hash_of(key: str) -> KeyHash:
    """The hash of a key, by which the file and the gateway identify it."""
    return KeyHash(sha256(key.encode()).digest())


def shown_key(authorizations: Sequence[str | bytes]) -> str:
    """The key in the authorization headers of a call.

    Raises:
        Unauthenticated: there is no header, there are several, or it is not of the form "Bearer KEY".
    """
    if not authorizations:
        raise Unauthenticated("no API key; send it as authorization: Bearer KEY", reason="MISSING_API_KEY")
    text = authorizations[0]
    match = _SHOWN.fullmatch(text.decode("latin-1") if isinstance(text, bytes) else text)
    if match is None or len(authorizations) > 1:
        raise Unauthenticated(
            "the authorization is not of the form Bearer KEY, or there are several", reason="INVALID_API_KEY"
        )
    return match[1]


def check_name(what: str, name: str) -> None:
    """Checks a tenant's name or a key's id. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{what} is {_shown(name)}; it must be {_NAME_IS}")


def _check_line(text: str) -> str:
    """Rejects control characters, because texts of the file are printed in terminals."""
    if not text.isprintable():
        raise ValueError
    return text


def _parse_time(value: object) -> object:
    """Parses a text as a time; other values stay unchanged, and the type rejects them."""
    try:
        parsed = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return parsed.astimezone(UTC) if isinstance(parsed, datetime) and parsed.tzinfo is not None else value


Name = Annotated[str, Field(pattern=f"^{_NAME.pattern}$", description=_NAME_IS)]
Line = Annotated[str, AfterValidator(_check_line)]
Limit = Annotated[int | None, Field(ge=1, le=_MAX_LIMIT, description=f"an integer in [1, {_MAX_LIMIT}]")]
Priority = Annotated[int, Field(ge=-HIGHEST_PRIORITY, le=HIGHEST_PRIORITY)]
Time = Annotated[
    datetime | None, BeforeValidator(_parse_time), Field(description="a time such as 2027-01-31T00:00:00+00:00")
]
_PRIORITY_IS = f"an integer in [{-HIGHEST_PRIORITY}, {HIGHEST_PRIORITY}]"
_FLAG_IS = "true or false"


class KeyEntry(BaseModel):
    """One key in the file. Errors quote the description of a field.

    Attributes:
        id: The key's public name, which is not a secret.
        sha256: The hash of the key, in hexadecimal.
        tenant: The owner of the key.
        models: The models that it may use; None means all.
        priority: The default priority of requests.
        max_priority: The highest priority that a request may set; None means `priority`, or 0 if that is lower.
        expires_at: The end of its validity; None means that it never expires.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: Name
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="64 hexadecimal digits in lower case")]
    tenant: Name
    note: Annotated[Line, Field(description="a text of one line")] = ""
    created_at: Time = None
    expires_at: Time = None
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    max_concurrent_requests: Limit = None
    models: Annotated[tuple[Line, ...] | None, Field(strict=False, description="a list of names")] = None
    priority: Annotated[Priority, Field(description=_PRIORITY_IS)] = 0
    max_priority: Annotated[Priority | None, Field(description=_PRIORITY_IS)] = None
    may_pin: Annotated[bool, Field(description=_FLAG_IS)] = False
    is_operator: Annotated[bool, Field(description=_FLAG_IS)] = False

    @model_validator(mode="after")
    def _check_priorities(self) -> Self:
        highest = self.access.max_priority
        if self.priority > highest:
            raise ValueError(f"priority is {self.priority}; it must be at most max_priority, {highest}")
        return self

    @property
    def hash(self) -> KeyHash:
        return KeyHash(bytes.fromhex(self.sha256))

    @property
    def access(self) -> Access:
        highest = max(self.priority, 0) if self.max_priority is None else self.max_priority
        models = None if self.models is None else frozenset(self.models)
        return Access(models, self.priority, highest, may_pin=self.may_pin, is_operator=self.is_operator)

    @property
    def limits(self) -> Limits:
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.max_concurrent_requests)


class _File(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    keys: list[KeyEntry]


def entries_of(keys: Sequence[str]) -> list[KeyEntry]:
    """Entries for keys that allow everything, in the default tenant."""
    return [
        KeyEntry(
            id=f"api-key-{number}",
            sha256=hash_of(key).hex(),
            tenant=DEFAULT_TENANT,
            max_priority=HIGHEST_PRIORITY,
            may_pin=True,
            is_operator=True,
        )
        for number, key in enumerate(dict.fromkeys(keys), 1)
    ]


def read_keys(path: Path) -> list[KeyEntry]:
    """All keys of a file.

    Raises:
        ConfigurationError: the file cannot be read, or an entry is invalid. One line names the file and the field.
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
    """The keys in the text of a file. Raises ValueError with one line that names the entry and the field."""
    try:
        content = json.loads(text, object_pairs_hook=_without_repetitions)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not valid JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    try:
        entries = _File.model_validate(content).keys
    except ValidationError as error:
        raise ValueError(_first_error(content, error)) from error
    check_distinct(entries)
    return entries


def write_keys(path: Path, entries: Iterable[KeyEntry]) -> None:
    """Replaces the file as `replace_file` does. Only its owner can read a new file.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    fields = [entry.model_dump(mode="json", exclude_defaults=True) for entry in entries]
    text = json.dumps({"keys": fields}, indent=2, ensure_ascii=False) + "\n"
    try:
        replace_file(path, text.encode(), 0o600)
    except OSError as error:
        raise ConfigurationError(f"cannot write the keys file {path}: {error.strerror}") from error


def check_distinct(entries: Iterable[KeyEntry]) -> None:
    """Raises ValueError if two entries have the same id or the same key."""
    ids: set[str] = set()
    by_hash: dict[str, str] = {}
    for entry in entries:
        if entry.id in ids:
            raise ValueError(f'two keys have the id "{entry.id}"')
        if entry.sha256 in by_hash:
            raise ValueError(f'"{by_hash[entry.sha256]}" and "{entry.id}" have the same sha256: they are one key')
        ids.add(entry.id)
        by_hash[entry.sha256] = entry.id


def _first_error(content: Any, error: ValidationError) -> str:
    """The first error in one line: entry, field, value, and what the value must be."""
    first = error.errors(include_url=False)[0]
    match first["loc"]:
        case ("keys", int(position)) if first["type"] == "value_error":
            return f"{_place(content, position)}.{first['msg'].removeprefix('Value error, ')}"
        case ("keys", int(position)):
            return f"{_place(content, position)} is {_shown(first['input'])}; it must be an object"
        case ("keys", int(position), str(field), *_) if first["type"] == "extra_forbidden":
            return f"{_place(content, position)} has the unknown field {_shown(field)}"
        case ("keys", int(position), str(field), *_):
            place = f"{_place(content, position)}.{field}"
            expected = KeyEntry.model_fields[field].description
            if field == "sha256":
                # Without the value, which may be the key itself by mistake.
                return f"{place} must be {expected}"
            return f"{place} is {_shown(content['keys'][position].get(field))}; it must be {expected}"
    return 'it must be an object with the one field "keys", a list'


def _place(content: Any, position: int) -> str:
    """The name of an entry, with its id if it has one."""
    entry = content["keys"][position]
    key_id = entry.get("id") if isinstance(entry, dict) else None
    if isinstance(key_id, str) and _NAME.fullmatch(key_id):
        return f'keys[{position}] ("{key_id}")'
    return f"keys[{position}]"


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, without repeated fields. json.loads would silently keep the last value of a repeated field."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(name for name in found if sum(name == each for each, _ in pairs) > 1)
        raise ValueError(f"an object has the field {_shown(repeated)} twice")
    return found


def _shown(value: object) -> str:
    return json.dumps(value, default=str)[:80]


class NoAuthenticator:
    """The authenticator if authentication is off: all clients are one caller. It has the methods of `KeyRing`."""

    def __init__(self) -> None:
        self._caller = anyone()

    def authenticate(self, authorizations: Sequence[str | bytes]) -> Caller:
        return self._caller

    def find(self, key_id: str, tenant: str) -> Caller | None:
        return self._caller if tenant == self._caller.tenant else None

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()


class _Entries:
    """The entries of all files. There may be very many."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        self.by_hash = {entry.hash: entry for entry in entries}
        self.by_id = {entry.id: entry for entry in entries}


class KeyRing:
    """The keys of some files. A key gets its account at the first use, and keeps it when the files are reloaded."""

    def __init__(
        self,
        paths: Sequence[Path],
        entries: Sequence[KeyEntry] = (),
        *,
        clock: Callable[[], float] = clock.monotonic,
        now: Callable[[], datetime] = lambda: datetime.fromtimestamp(clock.unix_s(), UTC),
        on_reload_failure: Callable[[], None] = lambda: None,
        on_refusal: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`entries` are keys in addition to the files. `clock` returns seconds of a monotonic clock, `now` the time of
        day. `on_refusal` is called with the reason when a valid key does not allow a request, or not at present.

        Raises:
            ConfigurationError: a file cannot be read or is invalid; the message has one line.
        """
        self._paths = tuple(paths)
        self._own = tuple(entries)
        self._clock = clock
        self._now = now
        self._on_reload_failure = on_reload_failure
        self._on_refusal = on_refusal
        self._callers: dict[KeyHash, Caller] = {}
        # Keys in use that have an expiry time.
        self._expiring: list[tuple[KeyEntry, Account]] = []
        self._signatures = [_signature(path) for path in self._paths]
        self._entries = self._read()
        for path in self._paths:
            if path.stat().st_mode & stat.S_IWOTH:
                _logger.warning("every user of this machine may write %s, and so add keys to it", path)

    def __len__(self) -> int:
        return len(self._entries.by_hash)

    def authenticate(self, authorizations: Sequence[str | bytes]) -> Caller:
        """The caller with the key in a call's authorization headers. Raises Unauthenticated if it is not valid."""
        entry = self._entries.by_hash.get(hash_of(shown_key(authorizations)))
        if entry is None:
            message = "the API key is not valid; operators list and make keys with `quire keys`"
            raise Unauthenticated(message, reason="INVALID_API_KEY")
        if self._is_expired(entry):
            raise Unauthenticated("the API key has expired", reason="EXPIRED_API_KEY")
        return self._caller_of(entry)

    def find(self, key_id: str, tenant: str) -> Caller | None:
        """The caller with a key's id, for work that continues after its call; None if the key is no longer valid or
        belongs to another tenant."""
        entry = self._entries.by_id.get(key_id)
        if entry is None or entry.tenant != tenant or self._is_expired(entry):
            return None
        return self._caller_of(entry)

    async def watch(self) -> None:
        """Refreshes every second until it is cancelled."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Reloads changed files, in a thread, since 100,000 keys take more than a second. If one is invalid, all keys
        stay unchanged. Closes accounts of expired keys."""
        before, self._signatures = self._signatures, [_signature(path) for path in self._paths]
        if self._signatures != before:
            try:
                self._replace(await asyncio.to_thread(self._read))
                _logger.info("read %d keys again", len(self))
            except ConfigurationError as error:
                _logger.error("%s; the keys that were read before remain valid", error)
                self._on_reload_failure()
        for entry, account in self._expiring:
            account.is_closed = self._is_expired(entry)

    def _read(self) -> _Entries:
        entries = [*self._own, *(entry for path in self._paths for entry in read_keys(path))]
        try:
            check_distinct(entries)
        except ValueError as error:
            raise ConfigurationError(f"the keys files {', '.join(map(str, self._paths))}: {error}") from error
        return _Entries(entries)

    def _replace(self, entries: _Entries) -> None:
        """Replaces all entries. Accounts of remaining keys persist, accounts of revoked keys are closed."""
        before, self._callers = self._callers, {}
        self._entries, self._expiring = entries, []
        for key_hash, caller in before.items():
            entry, account = entries.by_hash.get(key_hash), caller.account
            if entry is None:
                account.is_closed = True
            else:
                account.change_limits(entry.limits)
                account.is_closed = False
                self._caller_of(entry, account)

    def _caller_of(self, entry: KeyEntry, account: Account | None = None) -> Caller:
        """The caller with a key. A key without an account gets this account, or a new one."""
        caller = self._callers.get(entry.hash)
        if caller is None:
            account = account or Account(entry.limits, self._clock, self._on_refusal)
            caller = self._callers[entry.hash] = Caller(entry.tenant, entry.access, account, entry.id)
            if entry.expires_at is not None:
                self._expiring.append((entry, account))
        return caller

    def _is_expired(self, entry: KeyEntry) -> bool:
        return entry.expires_at is not None and self._now() >= entry.expires_at


Authenticator = KeyRing | NoAuthenticator


def _signature(path: Path) -> tuple[int, int, int] | None:
    """A value that differs after a change or replacement of the file; None if the file cannot be read."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
