"""Connections by which ranks detect each other's death."""

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from quire.rpc.address import TcpAddress
from quire_kernels import exchange
from worker_svc.parallel import rendezvous
from worker_svc.parallel.rendezvous import Lifelines, Patience, share_memory


def make_lifelines() -> tuple[Lifelines, "queue.Queue[str]"]:
    """Lifelines, and the reasons for which they would have ended their process."""
    reasons: queue.Queue[str] = queue.Queue()
    leave: Callable[[str], Any] = reasons.put
    return Lifelines(leave), reasons


def test_a_rank_that_ends_in_order_says_so_to_the_rank_that_holds_its_connection() -> None:
    ending, _ = make_lifelines()
    first, reasons = make_lifelines()
    first.connect(1, ending.offer("127.0.0.1", 9))
    while reasons.empty():
        # A connection that has yet to be accepted gets no message.
        ending.say_goodbye()
    assert reasons.get() == "rank 1 shut down"


@pytest.mark.parametrize("answer", [b"", b".", b"+"])
def test_a_connection_closes_in_whichever_way_it_ends(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[socket.socket] = []
    create_connection = socket.create_connection

    def create_and_keep(*arguments: Any) -> socket.socket:
        made.append(create_connection(*arguments))
        return made[0]

    monkeypatch.setattr(socket, "create_connection", create_and_keep)
    lifelines, _ = make_lifelines()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        lifelines.connect(1, f"{listener.getsockname()[1]} token 127.0.0.1")
        with listener.accept()[0] as connection:
            assert connection.recv(5) == b"token"
            connection.sendall(answer)
    for thread in [thread for thread in threading.enumerate() if thread.name == "lifeline 1"]:
        thread.join(30)
    assert made[0].fileno() == -1


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


SIZE = 3


class WatchedStore(HashStore):
    """Checks at each access the state that would be left if the rank were killed there."""

    def set(self, key: str, value: str) -> None:
        self.look()
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.look()
        return super().get(key)

    def look(self) -> None:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
        assert not [name for name in mapped if "quire-" in Path(name).name and Path(name).exists()]


def shared_by_all() -> list[torch.Tensor | None]:
    store = WatchedStore()
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: share_memory(store, rank, SIZE), range(SIZE)))


def fail(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_what_one_rank_writes_all_others_read_and_a_killed_rank_leaves_no_file() -> None:
    memories = [memory for memory in shared_by_all() if memory is not None]
    assert len(memories) == SIZE
    for memory in memories:
        assert memory.shape == (exchange.shared_bytes(SIZE),)
        assert not memory.any()
    memories[1][-1] = 7
    assert [int(memory[-1]) for memory in memories] == [7] * SIZE


def on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def connect_but_for_one(self: socket.socket, address: str) -> None:
        if threading.current_thread().name.endswith("_1"):
            raise ConnectionRefusedError(111, "Connection refused")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_but_for_one)


def replaced(owner: Any, name: str, value: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, value)


def open_memories() -> list[str]:
    links: list[str] = []
    for file in Path("/proc/self/fd").iterdir():
        # Threads of other tests may close their connections meanwhile.
        with suppress(FileNotFoundError):
            links.append(str(file.readlink()))
    return [link for link in links if link.startswith("/memfd:quire (")]


@pytest.mark.parametrize(
    "spoil",
    [
        on_another_machine,
        replaced(rendezvous, "_is_of_same_user", lambda _: False),
        replaced(rendezvous.os, "posix_fallocate", fail),
        replaced(rendezvous.os, "memfd_create", fail),
        replaced(rendezvous.exchange, "can_exchange", lambda: False),
    ],
)
def test_where_one_rank_has_none_none_has(
    spoil: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        spoil(patch)
        assert shared_by_all() == [None] * SIZE
    assert open_memories() == []


class FakeMain:
    """A main thread that ends when the test says so. `is_awaited` is set once the watch waits for it."""

    def __init__(self) -> None:
        self.ends, self.is_awaited = threading.Event(), threading.Event()

    def is_alive(self) -> bool:
        return not self.ends.is_set()

    def join(self, timeout: float | None = None) -> None:
        self.is_awaited.set()
        self.ends.wait(timeout)


class FakeStore:
    """The store of two ranks; the other rank lives."""

    def __init__(self) -> None:
        self.num_added, self.has_heartbeat = 0, threading.Event()

    def check(self, keys: list[str]) -> bool:
        return False

    def add(self, key: str, amount: int) -> int:
        if key == "heartbeat/0":
            self.has_heartbeat.set()
        self.num_added += 1
        return 1 if key == "entered/1" else self.num_added


def test_a_rank_whose_end_is_called_off_is_heard_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a worker whose weights were to be discarded, if another rank could not do it."""
    main, store, stopping = FakeMain(), FakeStore(), threading.Event()
    monkeypatch.setattr(rendezvous.threading, "main_thread", lambda: main)
    arguments = (store, TcpAddress("127.0.0.1", 1), 0, 2, Patience(heartbeat_s=0.01), stopping)
    stopping.set()
    watch = threading.Thread(target=rendezvous._watch, args=arguments, daemon=True)
    watch.start()
    try:
        assert main.is_awaited.wait(10)
        assert not store.has_heartbeat.is_set()
        stopping.clear()
        assert store.has_heartbeat.wait(5)
    finally:
        main.ends.set()
        watch.join(10)
    assert stopping.is_set()
