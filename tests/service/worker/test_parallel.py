"""Ranks in separate processes: their common results, and how each of them ends."""

import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from quire.rpc.process import LOST_PEER_EXIT_STATUS
from quire.runtime.settings import ConfigurationError
from quire.testing import free_port
from tests.support.serving import forked_worker, running_fork
from worker_svc.parallel.rendezvous import rendezvous, warn_if_exposed
from worker_svc.settings import WorkerSettings

pytestmark = pytest.mark.extended

TIMEOUT_S = 60


Rank = subprocess.Popen[str]
RunRanks = Callable[..., AbstractContextManager[list[Rank]]]


def running_rank(
    rank: int, size: int, port: int, what: str, by: str, meeting_s: float = TIMEOUT_S
) -> AbstractContextManager[Rank]:
    words = (str(rank), str(size), f"127.0.0.1:{port}", what, by, str(meeting_s))
    return running_fork(forked_worker("tests.support.rank_process"), *words)


@pytest.fixture
def running_ranks() -> RunRanks:
    @contextmanager
    def run(what: str, by: str, size: int = 2) -> Iterator[list[Rank]]:
        """Ranks after their rendezvous."""
        port = free_port()
        with ExitStack() as stack:
            ranks = [stack.enter_context(running_rank(rank, size, port, what, by)) for rank in range(size)]
            assert [rank.stdout.readline() for rank in ranks] == ["met\n"] * size
            yield ranks

    return run


def ended(rank: Rank, said: str = "") -> tuple[int | None, str]:
    _, errors = rank.communicate(said, timeout=TIMEOUT_S)
    return rank.returncode, errors


def stop_all(ranks: list[Rank]) -> None:
    """Signals every rank before any of them ends."""
    for rank in ranks:
        rank.stdin.write("\n")
    assert [rank.stdout.readline() for rank in ranks] == ["stopping\n"] * len(ranks)


@pytest.mark.parametrize("by", ["memory", "messages"])
def test_ranks_compute_the_same_and_end_in_order(running_ranks: RunRanks, by: str) -> None:
    with running_ranks("sum", by) as ranks:
        lines = [rank.stdout.readline() for rank in ranks]
        assert lines == ["[3.0, 3.0] [[0.0, 1.0, 2.0, 3.0, 4.0]] (3, -1)\n"] * 2
        stop_all(ranks)
        # Rank 0 has the store, and ends first.
        assert [ended(rank, "\n") for rank in ranks] == [(0, ""), (0, "")]


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_leaves_at_once_when_another_one_alone_ends_in_order(running_ranks: RunRanks, first: int) -> None:
    with running_ranks("sum", "memory") as ranks:
        assert all(rank.stdout.readline() for rank in ranks)
        assert ended(ranks[first], "\n\n") == (0, "")
        survivor = ranks[1 - first]
        assert survivor.wait(TIMEOUT_S) == LOST_PEER_EXIT_STATUS
        errors = survivor.stderr.read()
    assert f"rank {first} shut down" in errors or "rank 0 and its store are gone" in errors
    assert "silent" not in errors


@pytest.mark.parametrize("by", ["memory", "messages"])
def test_ranks_leave_when_a_step_fails_on_one_of_them(running_ranks: RunRanks, by: str) -> None:
    with running_ranks("fail", by) as ranks:
        (status, errors), (other_status, _) = [ended(rank) for rank in ranks]
        assert (status, other_status) == (LOST_PEER_EXIT_STATUS, LOST_PEER_EXIT_STATUS)
        assert "no room on rank 0" in errors
        assert "rank 0: step 1 failed on the device; the ranks need a new rendezvous; this process exits" in errors


@pytest.mark.parametrize(("victim", "by"), [(0, "memory"), (1, "messages")])
def test_ranks_leave_at_once_when_another_one_dies_in_a_sum_or_while_they_wait(
    running_ranks: RunRanks, victim: int, by: str
) -> None:
    """Rather than after ten seconds of silence."""
    with running_ranks("wait", by, size=3) as ranks:
        summing, waiting = (ranks[rank] for rank in range(3) if rank != victim)
        ranks[victim].kill()
        status, errors = ended(summing, "\n")
        others = waiting.wait(TIMEOUT_S), waiting.stderr.read()
    assert "the ranks need a new rendezvous; this process exits" in errors
    assert status == others[0] == LOST_PEER_EXIT_STATUS
    assert "silent" not in others[1]


def test_a_rank_to_which_the_others_do_not_come_in_time_leaves_and_may_try_again() -> None:
    with running_rank(1, 2, free_port(), "sum", "memory", meeting_s=1.0) as alone:
        status, errors = ended(alone)
    assert status == LOST_PEER_EXIT_STATUS
    assert "not all of the 2 ranks came to --tensor-parallel-address" in errors


def test_a_rank_waits_no_longer_for_one_that_died_while_they_met() -> None:
    port = free_port()
    with running_rank(0, 2, port, "sum", "memory", meeting_s=2 * TIMEOUT_S) as survivor:
        # Rank 1 up to its loss, and its successor.
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT_S))
        assert [store.add("entered/1", 1) for _ in range(2)] == [1, 2]
        status, errors = ended(survivor)
    assert status == LOST_PEER_EXIT_STATUS
    assert "rank 1 was started again" in errors


def test_an_address_that_is_taken_is_a_wrong_setting() -> None:
    taken = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT_S), wait_for_workers=False)
    address = f"127.0.0.1:{taken.port}"
    settings = WorkerSettings(tensor_parallel_size=2, tensor_parallel_address=address)
    with pytest.raises(ConfigurationError, match=f"rank 0 cannot listen on --tensor-parallel-address {address}"):
        rendezvous(settings, torch.device("cpu"), threading.Event())


@pytest.mark.parametrize(("address", "warned"), [("10.0.0.3:50063", True), ("127.0.0.1:50063", False)])
def test_a_meeting_beyond_this_machine_is_warned_of(
    address: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_exposed(address)
    assert ("not encrypted" in caplog.text) == warned
