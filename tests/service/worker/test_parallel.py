"""Ranks in processes of their own: what they compute together, and how each of them ends."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO

import pytest

from quire.rpc.address import free_port
from worker_svc.parallel import LEFT_BY_ANOTHER_RANK, warn_if_exposed

TIMEOUT_S = 60


BOTH_WAYS = pytest.mark.parametrize("by", ["memory", "messages"])


@contextmanager
def running_ranks(what: str, by: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks that have met."""
    address = f"127.0.0.1:{free_port()}"
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.rank_process", str(rank), "2", address, what, by],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in range(2)
        ]
        for rank in ranks:
            stack.callback(rank.kill)
        assert [stream(rank.stdout).readline() for rank in ranks] == ["met\n"] * 2
        yield ranks


def stream(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def ended(rank: subprocess.Popen[str], said: str = "") -> tuple[int, str]:
    _, errors = rank.communicate(said, timeout=TIMEOUT_S)
    return rank.returncode, errors


@BOTH_WAYS
def test_ranks_compute_the_same_and_end_in_order(by: str) -> None:
    with running_ranks("sum", by) as ranks:
        lines = [stream(rank.stdout).readline() for rank in ranks]
        assert lines == ["[3.0, 3.0] [[0.0, 1.0, 2.0, 3.0, 4.0]] (3, -1)\n"] * 2
        # The first one has the store, so it ends last.
        assert [ended(rank, "\n") for rank in reversed(ranks)] == [(0, ""), (0, "")]


@BOTH_WAYS
def test_ranks_that_are_about_to_run_different_steps_leave(by: str) -> None:
    with running_ranks("rank", by) as ranks:
        assert [ended(rank)[0] for rank in ranks] == [LEFT_BY_ANOTHER_RANK] * 2


@BOTH_WAYS
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_leaves_a_sum_that_another_one_will_not_join(victim: int, by: str) -> None:
    with running_ranks("wait", by) as ranks:
        survivor = ranks[1 - victim]
        ranks[victim].kill()
        status, errors = ended(survivor, "\n")
        assert status == LEFT_BY_ANOTHER_RANK
        assert "the ranks are to meet anew; leaving" in errors


@pytest.mark.parametrize(("address", "warned"), [("10.0.0.3:50063", True), ("127.0.0.1:50063", False)])
def test_a_meeting_beyond_this_machine_is_warned_of(
    address: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_exposed(address)
    assert ("not encrypted" in caplog.text) == warned
