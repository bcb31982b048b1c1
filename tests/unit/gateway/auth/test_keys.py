"""Keys: how they are made and shown, the file of keys, and the callers of each key while the file changes."""

import asyncio
import json
import os
import stat
import threading
from datetime import UTC, datetime, timedelta

import pytest

from gateway.auth.caller import Access
from gateway.auth.keys import (
    KeyRing,
    NoAuthenticator,
    check_distinct,
    hash_of,
    make_key,
    parse_keys,
    read_keys,
    shown_key,
    write_keys,
)
from gateway.auth.quota import Limits
from quire.rpc.errors import ResourceExhausted, Unauthenticated
from quire.runtime.settings import ConfigurationError
from tests.support.keys import make_entry
from tests.support.processes import until_true


def test_keys_are_long_and_all_different():
    keys = {make_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(len(key) >= 43 for key in keys)


@pytest.mark.parametrize("header", ["Bearer quire-abc", "bearer quire-abc", "BEARER   quire-abc", b"Bearer quire-abc"])
def test_the_scheme_may_be_written_in_any_case(header):
    assert shown_key([header]) == "quire-abc"


@pytest.mark.parametrize(
    "headers",
    [
        [""],
        ["Bearer"],
        ["Bearer "],
        ["quire-abc"],
        ["Basic cXVpcmU6YWJj"],
        ["Bearer a b"],
        ["Bearer quire-abc\n"],
        ["Bearer quire-\u00e4"],
        [b"Bearer \xff\xfe"],
        ["Bearer " + "x" * 513],
        ["Bearer quire-abc", "Bearer quire-abc"],
        ["Bearer a, Bearer b"],
    ],
)
def test_anything_else_is_an_invalid_key_and_is_not_repeated(headers):
    with pytest.raises(Unauthenticated) as raised:
        shown_key(headers)
    assert raised.value.reason == "INVALID_API_KEY"
    assert "quire-abc" not in raised.value.message


ENTRY = {"id": "k-1", "sha256": hash_of("a").hex(), "tenant": "acme"}
FULL = make_entry(
    "k-1",
    "a",
    "acme",
    Access(frozenset({"m", "n"}), -3, 7, may_pin=True, is_operator=True),
    Limits(60, 1000, 8),
    created_at=datetime(2026, 1, 1, tzinfo=UTC),
    expires_at=datetime(2027, 1, 1, tzinfo=UTC),
    note="für Stapel",
)


def text_of(*entries):
    return json.dumps({"keys": entries})


@pytest.mark.parametrize("entry", [FULL, make_entry("k-2", "b", "t", Access(frozenset(), 5, 5))])
def test_what_is_written_is_read_again(tmp_path, entry):
    write_keys(tmp_path / "keys.json", [entry])
    assert read_keys(tmp_path / "keys.json") == [entry]


def test_a_new_file_is_its_owners_and_an_old_one_keeps_its_mode(tmp_path):
    path = tmp_path / "keys.json"
    write_keys(path, [])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    write_keys(path, [FULL])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file away")
def test_a_file_that_root_changes_stays_its_owners(tmp_path):
    """Otherwise the gateway, which runs as its owner, could not read it."""
    path = tmp_path / "keys.json"
    write_keys(path, [])
    os.chown(path, 4711, 4712)
    write_keys(path, [FULL])
    found = path.stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (4711, 4712, 0o600)


def test_a_link_to_the_file_stays_a_link(tmp_path):
    write_keys(tmp_path / "kept.json", [])
    link = tmp_path / "keys.json"
    link.symlink_to(tmp_path / "kept.json")
    write_keys(link, [FULL])
    assert link.is_symlink()
    assert read_keys(tmp_path / "kept.json") == [FULL]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"id": None}, r"keys\[0\].id is null"),
        ({"id": "a b"}, r'keys\[0\].id is "a b"'),
        ({"tenant": ""}, r'keys\[0\] \("k-1"\).tenant is ""'),
        ({"sha256": 7}, "sha256 must be 64 hexadecimal digits"),
        ({"requests_per_minute": 0}, r"requests_per_minute is 0; it must be an integer in \[1, "),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute is 1.5"),
        ({"priority": 101}, r"priority is 101; it must be an integer in \[-100, 100\]"),
        ({"priority": 5, "max_priority": 4}, "priority is 5; it must be at most max_priority, 4"),
        ({"models": "m"}, 'models is "m"; it must be a list of names'),
        ({"may_pin": "yes"}, 'may_pin is "yes"; it must be true or false'),
        ({"is_operator": 1}, "is_operator is 1"),
        ({"expires_at": "tomorrow"}, 'expires_at is "tomorrow"'),
        ({"expires_at": "2027-01-01T00:00:00"}, "expires_at is .* such as 2027"),
        ({"note": "\x1b[2J"}, "note is .* it must be a text of one line"),
        ({"request_per_minute": 5}, 'unknown field "request_per_minute"'),
    ],
)
def test_a_wrong_field_is_named_with_its_entry(change, says):
    with pytest.raises(ValueError, match=says):
        parse_keys(text_of(ENTRY | change))


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"keys": {}}', '{"keys": [], "more": 1}', '{"keys": [7]}', "[" * 100_000, "\ufeff{}"]
)
def test_what_is_no_keys_file_is_refused_in_one_line(text):
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z"):
        parse_keys(text)


def test_a_field_that_is_there_twice_is_refused():
    with pytest.raises(ValueError, match='"tenant" twice'):
        parse_keys(text_of(ENTRY).replace('"tenant": "acme"', '"tenant": "acme", "tenant": "other"'))


def test_two_entries_of_one_id_or_one_key_are_refused():
    with pytest.raises(ValueError, match='the id "k-1"'):
        parse_keys(text_of(ENTRY, ENTRY | {"sha256": hash_of("b").hex()}))
    with pytest.raises(ValueError, match='"k-1" and "k-2" have the same sha256'):
        parse_keys(text_of(ENTRY, ENTRY | {"id": "k-2"}))
    check_distinct(parse_keys(text_of(ENTRY, ENTRY | {"id": "k-2", "sha256": hash_of("b").hex()})))


@pytest.mark.parametrize("content", [None, b"\xff", b'{"keys": [7]}'])
def test_a_file_that_cannot_be_used_is_a_configuration_error_that_names_it(tmp_path, content):
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=str(path)):
        read_keys(path)


NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
ACME = make_entry("k-1", "a", "acme", Access(frozenset({"m"})), Limits(requests_per_minute=1))
OTHER = make_entry("k-2", "b", "other")


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


async def test_a_key_expires_while_the_gateway_runs(path):
    times = [NOON]
    expiring = make_entry("k-1", "a", "acme", expires_at=NOON + timedelta(hours=1))
    write_keys(path, [expiring])
    ring = KeyRing([path], now=lambda: times[-1])
    caller = ring.authenticate(bearer("a"))
    times.append(NOON + timedelta(hours=1))
    assert reason_of(ring, "a") == "EXPIRED_API_KEY"
    await ring.refresh()
    with pytest.raises(Unauthenticated):
        caller.account.check()


async def test_added_changed_and_revoked_keys_are_seen_at_the_next_look(path):
    ring = KeyRing([path])
    revoked = ring.authenticate(bearer("b"))
    write_keys(path, [make_entry("k-1", "a", "renamed"), make_entry("k-3", "c", "new")])
    await ring.refresh()
    assert ring.authenticate(bearer("a")).tenant == "renamed"
    assert ring.authenticate(bearer("c")).tenant == "new"
    assert reason_of(ring, "b") == "INVALID_API_KEY"
    with pytest.raises(Unauthenticated):
        revoked.account.check()


async def test_changed_files_are_read_beside_the_event_loop(path, monkeypatch):
    ring = KeyRing([path])
    begun, may_end = threading.Event(), threading.Event()

    def read_slowly(path):
        begun.set()
        assert may_end.wait(30)
        return read_keys(path)

    monkeypatch.setattr("gateway.auth.keys.read_keys", read_slowly)
    monkeypatch.setattr("gateway.auth.keys._POLL_INTERVAL_S", 0)
    write_keys(path, [make_entry("k-3", "c", "new")])
    watching = asyncio.create_task(ring.watch())
    try:
        await until_true(begun.is_set)
        assert ring.authenticate(bearer("a")).tenant == "acme"
        may_end.set()
        await until_true(lambda: ring.find("k-3", "new") is not None)
        assert reason_of(ring, "a") == "INVALID_API_KEY"
    finally:
        watching.cancel()


async def test_what_was_used_outlives_a_reload(path):
    ring = KeyRing([path], clock=lambda: 0.0)
    with ring.authenticate(bearer("a")).account.admitted(1):
        pass
    write_keys(path, [ACME])
    await ring.refresh()
    with pytest.raises(ResourceExhausted):
        ring.authenticate(bearer("a")).account.check()


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("{"), lambda path: path.unlink()])
async def test_a_file_that_becomes_unusable_leaves_the_keys_and_is_reported_once(path, spoil, caplog):
    failures = []
    ring = KeyRing([path], on_reload_failure=lambda: failures.append(1))
    spoil(path)
    await ring.refresh()
    await ring.refresh()
    assert ring.authenticate(bearer("a")).tenant == "acme"
    assert len(failures) == 1
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(path) in caplog.text
    write_keys(path, [OTHER])
    await ring.refresh()
    assert reason_of(ring, "a") == "INVALID_API_KEY"


def test_several_files_are_one_ring_and_must_not_share_keys(path, tmp_path):
    more = tmp_path / "more.json"
    write_keys(more, [make_entry("k-9", "z", "more")])
    assert KeyRing([path, more]).authenticate(bearer("z")).tenant == "more"
    write_keys(more, [make_entry("k-1", "z", "more")])
    with pytest.raises(ConfigurationError, match='the id "k-1"'):
        KeyRing([path, more])


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


def test_a_directory_that_is_not_there_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_keys(tmp_path / "missing" / "keys.json", [])


def test_a_key_put_there_instead_of_its_hash_is_not_repeated():
    with pytest.raises(ValueError, match="sha256") as raised:
        parse_keys(text_of(ENTRY | {"sha256": "quire-secret"}))
    assert "quire-secret" not in str(raised.value)
