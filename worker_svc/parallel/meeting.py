"""How ranks meet, by torch.distributed, and what they then exchange tensors by.

A rank that loses another one cannot go on, and what it computes cannot be trusted: it leaves its process at once. Who
started it starts it again, and the ranks meet anew.
"""

import logging
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from quire.rpc.address import TcpAddress, is_local, parse_address
from quire.rpc.process import LOST_PEER_EXIT_STATUS
from quire.settings import ConfigurationError
from worker_svc.leaving import leave_process
from worker_svc.parallel.distributed_ranks import DistributedRanks
from worker_svc.parallel.lifeline import Lifelines
from worker_svc.parallel.ranks import ALONE, Ranks
from worker_svc.parallel.shared_memory import share_memory
from worker_svc.parallel.shared_ranks import SharedMemoryRanks
from worker_svc.settings import WorkerSettings

_CONNECT_TIMEOUT_S = 5.0
_CONNECT_INTERVAL_S = 0.05
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long ranks wait for each other.

    Attributes:
        meeting: for all to come, and then for one that is late in anything that all do together. A living rank may be
            late by minutes: it reads its part of the model from a colder disk. So this is no means to find one that is
            gone: the watch notices ranks that died or fell silent, the hang guard a device that does not come back,
            and a step that not all have ends when they are attached again (`Ranks.agree`).
        beat_s: between two signs of life.
        silence_s: without a sign of life until a rank counts as gone.
    """

    meeting: timedelta = timedelta(minutes=10)
    beat_s: float = 0.25
    silence_s: float = 10.0


_PATIENCE = Patience()


def meet(
    settings: WorkerSettings, device: torch.device, stopping: threading.Event, patience: Patience = _PATIENCE
) -> Ranks:
    """Waits until all ranks of the settings are there. To be called in the device thread, once in a process.

    Where they do not come together this rank leaves its process: another one may only be late. It leaves too when
    another rank ends, in order or not, unless `stopping` says that this process is being stopped itself.

    Raises:
        ConfigurationError: rank 0 cannot listen on the address.
    """
    size, rank = settings.tensor_parallel_size, settings.tensor_parallel_rank
    if size == 1:
        return ALONE
    _logger.info("rank %d of %d: meeting the others at %s", rank, size, settings.tensor_parallel_address)
    warn_if_exposed(settings.tensor_parallel_address)
    address = parse_address(settings.tensor_parallel_address)
    assert isinstance(address, TcpAddress)
    served = _serve_store(address, patience) if rank == 0 else None
    try:
        store = _enter(served, address, rank, size, patience)
        store.wait([_entered(other) for other in range(size)], patience.meeting)
        _start_watch(address, rank, size, patience, stopping)
        dist.init_process_group(backend_for(device), store=store, rank=rank, world_size=size, timeout=patience.meeting)
        return _ranks_that_met(store, rank, size, device)
    except (RuntimeError, dist.DistError) as error:
        _leave(
            f"the {size} ranks did not meet at --tensor-parallel-address {settings.tensor_parallel_address}: {error}"
        )


def _ranks_that_met(store: TCPStore, rank: int, size: int, device: torch.device) -> Ranks:
    if device.type != "cpu":
        return DistributedRanks(rank, size, _leave)
    memory = share_memory(store, rank, size)
    if memory is None:
        _logger.info("ranks do not share memory, and exchange messages by Gloo")
        return DistributedRanks(rank, size, _leave)
    return SharedMemoryRanks(rank, size, _leave, memory)


def warn_if_exposed(address: str) -> None:
    """torch.distributed neither encrypts nor asks who comes; its builds have no transport with TLS."""
    if not is_local(address):
        _logger.warning(
            "ranks meet at %s: what they send each other is not encrypted, and whoever reaches it may take a rank's "
            "place; keep it on a network of its own",
            address,
        )


def backend_for(device: torch.device) -> str:
    """What torch.distributed calls the backends of a group whose model is on such a device: it takes the one of each
    tensor's device."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def _leave(why: str) -> NoReturn:
    leave_process(f"{why}; the ranks are to meet anew", LOST_PEER_EXIT_STATUS)


def _serve_store(address: TcpAddress, patience: Patience) -> TCPStore:
    """The store in this process, by which the ranks of a new group meet."""
    try:
        return TCPStore(address.host, address.port, None, True, patience.meeting, wait_for_workers=False)
    except RuntimeError as error:
        raise ConfigurationError(f"rank 0 cannot listen on --tensor-parallel-address {address}: {error}") from error


def _open_store(address: TcpAddress, patience: Patience) -> TCPStore:
    return TCPStore(address.host, address.port, None, False, patience.meeting)


def _wait_until_served(address: TcpAddress, deadline: float) -> None:
    """Returns soon after rank 0 listens, or at the deadline; a TCPStore alone comes back ever more seldom."""
    while time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((address.host, address.port), timeout=_CONNECT_TIMEOUT_S):
            return
        time.sleep(_CONNECT_INTERVAL_S)


def _enter(served: TCPStore | None, address: TcpAddress, rank: int, size: int, patience: Patience) -> TCPStore:
    """The store of a group that this rank is new to: the `served` one, or that of rank 0.

    A rank that was started again may find the store of the group that its predecessor was in. That one is about to end:
    the others see that somebody came twice.
    """
    deadline = time.monotonic() + patience.meeting.total_seconds()
    while True:
        if served is None:
            _wait_until_served(address, deadline)
        store = _open_store(address, patience) if served is None else served
        try:
            if store.add(_entered(rank), 1) == 1:
                return store
        except RuntimeError as error:
            _logger.debug("the store went away: %s", error)
        if time.monotonic() > deadline:
            raise RuntimeError(f"the group at {address} has had a rank {rank} of {size} all the time")
        time.sleep(patience.beat_s)


def _start_watch(address: TcpAddress, rank: int, size: int, patience: Patience, stopping: threading.Event) -> None:
    store = _open_store(address, patience)
    # Not a daemon, as the device thread that calls this is: the interpreter would end it on its way out of the store,
    # inside C++, and that aborts the process.
    threading.Thread(
        target=_watch, args=(store, address, rank, size, patience, stopping), name="ranks", daemon=False
    ).start()


def _watch(
    store: TCPStore, address: TcpAddress, rank: int, size: int, patience: Patience, stopping: threading.Event
) -> None:
    """Leaves when another rank ended, was started again or is silent. The store goes with rank 0.

    Returns when the main thread has ended. Ranks that are stopped together end in any order.
    """

    def leave(why: str) -> None:
        if not stopping.is_set():
            _leave(why)

    main = threading.main_thread()
    others = [other for other in range(size) if other != rank]
    beats = dict.fromkeys(others, -1)
    heard_at = dict.fromkeys(others, time.monotonic())
    lifelines = Lifelines(leave)
    to_connect = [] if rank else others.copy()
    offer = lifelines.offer(address.host, address.port) if rank else None
    while main.is_alive() and not stopping.is_set():
        try:
            if offer is not None:
                store.set(_lifeline(rank), offer)
                offer = None
            for other in [other for other in to_connect if store.check([_lifeline(other)])]:
                to_connect.remove(other)
                lifelines.connect(other, store.get(_lifeline(other)).decode())
            store.add(_beat(rank), 1)
            now = time.monotonic()
            for other in others:
                if store.add(_entered(other), 0) > 1:
                    leave(f"rank {other} was started again")
                if (beat := store.add(_beat(other), 0)) != beats[other]:
                    beats[other], heard_at[other] = beat, now
                elif now - heard_at[other] > patience.silence_s:
                    leave(f"rank {other} has been silent for {patience.silence_s:.0f} s")
        except RuntimeError as error:
            leave(f"rank 0 and its store are gone: {error}")
        main.join(patience.beat_s)
    # An ordered end is short. What the others do meanwhile is not this rank's concern.
    stopping.set()
    main.join()
    lifelines.say_goodbye()


def _entered(rank: int) -> str:
    return f"entered/{rank}"


def _beat(rank: int) -> str:
    return f"beat/{rank}"


def _lifeline(rank: int) -> str:
    return f"lifeline/{rank}"
