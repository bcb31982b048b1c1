"""Which caller a key stands for, while its file changes."""

from datetime import UTC, datetime, timedelta

import pytest

from gateway.auth.account import Limits
from gateway.auth.api_key import hash_of
from gateway.auth.authenticator import KeyRing, NoAuthenticator
from gateway.auth.caller import Access
from gateway.auth.keys_file import KeyEntry, write_keys
from quire.rpc.errors import ResourceExhausted, Unauthenticated
from quire.settings import ConfigurationError

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
ACME = KeyEntry("k-1", hash_of("a"), "acme", Access(frozenset({"m"})), Limits(requests_per_minute=1))
OTHER = KeyEntry("k-2", hash_of("b"), "other")


@pytest.fixture
def path(tmp_path):
    write_keys(tmp_path / "keys.json", [ACME, OTHER])
    return tmp_path / "keys.json"


def bearer(key):
    return [f"Bearer {key}"]


def reason_of(ring, key):
    with pytest.raises(Unauthenticated) as raised:
        ring.authenticate(bearer(key))
    return raised.value.reason


def test_a_key_stands_for_its_entry(path):
    ring = KeyRing([path])
    caller = ring.authenticate(bearer("a"))
    assert (caller.tenant, caller.visible("m"), caller.visible("n")) == ("acme", "m", None)
    assert ring.authenticate(bearer("b")).tenant == "other"
    assert ring.authenticate(bearer("a")).account is caller.account
    assert len(ring) == 2


def test_a_key_that_is_not_there_is_invalid_and_so_is_the_hash_of_one_that_is(path):
    ring = KeyRing([path])
    assert reason_of(ring, "c") == "INVALID_API_KEY"
    assert reason_of(ring, ACME.hash.hex()) == "INVALID_API_KEY"


def test_a_key_expires_while_the_gateway_runs(path):
    times = [NOON]
    expiring = KeyEntry("k-1", hash_of("a"), "acme", expires_at=NOON + timedelta(hours=1))
    write_keys(path, [expiring])
    ring = KeyRing([path], now=lambda: times[-1])
    caller = ring.authenticate(bearer("a"))
    times.append(NOON + timedelta(hours=1))
    assert reason_of(ring, "a") == "EXPIRED_API_KEY"
    ring.refresh()
    with pytest.raises(Unauthenticated):
        caller.account.check()


def test_added_changed_and_revoked_keys_are_seen_at_the_next_look(path):
    ring = KeyRing([path])
    revoked = ring.authenticate(bearer("b"))
    write_keys(path, [KeyEntry("k-1", hash_of("a"), "renamed"), KeyEntry("k-3", hash_of("c"), "new")])
    ring.refresh()
    assert ring.authenticate(bearer("a")).tenant == "renamed"
    assert ring.authenticate(bearer("c")).tenant == "new"
    assert reason_of(ring, "b") == "INVALID_API_KEY"
    with pytest.raises(Unauthenticated):
        revoked.account.check()


def test_what_was_used_outlives_a_reload(path):
    ring = KeyRing([path], clock=lambda: 0.0)
    with ring.authenticate(bearer("a")).account.admitted(1):
        pass
    write_keys(path, [ACME])
    ring.refresh()
    with pytest.raises(ResourceExhausted):
        ring.authenticate(bearer("a")).account.check()


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), lambda path: path.unlink()])
def test_a_file_that_becomes_unusable_leaves_the_keys_and_is_reported_once(path, spoil, caplog):
    failures = []
    ring = KeyRing([path], on_reload_failure=lambda: failures.append(1))
    spoil(path)
    ring.refresh()
    ring.refresh()
    assert ring.authenticate(bearer("a")).tenant == "acme"
    assert len(failures) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(path) in caplog.text
    write_keys(path, [OTHER])
    ring.refresh()
    assert reason_of(ring, "a") == "INVALID_API_KEY"


def test_an_unchanged_file_is_not_read_again(path, monkeypatch):
    ring = KeyRing([path])
    monkeypatch.setattr("gateway.auth.authenticator.read_keys", lambda path: pytest.fail("read again"))
    ring.refresh()


def test_several_files_are_one_ring_and_must_not_share_keys(path, tmp_path):
    more = tmp_path / "more.json"
    write_keys(more, [KeyEntry("k-9", hash_of("z"), "more")])
    assert KeyRing([path, more]).authenticate(bearer("z")).tenant == "more"
    write_keys(more, [KeyEntry("k-1", hash_of("z"), "more")])
    with pytest.raises(ConfigurationError, match='the id "k-1"'):
        KeyRing([path, more])


def test_a_file_that_cannot_be_used_at_the_start_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match=r"missing\.json"):
        KeyRing([tmp_path / "missing.json"])


def test_a_file_that_everyone_may_write_is_warned_of(path, caplog):
    path.chmod(0o666)
    KeyRing([path])
    assert "may write" in caplog.text


def test_without_keys_everyone_is_the_same_caller():
    off = NoAuthenticator()
    assert off.authenticate([]) is off.authenticate(["anything"])
    caller = off.authenticate([])
    assert (caller.tenant, caller.visible("m"), caller.priority_of(100)) == ("default", "m", 100)
    caller.check_may_pin()
