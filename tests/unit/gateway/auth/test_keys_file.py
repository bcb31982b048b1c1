"""The file of keys: what is read, what is refused, what is written."""

import contextlib
import json
import stat
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.auth.account import Limits
from gateway.auth.api_key import hash_of
from gateway.auth.caller import Access
from gateway.auth.keys_file import KeyEntry, check_distinct, parse_keys, read_keys, write_keys
from quire.settings import ConfigurationError

ENTRY = {"id": "k-1", "sha256": hash_of("a").hex(), "tenant": "acme"}
FULL = KeyEntry(
    "k-1",
    hash_of("a"),
    "acme",
    Access(frozenset({"m", "n"}), -3, 7, may_pin=True, is_operator=True),
    Limits(60, 1000, 8),
    datetime(2026, 1, 1, tzinfo=UTC),
    datetime(2027, 1, 1, tzinfo=UTC),
    "für Stapel",
)


def text_of(*entries):
    return json.dumps({"keys": entries})


def test_an_entry_without_options_allows_little_and_limits_nothing():
    (entry,) = parse_keys(text_of(ENTRY))
    assert entry == KeyEntry("k-1", hash_of("a"), "acme", Access(None, 0, 0, False, False), Limits())


@pytest.mark.parametrize("entry", [FULL, KeyEntry("k-2", hash_of("b"), "t", Access(frozenset(), 5, 5))])
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
        ({"tenant": "x" * 65}, r"tenant is .* 1 to 64 characters"),
        ({"sha256": "A" * 64}, "sha256 must be 64 hexadecimal digits"),
        ({"sha256": 7}, "sha256 must be 64 hexadecimal digits"),
        ({"requests_per_minute": 0}, r"requests_per_minute is 0; it must be an integer in \[1, "),
        ({"tokens_per_minute": 1.5}, "tokens_per_minute is 1.5"),
        ({"max_concurrent_requests": True}, "max_concurrent_requests is true"),
        ({"priority": 101}, r"priority is 101; it must be an integer in \[-100, 100\]"),
        ({"priority": 5, "max_priority": 4}, "priority is 5; it must be at most max_priority, 4"),
        ({"models": "m"}, 'models is "m"; it must be a list of names'),
        ({"models": [1]}, r"models is \[1\]"),
        ({"may_pin": "yes"}, 'may_pin is "yes"; it must be true or false'),
        ({"is_operator": 1}, "is_operator is 1"),
        ({"expires_at": "tomorrow"}, 'expires_at is "tomorrow"'),
        ({"expires_at": "2027-01-01T00:00:00"}, "expires_at is .* such as 2027"),
        ({"expires_at": 5}, "expires_at is 5"),
        ({"note": 5}, "note is 5"),
        ({"note": "\x1b[2J"}, "note is .* it must be a text of one line"),
        ({"note": "\ud800"}, "note is"),
        ({"models": ["a\nb"]}, "models is"),
        ({"request_per_minute": 5}, 'unknown field "request_per_minute"'),
    ],
)
def test_a_wrong_field_is_named_with_its_entry(change, says):
    with pytest.raises(ValueError, match=says):
        parse_keys(text_of(ENTRY | change))


def test_a_key_put_there_instead_of_its_hash_is_not_repeated():
    with pytest.raises(ValueError, match="sha256") as raised:
        parse_keys(text_of(ENTRY | {"sha256": "quire-secret"}))
    assert "quire-secret" not in str(raised.value)


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


def test_a_directory_that_is_not_there_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigurationError, match="cannot write"):
        write_keys(tmp_path / "missing" / "keys.json", [])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*ENTRY, "models", "priority", "may_pin", "expires_at", "tokens_per_minute", "note"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=4))
def test_any_other_value_is_taken_or_refused(changes):
    with contextlib.suppress(ValueError):
        assert len(parse_keys(text_of(ENTRY | changes))) == 1
