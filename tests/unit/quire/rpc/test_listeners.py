"""Sockets that a process inherits by systemd's protocol. The tests of the supervisor pass some to processes."""

import os
import socket
from collections.abc import Mapping

import pytest

from quire.rpc import listeners
from quire.rpc.listeners import inherited_listener, listen
from quire.runtime.settings import ConfigurationError


def environ_of(pid: int, count: int = 1) -> Mapping[str, str]:
    return {"LISTEN_PID": str(pid), "LISTEN_FDS": str(count)}


def inherit(monkeypatch: pytest.MonkeyPatch, descriptor: int) -> socket.socket | None:
    monkeypatch.setattr(listeners, "INHERITED_DESCRIPTOR", descriptor)
    return inherited_listener(environ_of(os.getpid()))


def test_a_socket_is_inherited_with_its_queue_and_no_child_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as original, socket.create_connection(original.getsockname()) as waiting:
        descriptor = os.dup(original.fileno())
        os.set_inheritable(descriptor, True)
        inherited = inherit(monkeypatch, descriptor)
        assert inherited is not None
        with inherited, inherited.accept()[0] as accepted:
            assert accepted.getpeername() == waiting.getsockname()
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert not inherited.get_inheritable()


def test_variables_of_another_process_are_not_ours() -> None:
    assert inherited_listener({}) is None
    assert inherited_listener(environ_of(os.getppid())) is None


def test_what_is_no_single_listening_socket_of_tcp_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"^LISTEN_FDS is 2; pass one socket, for HTTP$"):
        inherited_listener(environ_of(os.getpid(), count=2))
    read_end, write_end = os.pipe()
    with pytest.raises(ConfigurationError, match=rf"^descriptor {read_end} is not a socket: Socket operation on non"):
        inherit(monkeypatch, read_end)
    for end in (read_end, write_end):
        os.close(end)
    with socket.socket(socket.AF_UNIX) as unix, socket.socket() as bound:
        unix.bind("")
        unix.listen()
        bound.bind(("127.0.0.1", 0))
        for each in (unix, bound):
            with pytest.raises(
                ConfigurationError, match=r"^the inherited socket is .*; it must listen at a TCP address$"
            ):
                inherit(monkeypatch, os.dup(each.fileno()))
