"""Addresses as text."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.rpc.address import (
    AddressInUse,
    DnsName,
    ReservedPort,
    TcpAddress,
    UnixAddress,
    check_bindable,
    is_local,
    parse_address,
    parse_target,
)
from quire.runtime.settings import ConfigurationError


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


def test_what_is_no_address_is_refused_by_name() -> None:
    for text in ("", "host", "host:", ":80", "host:65536", "host:a", "unix:", "host:\u0661"):
        with pytest.raises(ConfigurationError, match="address"):
            parse_address(text)


def test_a_name_stands_for_all_of_its_addresses_and_one_of_another_form_is_refused() -> None:
    assert parse_target("dns:///replicas.example:50052") == DnsName("replicas.example", 50052)
    assert str(DnsName("replicas.example", 50052)) == "dns:///replicas.example:50052"
    assert parse_target("replicas.example:50052") == TcpAddress("replicas.example", 50052)
    for wrong in ("dns:a:1", "dns://1.1.1.1/a:1", *(f"dns:///{name}" for name in ("a", ":1", "a:0", "a:x", "[::1]:1"))):
        with pytest.raises(ConfigurationError, match="dns:///NAME:PORT"):
            parse_target(wrong)


def test_local_addresses_are_known() -> None:
    assert all(map(is_local, ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:x")))
    assert not any(map(is_local, ("10.0.0.1:1", "example.org:1")))


def test_a_path_that_is_too_long_for_a_socket_or_taken_by_a_file_is_refused_and_kept(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="longer than 107 bytes"):
        check_bindable(UnixAddress(tmp_path / ("x" * 108)))
    file = tmp_path / "f"
    file.write_text("precious")
    with pytest.raises(ConfigurationError, match="not a socket"):
        check_bindable(UnixAddress(file))
    assert file.read_text() == "precious"


def test_a_socket_whose_process_stands_still_is_in_use_and_one_of_another_kind_is_kept(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as full, socket.socket(socket.AF_UNIX) as waiting:
        full.bind(str(tmp_path / "full"))
        full.listen(0)
        waiting.connect(str(tmp_path / "full"))
        with pytest.raises(AddressInUse, match="the socket is in use"):
            check_bindable(UnixAddress(tmp_path / "full"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "other"))
        with pytest.raises(ConfigurationError, match=f"cannot listen on unix:{tmp_path}/other: "):
            check_bindable(UnixAddress(tmp_path / "other"))


# A port that our processes share, and no other process gets.


HOST = "127.0.0.1"


def make_listener(port: int, *, reuse_port: bool = True, host: str = HOST) -> socket.socket:
    """Listens like gRPC and uvicorn."""
    return socket.create_server((host, port), reuse_port=reuse_port)


@pytest.fixture
def reserved() -> Iterator[ReservedPort]:
    port = ReservedPort.reserve(HOST, 0)
    yield port
    port.release()


def test_a_second_server_is_refused_whether_or_not_somebody_listens_now(reserved: ReservedPort) -> None:
    port = reserved.address.port

    def assert_refused() -> None:
        with pytest.raises(AddressInUse, match=f"^cannot listen on {HOST}:{port}: the port is in use$"):
            ReservedPort.reserve(HOST, port)
        with pytest.raises(AddressInUse):
            check_bindable(TcpAddress(HOST, port))

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, port), timeout=30)
    assert_refused()
    with make_listener(port):
        assert_refused()


def test_a_port_that_somebody_else_has_is_refused_also_where_they_would_share_it() -> None:
    for reuse_port in (True, False):
        with make_listener(0, reuse_port=reuse_port) as listener, pytest.raises(AddressInUse):
            ReservedPort.reserve(HOST, listener.getsockname()[1])


@pytest.mark.parametrize("reuse_port", [True, False])
def test_a_port_whose_server_just_left_connections_behind_is_free(reuse_port: bool) -> None:
    listener = make_listener(0, reuse_port=reuse_port)
    port = listener.getsockname()[1]
    client = socket.create_connection((HOST, port), timeout=30)
    connection, _ = listener.accept()
    # The port lingers at the side that closes first.
    connection.close()
    assert client.recv(1) == b""
    client.close()
    listener.close()
    reserved = ReservedPort.reserve(HOST, port)
    make_listener(port).close()
    reserved.release()


def test_a_name_of_several_addresses_has_the_same_port_at_each() -> None:
    reserved = ReservedPort.reserve("localhost", 0)
    found = socket.getaddrinfo("localhost", reserved.address.port, type=socket.SOCK_STREAM)
    for _, _, _, _, sockaddr in found:
        with pytest.raises(AddressInUse):
            check_bindable(TcpAddress(str(sockaddr[0]), reserved.address.port))
    reserved.release()


def test_it_is_free_once_it_is_released_and_an_address_that_this_machine_lacks_is_refused(
    reserved: ReservedPort,
) -> None:
    reserved.release()
    reserved.release()
    ReservedPort.reserve(HOST, reserved.address.port).release()
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ConfigurationError, match=f"cannot listen on {host}:0"):
            ReservedPort.reserve(host, 0)


def test_a_port_that_is_lent_is_its_borrowers_again_and_again_and_nobody_elses() -> None:
    lent = ReservedPort.lend()
    port = lent.address.port
    for _ in range(2):
        # TCPStore, gRPC and most others listen so; a second one finds the port in use.
        with socket.create_server((HOST, port)) as borrower, socket.create_connection((HOST, port), timeout=60):
            borrower.accept()[0].close()
            with pytest.raises(AddressInUse):
                check_bindable(TcpAddress(HOST, port))
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, port))
    lent.release()
