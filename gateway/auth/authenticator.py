"""Finds out who calls, and goes on doing so while the files of keys change."""

import asyncio
import logging
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from gateway.auth.account import Account
from gateway.auth.api_key import KeyHash, hash_of, shown_key
from gateway.auth.caller import Caller, anyone
from gateway.auth.keys_file import KeyEntry, check_distinct, read_keys
from quire.rpc.errors import Unauthenticated
from quire.settings import ConfigurationError

_POLL_INTERVAL_S = 1.0
_logger = logging.getLogger(__name__)

# What tells whether a file was changed or replaced; None where it cannot be looked at.
_Signature = tuple[int, int, int] | None


class Authenticator(Protocol):
    """What both fronts ask about every call."""

    def authenticate(self, authorizations: Sequence[str | bytes]) -> Caller:
        """Who calls with these authorization headers. Raises Unauthenticated."""
        ...

    def refresh(self) -> None:
        """Takes over what has changed since."""
        ...

    async def watch(self) -> None:
        """Refreshes, again and again, until it is cancelled."""
        ...


class NoAuthenticator:
    """Authentication is off: everyone is the same caller, whatever is shown."""

    def __init__(self) -> None:
        self._caller = anyone()

    def authenticate(self, authorizations: Sequence[str | bytes]) -> Caller:
        return self._caller

    def refresh(self) -> None:
        """There is nothing to change."""

    async def watch(self) -> None:
        await asyncio.get_running_loop().create_future()


@dataclass(frozen=True, slots=True)
class _Known:
    entry: KeyEntry
    caller: Caller


class KeyRing:
    """The keys of some files. An account lives as long as its key, however often the files change."""

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        on_reload_failure: Callable[[], None] = lambda: None,
        on_refusal: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`clock` gives seconds and never goes back, `now` is the time of day; `on_refusal` gets the reason where a
        valid key does not allow what is asked, or not now.

        Raises:
            ConfigurationError: a file cannot be read or is wrong, in one line.
        """
        self._paths = tuple(paths)
        self._clock = clock
        self._now = now
        self._on_reload_failure = on_reload_failure
        self._on_refusal = on_refusal
        self._by_hash: dict[KeyHash, _Known] = {}
        self._signatures = self._look()
        self._take(self._read())
        for path in self._paths:
            _warn_of_other_writers(path)

    def __len__(self) -> int:
        return len(self._by_hash)

    def authenticate(self, authorizations: Sequence[str | bytes]) -> Caller:
        known = self._by_hash.get(hash_of(shown_key(authorizations)))
        if known is None:
            raise Unauthenticated("the API key is not valid", reason="INVALID_API_KEY")
        if self._is_expired(known.entry):
            raise Unauthenticated("the API key has expired", reason="EXPIRED_API_KEY")
        return known.caller

    async def watch(self) -> None:
        """Looks at the files every second; ends only by cancellation."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files again if they changed; where they are wrong, all keys stay as they were."""
        for known in self._by_hash.values():
            if self._is_expired(known.entry):
                known.caller.account.close()
        signatures = self._look()
        if signatures == self._signatures:
            return
        self._signatures = signatures
        try:
            entries = self._read()
        except ConfigurationError as error:
            _logger.error("%s; the keys that were read before stay valid", error)
            self._on_reload_failure()
            return
        self._take(entries)
        _logger.info("read %d keys again", len(entries))

    def _read(self) -> list[KeyEntry]:
        entries = [entry for path in self._paths for entry in read_keys(path)]
        try:
            check_distinct(entries)
        except ValueError as error:
            raise ConfigurationError(f"the keys files {', '.join(map(str, self._paths))}: {error}") from error
        return entries

    def _take(self, entries: Sequence[KeyEntry]) -> None:
        before, self._by_hash = self._by_hash, {}
        for entry in entries:
            old = before.pop(entry.hash, None)
            if old is None:
                account = Account(entry.limits, self._clock, self._on_refusal)
            else:
                account = old.caller.account
                account.change_limits(entry.limits)
            self._by_hash[entry.hash] = _Known(entry, Caller(entry.tenant, entry.access, account))
        for removed in before.values():
            removed.caller.account.close()

    def _is_expired(self, entry: KeyEntry) -> bool:
        return entry.expires_at is not None and self._now() >= entry.expires_at

    def _look(self) -> list[_Signature]:
        return [_signature(path) for path in self._paths]


def _signature(path: Path) -> _Signature:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _warn_of_other_writers(path: Path) -> None:
    if path.stat().st_mode & stat.S_IWOTH:
        _logger.warning("everyone on this machine may write %s, and so add keys to it", path)
