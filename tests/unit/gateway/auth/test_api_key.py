"""Keys as they are made, kept and shown."""

import hashlib

import pytest

from gateway.auth.api_key import hash_of, make_key, shown_key
from quire.rpc.errors import Unauthenticated


def test_keys_are_long_and_all_different():
    keys = {make_key() for _ in range(1000)}
    assert len(keys) == 1000
    assert all(len(key) >= 43 for key in keys)


def test_the_hash_is_that_of_the_standard():
    assert hash_of("quire-x").hex() == hashlib.sha256(b"quire-x").hexdigest()


@pytest.mark.parametrize("header", ["Bearer quire-abc", "bearer quire-abc", "BEARER   quire-abc", b"Bearer quire-abc"])
def test_the_scheme_may_be_written_in_any_case(header):
    assert shown_key([header]) == "quire-abc"


def test_nothing_shown_is_a_missing_key():
    with pytest.raises(Unauthenticated) as raised:
        shown_key([])
    assert raised.value.reason == "MISSING_API_KEY"


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
