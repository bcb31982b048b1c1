"""Gateways that a client calls, by its arguments."""

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from quire.client.connection import ClientTls, find_target, open_channel, split_addresses
from quire.rpc.errors import Unavailable
from quire.runtime.settings import ConfigurationError

KNOWN = {"one": ["10.0.0.1"], "two": ["10.0.0.2", "10.0.0.3"], "dual": ["fd00::1", "10.0.0.1"]}


def look_up(host: str) -> Sequence[str]:
    if host not in KNOWN:
        raise OSError(-2, "Name or service not known")
    return KNOWN[host]


def test_one_address_goes_to_grpc_as_it_is_and_an_ip_address_stands_for_one_gateway() -> None:
    places = {"127.0.0.1:1": True, "[::1]:1": True, "unix:/a,b": True, "h:1": False, "dns:///h:1": False}
    for address, is_one_place in places.items():
        target = find_target([address], look_up)
        assert (target.uri, target.is_list, target.is_one_place) == (address, False, is_one_place)
    assert not find_target("127.0.0.1:1,127.0.0.2:1", look_up).is_one_place


@pytest.mark.parametrize("address", ["a:1,b:2", " a:1 , b:2 ", ["a:1", "b:2"], ("a:1", "b:2", "a:1")])
def test_several_addresses_are_a_text_with_commas_or_a_sequence(address: str | Sequence[str]) -> None:
    assert split_addresses(address) == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("address", "uri"),
    [
        ("127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2"),
        ("[::1]:1,[fd00::2]:2", "ipv6:[::1]:1,[fd00::2]:2"),
        ("[fe80::1%eth0]:1,[::1]:2", "ipv6:[fe80::1%25eth0]:1,[::1]:2"),
        ("127.0.0.1:1,[::1]:1", "ipv6:[::ffff:127.0.0.1]:1,[::1]:1"),
        ("one:1,two:2", "ipv4:10.0.0.1:1,10.0.0.2:2,10.0.0.3:2"),
        ("one:1,10.0.0.1:1", "ipv4:10.0.0.1:1"),
        ("one:1,dual:1", "ipv6:[::ffff:10.0.0.1]:1,[fd00::1]:1"),
        ("unix:/a b,unix:/c", "unix:/a%20b,/c"),
    ],
)
def test_several_addresses_are_one_target_of_one_family(address: str, uri: str) -> None:
    assert find_target(address, look_up).uri == uri


def test_a_name_that_nobody_knows_is_left_out_while_others_are_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert find_target("gone:1,one:1", look_up).uri == "ipv4:10.0.0.1:1"
    assert "gone:1 (Name or service not known)" in caplog.text
    with pytest.raises(Unavailable, match=r"gone:1 \(.*\), lost:2 \("):
        find_target("gone:1,lost:2", look_up)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        *((each, "has an empty part") for each in ("", ",", "a:1,", "a:1,,b:2", [], [""], ["a:1", " "])),
        ("a:1,b", 'address "b" is not HOST:PORT'),
        ("a:1,b:70000", "port 0 to 65535"),
        (["a:1,b:2", "c:3"], 'address "a:1,b:2" of several has a comma'),
        ("a:1,unix:/s", "mix TCP and unix sockets"),
        ("a:1,unix:", "has no path"),
    ],
)
def test_an_address_that_is_empty_or_a_malformed_one_of_several_is_refused(
    address: str | Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        find_target(address, look_up)


class _Api:
    """Stands in for gRPC: a channel is the arguments that the client opened it with."""

    def insecure_channel(self, uri: str, options: Any) -> Any:
        return uri, dict(options)

    def secure_channel(self, uri: str, credentials: Any, options: Any) -> Any:
        return uri, dict(options)


def test_a_list_has_the_name_of_its_first_address_and_no_proxy() -> None:
    _, options = open_channel(_Api(), "10.0.0.1:1,10.0.0.2:1", None)
    assert options["grpc.default_authority"] == "10.0.0.1:1"
    assert options["grpc.enable_http_proxy"] == 0
    _, options = open_channel(_Api(), "10.0.0.1:1", None)
    assert "grpc.default_authority" not in options
    assert options["grpc.enable_http_proxy"] == 1


def test_gateways_on_several_hosts_need_one_name_for_tls() -> None:
    with pytest.raises(ConfigurationError, match=r"several hosts \(10\.0\.0\.1, 10\.0\.0\.2\) must share one name"):
        open_channel(_Api(), "10.0.0.1:1,10.0.0.2:1", ClientTls())
    open_channel(_Api(), "10.0.0.1:1,10.0.0.2:1", ClientTls(server_name="quire"))
    open_channel(_Api(), "10.0.0.1:1,10.0.0.1:2", ClientTls())
