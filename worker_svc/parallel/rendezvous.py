"""Ranks of a model find each other by torch.distributed, and each notices when another one ends.

A rank that loses another one cannot go on, and its results cannot be trusted: it ends its process at once. The
supervisor starts it again, and the ranks begin a new rendezvous.

Rank 0 serves a store, in which every rank writes heartbeats. In addition, each other rank has a TCP connection with
rank 0, its lifeline, which closes when either process ends, for any reason; a rank that shuts down says so before.
Each rank but the first listens on the address from which it reaches rank 0, and rank 0 connects to it, as Gloo does.
If no connection can be made, or a machine vanishes without closing it, heartbeats remain.
"""

import hmac
import logging
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from quire.rpc.address import TcpAddress, is_local, parse_address
from quire.rpc.process import LOST_PEER_EXIT_STATUS, leave_process
from quire.runtime import clock, entropy
from quire.runtime.settings import ConfigurationError
from quire_kernels import exchange
from quire_kernels.exchange import MAX_RANKS
from worker_svc.parallel.ranks import ALONE, DistributedRanks, Ranks, SharedMemoryRanks
from worker_svc.settings import WorkerSettings

_CONNECT_TIMEOUT_S = 5.0
_CONNECT_INTERVAL_S = 0.05
_NO_MEMORY = "none"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group (struct ucred)."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """The time that ranks wait for each other.

    Attributes:
        rendezvous: for all ranks to come, and then for one that is late in a collective operation. A living rank may be
            late by minutes: it reads its part of the model from a colder disk. So this does not detect lost ranks: the
            watch notices ranks that ended or fell silent, the hang guard a device that hangs, and a step that not all
            ranks have ends when they are attached again (`Ranks.agree`).
        heartbeat_s: between two heartbeats.
        silence_s: without a heartbeat until a rank counts as lost.
    """

    rendezvous: timedelta = timedelta(minutes=10)
    heartbeat_s: float = 0.25
    silence_s: float = 10.0


_PATIENCE = Patience()


def rendezvous(
    settings: WorkerSettings, device: torch.device, stopping: threading.Event, patience: Patience = _PATIENCE
) -> Ranks:
    """Waits until all ranks of the settings are there. To be called in the device thread, once in a process.

    If they do not all come, this rank ends its process, since another one may only be late. It also ends its process
    when another rank ends for any reason, unless `stopping` says that this process is being stopped itself.

    Raises:
        ConfigurationError: rank 0 cannot listen on the address.
    """
    size, rank = settings.tensor_parallel_size, settings.tensor_parallel_rank
    if size == 1:
        return ALONE
    _logger.info("rank %d of %d: waiting for the others at %s", rank, size, settings.tensor_parallel_address)
    warn_if_exposed(settings.tensor_parallel_address)
    address = parse_address(settings.tensor_parallel_address)
    assert isinstance(address, TcpAddress)
    served = _serve_store(address, patience) if rank == 0 else None
    try:
        store = _enter(served, address, rank, size, patience)
        store.wait([f"entered/{other}" for other in range(size)], patience.rendezvous)
        _start_watch(address, rank, size, patience, stopping)
        backend = backend_for(device)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience.rendezvous)
        memory = share_memory(store, rank, size) if device.type == "cpu" else None
    except RuntimeError as error:
        _leave(
            f"not all of the {size} ranks came to --tensor-parallel-address {settings.tensor_parallel_address}: {error}"
        )
    if memory is not None:
        return SharedMemoryRanks(rank, size, _leave, memory)
    if device.type == "cpu":
        _logger.info("ranks do not share memory and exchange messages by Gloo")
    return DistributedRanks(rank, size, _leave)


def warn_if_exposed(address: str) -> None:
    """Warns about a rendezvous that other machines reach: torch.distributed has neither TLS nor authentication."""
    if not is_local(address):
        _logger.warning(
            "ranks rendezvous at %s: their messages are not encrypted, and any process that reaches it may pose "
            "as a rank; use a separate network",
            address,
        )


def backend_for(device: torch.device) -> str:
    """The torch.distributed backends of a group with models on this device; each tensor's own device selects one."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _leave(why: str) -> NoReturn:
    leave_process(f"{why}; the ranks need a new rendezvous", LOST_PEER_EXIT_STATUS)


def _serve_store(address: TcpAddress, patience: Patience) -> TCPStore:
    """The store of a new group, in this process."""
    try:
        return TCPStore(address.host, address.port, None, True, patience.rendezvous, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigurationError(f"rank 0 cannot listen on --tensor-parallel-address {address}: {error}") from error


def _open_store(address: TcpAddress, patience: Patience) -> TCPStore:
    return TCPStore(address.host, address.port, None, False, patience.rendezvous)


def _wait_until_served(address: TcpAddress, deadline: float) -> None:
    """Returns soon after rank 0 listens, or at the deadline. A TCPStore itself retries at growing intervals."""
    while clock.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S):
            return
        clock.sleep(_CONNECT_INTERVAL_S)


def _enter(served: TCPStore | None, address: TcpAddress, rank: int, size: int, patience: Patience) -> TCPStore:
    """The store of a group that this rank is new to: the `served` one, or rank 0's.

    A rank that was started again may find the store of its predecessor's group. That group is about to end: the other
    ranks see that this rank entered twice.
    """
    deadline = clock.monotonic() + patience.rendezvous.total_seconds()
    while True:
        if served is None:
            _wait_until_served(address, deadline)
        store = _open_store(address, patience) if served is None else served
        try:
            if store.add(f"entered/{rank}", 1) == 1:
                return store
        except RuntimeError as error:
            _logger.debug("the store went away: %s", error)
        if clock.monotonic() > deadline:
            raise RuntimeError(f"another process has been rank {rank} of {size} of the group at {address} all the time")
        clock.sleep(patience.heartbeat_s)


def _start_watch(address: TcpAddress, rank: int, size: int, patience: Patience, stopping: threading.Event) -> None:
    store = _open_store(address, patience)
    # Not a daemon thread, as the device thread that calls this is: the interpreter would end it inside the store's C++
    # code at exit, which aborts the process.
    threading.Thread(
        target=_watch, args=(store, address, rank, size, patience, stopping), name="ranks", daemon=False
    ).start()


def _watch(
    store: TCPStore, address: TcpAddress, rank: int, size: int, patience: Patience, stopping: threading.Event
) -> None:
    """Leaves when another rank ended, was started again or is silent. The store ends with rank 0.

    Returns when the main thread has ended. Ranks that are stopped together end in any order.
    """

    def leave(why: str) -> None:
        if not stopping.is_set():
            _leave(why)

    main = threading.main_thread()
    others = [other for other in range(size) if other != rank]
    heartbeats = dict.fromkeys(others, -1)
    heard_at = dict.fromkeys(others, clock.monotonic())
    lifelines = Lifelines(leave)
    to_connect = [] if rank else others.copy()
    offer = lifelines.offer(address.host, address.port) if rank else None
    while main.is_alive():
        if stopping.is_set():
            # A shutdown is short, and this rank no longer depends on the others; or it is called off.
            heard_at = dict.fromkeys(others, clock.monotonic())
            main.join(patience.heartbeat_s)
            continue
        try:
            if offer is not None:
                store.set(f"lifeline/{rank}", offer)
                offer = None
            for other in [other for other in to_connect if store.check([f"lifeline/{other}"])]:
                to_connect.remove(other)
                lifelines.connect(other, store.get(f"lifeline/{other}").decode())
            store.add(f"heartbeat/{rank}", 1)
            now = clock.monotonic()
            for other in others:
                if store.add(f"entered/{other}", 0) > 1:
                    leave(f"rank {other} was started again")
                if (heartbeat := store.add(f"heartbeat/{other}", 0)) != heartbeats[other]:
                    heartbeats[other], heard_at[other] = heartbeat, now
                elif now - heard_at[other] > patience.silence_s:
                    leave(f"rank {other} has been silent for {patience.silence_s:.0f} s")
        except RuntimeError as error:
            leave(f"rank 0 and its store are gone: {error}")
        main.join(patience.heartbeat_s)
    stopping.set()
    lifelines.say_goodbye()


_TAKEN = b"+"
_GOODBYE = b"."


class Lifelines:
    """The lifelines of one rank. A daemon thread makes and reads each, so that a slow connection delays no heartbeat.

    Args:
        leave: called with the reason when another rank died or shut down.
    """

    def __init__(self, leave: Callable[[str], object]) -> None:
        self._leave = leave
        self._connections: list[socket.socket] = []

    def offer(self, first_host: str, first_port: int) -> str:
        """Listens for rank 0, which is at this address, in the background.

        Returns:
            The argument of rank 0's `connect`; empty if this rank cannot listen.
        """
        token = entropy.random_hex(16)
        try:
            listener = socket.create_server((_own_host(first_host, first_port), 0), family=_family(first_host))
        except OSError as error:
            _logger.info("no lifeline to rank 0: %s", error)
            return ""
        threading.Thread(target=self._accept, args=(listener, token.encode()), name="lifeline 0", daemon=True).start()
        host, port = listener.getsockname()[:2]
        return f"{port} {token} {host}"

    def connect(self, rank: int, offer: str) -> None:
        """Connects rank 0 to another rank by its offer, in the background."""
        if offer:
            threading.Thread(target=self._connect, args=(rank, offer), name=f"lifeline {rank}", daemon=True).start()

    def say_goodbye(self) -> None:
        """Tells the other ranks that this process shuts down, before its connections close."""
        for connection in self._connections:
            with suppress(OSError):
                connection.sendall(_GOODBYE)

    def _connect(self, rank: int, offer: str) -> None:
        port, token, host = offer.split(" ", 2)
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S)
        except OSError as error:
            _logger.info("no lifeline to rank %d: %s", rank, error)
            return
        with connection:
            # Before the token is sent, because the side that accepted the connection expects a goodbye.
            self._connections.append(connection)
            try:
                connection.sendall(token.encode())
                connection.settimeout(None)
                # A rank that shuts down before it accepts the connection resets it, and did not die.
                first_word = connection.recv(1)
            except OSError as error:
                _logger.info("no lifeline to rank %d: %s", rank, error)
                return
            if first_word == _GOODBYE:
                self._leave(f"rank {rank} shut down")
            elif first_word == _TAKEN:
                self._wait_for_end(connection, rank)

    def _accept(self, listener: socket.socket, token: bytes) -> None:
        with listener:
            while True:
                connection, _ = listener.accept()
                connection.settimeout(_CONNECT_TIMEOUT_S)
                with suppress(OSError):
                    if hmac.compare_digest(_receive(connection, len(token)), token):
                        break
                connection.close()
        with connection:
            self._connections.append(connection)
            with suppress(OSError):
                connection.sendall(_TAKEN)
            self._wait_for_end(connection, 0)

    def _wait_for_end(self, connection: socket.socket, rank: int) -> None:
        connection.settimeout(None)
        try:
            last_word = connection.recv(1)
        except OSError:
            last_word = b""
        self._leave(f"rank {rank} shut down" if last_word == _GOODBYE else f"rank {rank} died")


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Receives `num_bytes` bytes, or fewer if the other side closes before."""
    data = b""
    while len(data) < num_bytes and (piece := connection.recv(num_bytes - len(data))):
        data += piece
    return data


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _own_host(first_host: str, first_port: int) -> str:
    """This machine's address on the route to rank 0. Nothing is sent."""
    with socket.socket(_family(first_host), socket.SOCK_DGRAM) as probe:
        probe.connect((first_host, first_port))
        return probe.getsockname()[0]


def share_memory(store: Store, rank: int, size: int) -> torch.Tensor | None:
    """Memory that all ranks have mapped, or None for all of them if one cannot map it. Each rank calls this once.

    The memory is a file without a name, so the system frees it when the last rank ends, in any way and at any moment.
    Rank 0 passes the file to the others through a socket whose name, 128 random bits, is in the store.
    """
    with ExitStack() as offering:
        if rank == 0:
            file, memory = _make_memory(size)
            name = _NO_MEMORY if file is None else offering.enter_context(_offer(file))
            store.set("shared_memory", name)
        else:
            memory = _open_memory(store.get("shared_memory").decode(), size)
        store.set(f"shared_memory/{rank}", "no" if memory is None else "yes")
        return memory if all(store.get(f"shared_memory/{other}") == b"yes" for other in range(size)) else None


def _make_memory(size: int) -> tuple[int | None, torch.Tensor | None]:
    if size > MAX_RANKS or not exchange.can_exchange():
        return None, None
    file = None
    try:
        file = os.memfd_create("quire", os.MFD_CLOEXEC)
        # Allocated, and not only sized: a lack of memory later would kill the process.
        os.posix_fallocate(file, 0, exchange.shared_bytes(size))
        return file, _map_memory(file, size)
    except OSError as error:
        _logger.warning("ranks cannot share memory: %s", error)
        if file is not None:
            os.close(file)
        return None, None


@contextmanager
def _offer(file: int) -> Iterator[str]:
    """Passes the file to each process of the same user that connects to the socket of this name. Closes it at the end
    of the block.

    The socket is in the abstract namespace: it is reached by the processes of one machine or one pod, and leaves
    nothing behind.
    """
    name = f"quire-{entropy.random_hex(16)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def pass_on() -> None:
            # Until the listener is shut down.
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        if _is_of_same_user(connection):
                            socket.send_fds(connection, [b"+"], [file])

        passing = threading.Thread(target=pass_on, name="shared memory", daemon=True)
        passing.start()
        try:
            yield name
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            passing.join()
            os.close(file)


def _open_memory(name: str, size: int) -> torch.Tensor | None:
    if name == _NO_MEMORY or not exchange.can_exchange():
        return None
    files: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(f"\0{name}")
            if _is_of_same_user(connection):
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
        if files:
            return _map_memory(files[0], size)
        reason: object = "it is of another user"
    except OSError as error:
        reason = error
    finally:
        for file in files:
            os.close(file)
    _logger.info("this rank does not share memory with rank 0: %s", reason)
    return None


def _is_of_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket runs as this process's user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user == os.geteuid()


def _map_memory(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, exchange.shared_bytes(size)), dtype=torch.uint8)
