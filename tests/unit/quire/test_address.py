"""Addresses as text."""

from pathlib import Path

import pytest

from quire.rpc.address import TcpAddress, UnixAddress, check_bindable, is_local, parse_address
from quire.settings import ConfigurationError


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:0", TcpAddress("127.0.0.1", 0)),
        ("some.host:65535", TcpAddress("some.host", 65535)),
        ("[::1]:80", TcpAddress("::1", 80)),
        ("unix:/run/x.sock", UnixAddress(Path("/run/x.sock"))),
    ],
)
def test_an_address_is_read_and_written_the_same(text: str, address: TcpAddress | UnixAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:-1", "host:65536", "host:a", "unix:", "host:\u0661"]
)
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationError, match="address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("unix:x", True),
        ("10.0.0.1:1", False),
        ("example.org:1", False),
    ],
)
def test_local_addresses_are_known(text: str, local: bool) -> None:
    assert is_local(text) is local


def test_a_free_port_can_be_bound_again_and_again() -> None:
    for _ in range(3):
        check_bindable(TcpAddress("localhost", 0))


def test_a_path_that_is_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="longer than 107 bytes"):
        check_bindable(UnixAddress(tmp_path / ("x" * 108)))


def test_a_path_that_is_taken_by_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("precious")
    with pytest.raises(ConfigurationError, match="not a socket"):
        check_bindable(UnixAddress(file))
    assert file.read_text() == "precious"
