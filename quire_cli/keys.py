"""`quire keys`: adds, lists and revokes the API keys in a file that gateways read."""

import dataclasses
import difflib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from fcntl import LOCK_EX, flock
from pathlib import Path

from gateway.auth.caller import HIGHEST_PRIORITY
from gateway.auth.keys import KeyEntry, check_name, hash_of, make_key, read_keys, write_keys
from quire.runtime.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire keys"
_USAGE = """usage: quire keys COMMAND FILE [FLAGS]

  add     makes a key and prints it; it is shown this once
  list    shows the keys: what they may do, and never the keys themselves
  revoke  takes keys out of the file

Gateways read a changed file within two seconds. `quire keys COMMAND --help` lists a command's flags."""


@dataclass(frozen=True, slots=True)
class AddFlags:
    """Makes a key and prints only the key on stdout. The file gets just its hash, so it cannot be shown again."""

    file: str | None = setting(None, "the file of keys; created if it does not exist", positional=True)
    tenant: str | None = setting(
        None, "tenant of the key; keys of one tenant share cached prefixes, request ids and pins", metavar="NAME"
    )
    id: str | None = setting(None, "id of the key; by default a random one", metavar="NAME")
    note: str = setting("", "note for people", metavar="TEXT")
    requests_per_minute: int | None = setting(
        None, "maximum requests a minute; by default no limit", minimum=1, metavar="N"
    )
    tokens_per_minute: int | None = setting(
        None, "maximum tokens a minute, of prompts and output; by default no limit", minimum=1, metavar="N"
    )
    max_concurrent_requests: int | None = setting(
        None, "maximum requests that run at once; by default no limit", minimum=1, metavar="N"
    )
    models: tuple[str, ...] = setting((), "models that it may use; by default all", metavar="NAME")
    priority: int = setting(0, "default priority of requests", minimum=-HIGHEST_PRIORITY, maximum=HIGHEST_PRIORITY)
    max_priority: int | None = setting(
        None,
        "highest priority that a request may set; by default the key's own, or 0 if that is lower",
        minimum=-HIGHEST_PRIORITY,
        maximum=HIGHEST_PRIORITY,
    )
    may_pin: bool = setting(False, "it may pin prefixes")
    operator: bool = setting(False, "it may see replicas and metrics")
    days: float | None = setting(None, "days until it expires; by default never", minimum=0.0001, maximum=36_500)

    def __post_init__(self) -> None:
        if self.tenant is None:
            raise ValueError("--tenant is missing; name the tenant of the key")
        check_name("--tenant", self.tenant)
        if self.id is not None:
            check_name("--id", self.id)
        for flag, text in (("--note", self.note), ("--models", "".join(self.models))):
            if not text.isprintable():
                raise ValueError(f"{flag} is {text!r}; it must be a text of one line")
        if self.max_priority is not None and self.priority > self.max_priority:
            raise ValueError(f"--priority is {self.priority}; it must be at most --max-priority, {self.max_priority}")


@dataclass(frozen=True, slots=True)
class ListFlags:
    """Shows the keys of a file."""

    file: str | None = setting(None, "the file of keys", positional=True)
    format: str = setting("text", "how to print", choices=("text", "json"))


@dataclass(frozen=True, slots=True)
class RevokeFlags:
    """Takes keys out of a file. Running requests continue; new ones are refused."""

    file: str | None = setting(None, "the file of keys", positional=True)
    id: tuple[str, ...] = setting((), "the key's id; may be repeated", metavar="NAME")
    tenant: str | None = setting(None, "all keys of this tenant", metavar="NAME")

    def __post_init__(self) -> None:
        if bool(self.id) == (self.tenant is not None):
            raise ValueError("give either --id or --tenant")


def main(argv: Sequence[str]) -> int:
    """Runs one of the three commands; 1 when there was nothing to revoke."""
    commands = {"add": _add, "list": _list, "revoke": _revoke}
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in commands:
        near = difflib.get_close_matches(argv[0], commands, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(commands)}"
        raise ConfigurationError(f'"{argv[0]}" is not a command; {hint}')
    return commands[argv[0]](argv[1:])


def _add(argv: Sequence[str]) -> int:
    # No environment: these flags differ from key to key.
    flags = load_settings(AddFlags, argv, None, program=f"{PROGRAM} add")
    path = _path(flags.file)
    assert flags.tenant is not None, "checked when the flags were read"
    key, now = make_key(), datetime.now(UTC).replace(microsecond=0)
    with _locked(path):
        entries = read_keys(path) if path.exists() else []
        key_id = flags.id or f"k-{secrets.token_hex(4)}"
        if any(entry.id == key_id for entry in entries):
            raise ConfigurationError(f'{path} has a key "{key_id}" already; choose another --id')
        expires_at = None if flags.days is None else now + timedelta(days=flags.days)
        entry = KeyEntry(
            id=key_id,
            sha256=hash_of(key).hex(),
            tenant=flags.tenant,
            note=flags.note,
            created_at=now,
            expires_at=expires_at,
            requests_per_minute=flags.requests_per_minute,
            tokens_per_minute=flags.tokens_per_minute,
            max_concurrent_requests=flags.max_concurrent_requests,
            models=flags.models or None,
            priority=flags.priority,
            max_priority=flags.max_priority,
            may_pin=flags.may_pin,
            is_operator=flags.operator,
        )
        write_keys(path, [*entries, entry])
    print(f'key "{key_id}" of tenant "{flags.tenant}"; it is shown this once:', file=sys.stderr)
    print(key)
    return 0


def _list(argv: Sequence[str]) -> int:
    flags = load_settings(ListFlags, argv, None, program=f"{PROGRAM} list")
    for entry in read_keys(_path(flags.file)):
        print(_as_json(entry) if flags.format == "json" else _as_text(entry))
    return 0


def _revoke(argv: Sequence[str]) -> int:
    flags = load_settings(RevokeFlags, argv, None, program=f"{PROGRAM} revoke")
    path = _path(flags.file)
    with _locked(path):
        entries = read_keys(path)
        revoked = [entry for entry in entries if entry.id in flags.id or entry.tenant == flags.tenant]
        if missing := sorted(set(flags.id) - {entry.id for entry in revoked}):
            raise ConfigurationError(f'{path} has no key "{missing[0]}"; nothing was revoked')
        write_keys(path, [entry for entry in entries if entry not in revoked])
    for entry in revoked:
        print(f'revoked "{entry.id}" of tenant "{entry.tenant}"')
    if not revoked:
        print(f'{PROGRAM} revoke: error: {path} has no key of tenant "{flags.tenant}"', file=sys.stderr)
    return 0 if revoked else 1


def _path(file: str | None) -> Path:
    if file is None:
        raise ConfigurationError("give the file of keys")
    return Path(file)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keeps others from adding or revoking. The lock is on the directory, since the file itself is replaced."""
    try:
        descriptor = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error
    try:
        flock(descriptor, LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _as_text(entry: KeyEntry) -> str:
    facts = [f"tenant {entry.tenant}"]
    facts += [f"{value} {name.replace('_', ' ')}" for name, value in dataclasses.asdict(entry.limits).items() if value]
    access = entry.access
    if access.models is not None:
        facts.append(f"models {' '.join(sorted(access.models)) or 'none'}")
    if (access.priority, access.max_priority) != (0, 0):
        facts.append(f"priority {access.priority} up to {access.max_priority}")
    facts += [word for word, holds in (("may pin", access.may_pin), ("operator", access.is_operator)) if holds]
    if entry.expires_at is not None:
        word = "expired" if entry.expires_at <= datetime.now(UTC) else "expires"
        facts.append(f"{word} {entry.expires_at:%Y-%m-%d %H:%M} UTC")
    return f"{entry.id}: {', '.join(facts)}" + (f" ({entry.note})" if entry.note else "")


def _as_json(entry: KeyEntry) -> str:
    access = dataclasses.asdict(entry.access)
    fields = {
        "key_id": entry.id,
        "tenant": entry.tenant,
        "access": access | {"models": None if entry.models is None else sorted(entry.models)},
        "limits": dataclasses.asdict(entry.limits),
        "created_at": entry.created_at,
        "expires_at": entry.expires_at,
        "note": entry.note,
    }
    return json.dumps(fields, default=datetime.isoformat, ensure_ascii=False)
