"""Connections by which ranks notice each other's death."""

import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from worker_svc.parallel.lifeline import Lifelines


def make_lifelines() -> tuple[Lifelines, "queue.Queue[str]"]:
    """Lifelines, and the reasons for which they would have ended their process."""
    reasons: queue.Queue[str] = queue.Queue()
    leave: Callable[[str], Any] = reasons.put
    return Lifelines(leave), reasons


def test_a_token_may_come_in_pieces_and_an_end_without_goodbye_is_a_death() -> None:
    lifelines, reasons = make_lifelines()
    port, token, host = lifelines.offer("127.0.0.1", 9).split(" ", 2)
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for letter in token.encode():
            connection.sendall(bytes([letter]))
    assert reasons.get(timeout=10) == "rank 0 died"


def test_a_rank_that_ends_in_order_says_so_to_the_rank_that_holds_its_connection() -> None:
    ending, _ = make_lifelines()
    first, reasons = make_lifelines()
    first.connect(1, ending.offer("127.0.0.1", 9))
    while reasons.empty():
        # Nothing is said to a connection that has yet to be taken.
        ending.say_goodbye()
    assert reasons.get() == "rank 1 ended in order"


def test_a_connection_that_takes_long_to_come_about_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    may_fail = threading.Event()

    def create_connection(*_: object) -> NoReturn:
        may_fail.wait()
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", create_connection)
    lifelines, reasons = make_lifelines()
    lifelines.connect(1, "9 token 192.0.2.1")
    lifelines.say_goodbye()
    may_fail.set()
    assert reasons.empty()
